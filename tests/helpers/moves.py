"""Runs that save a checkpoint and runs that continue from it, for the matrix of ``docs/checkpoints.md``.

The truth is one uninterrupted DDP run in one process. Every run sees the same samples in the same global batches of 12
(``DistributedSampler`` deals the batch out), so the mean over ranks of the ranks' losses is the same number everywhere,
but for the order in which floats are added.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.checkpoint.convert import convert
from tests.helpers.zoo import make_trainer

GLOBAL_BATCH = 12
BATCHES_PER_EPOCH = 7
STOPS = {
    "epoch end": BATCHES_PER_EPOCH,
    "mid-epoch": BATCHES_PER_EPOCH + 3,
    "mid-epoch, stateful": BATCHES_PER_EPOCH + 3,
}
"""Moment of the save -> optimizer steps until then."""
STEPS_AFTER = 10
WIDTH = 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1  # type: ignore[operator]
        return x + torch.tanh(self.inner(x)) / (1 + 0.01 * self.calls)  # type: ignore[operator]


class Features(L.LightningModule):
    """A buffer that counts, a tied weight, a frozen layer, an odd size, two parameter groups, a schedule per step."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.blocks[1].requires_grad_(False)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(WIDTH, 3)
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.first(x)
        for block in self.blocks:
            x = self.drop(block(x))
        loss = (self.last(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        head = list(self.last.parameters())
        chosen = {id(p) for p in head}
        body = [p for p in self.parameters() if p.requires_grad and id(p) not in chosen]
        optimizer = torch.optim.AdamW([{"params": body}, {"params": head, "lr": 0.02, "weight_decay": 0.0}], lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TwoOptimizers(Features):
    """Manual optimization; one optimizer of a kind that keeps no element-wise state between them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        head = list(self.last.parameters())
        chosen = {id(p) for p in head}
        body = [p for p in self.parameters() if p.requires_grad and id(p) not in chosen]
        return [torch.optim.Adam(body, lr=0.01), torch.optim.SGD(head, lr=0.05, momentum=0.9)]


class Half(Features):
    """For fp16: Adam would turn the rounding of a gradient near zero into a step of full size."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


MODULES = {"features": Features, "two optimizers": TwoOptimizers, "fp16": Half}


class StatefulLoader:
    """Deals each epoch's permutation out as DistributedSampler does and knows where it is."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.epoch, self.done = 0, 0

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size // int(os.environ["WORLD_SIZE"])

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch))
        mine = order[rank::world_size].split(self.batch_size)
        while self.done < len(self):
            self.done += 1
            yield self.dataset[mine[self.done - 1]]
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    size = GLOBAL_BATCH * BATCHES_PER_EPOCH
    return TensorDataset(torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator))


def loader(moment: str, world_size: int) -> Any:
    if moment == "mid-epoch, stateful":
        return StatefulLoader(dataset(), GLOBAL_BATCH // world_size)
    return DataLoader(dataset(), batch_size=GLOBAL_BATCH // world_size, shuffle=True)


class _SaveAt(L.Callback):
    """Saves in mid-epoch or at an epoch's end; a run that is stopped in mid-epoch has ``on_train_epoch_end`` too."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path
        self.at_epoch_end = step % BATCHES_PER_EPOCH == 0

    def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
        if trainer.global_step == self.step and not self.at_epoch_end:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, *unused: Any) -> None:
        if trainer.global_step == self.step and self.at_epoch_end:
            trainer.save_checkpoint(self.path)


class _StopAt(L.Callback):
    """Ends the run without ``max_steps``, with which Lightning's DDP resumes wrongly at an epoch's end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


@dataclass(frozen=True)
class Run:
    losses: list[float]
    """Of this rank, one per forward."""
    weights: dict[str, Tensor]
    scale: float | None
    """Of the loss, under fp16."""


def strategy_settings(name: str, form: str) -> str | dict[str, Any]:
    """``name`` is ``ddp``, ``zero<stage>``, ``zero<stage>_deepspeed`` or one of :data:`GROUPS`."""
    if name == "ddp":
        return "ddp"
    if name in GROUPS:
        shard_size = int(name.rpartition(" ")[2])
        return {"shard_size": shard_size, **strategy_settings(name[:5], form)}  # type: ignore[dict-item]
    if name.endswith("_deepspeed"):
        return {"engine": "deepspeed", "stage": int(name[4]), "checkpoint": form, "timeout_seconds": 60.0}
    return {"stage": int(name[-1]), "min_unit_numel": 1, "checkpoint": form, "timeout_seconds": 60.0}


def run(
    name: str,
    form: str,
    kind: str,
    moment: str,
    num_steps: int,
    save_at: int | None = None,
    path: str | None = None,
    resume: str | None = None,
    module_options: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Trains until ``num_steps`` optimizer steps are done (on this rank), saving on the way or at the end."""
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(17 + 1000 * int(os.environ["RANK"]) * (name != "ddp"))  # rank 0's weights count
    module = MODULES[kind](**(module_options or {}))
    if kind == "fp16":  # Lightning gives the CPU no fp16 plugin, so it is made by hand
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    manual = 2 if kind == "two optimizers" else 1  # Lightning counts the steps of every optimizer
    callbacks = [_SaveAt(save_at * manual, path)] if save_at is not None and path else []
    trainer = make_trainer(
        strategy_settings(name, form),
        callbacks=[*callbacks, *options.pop("callbacks", [_StopAt(num_steps * manual)])],
        limit_val_batches=0,
        use_distributed_sampler=moment != "mid-epoch, stateful",
        **{"max_epochs": 100, **options},
    )
    trainer.fit(module, loader(moment, world_size), ckpt_path=resume)
    if path and save_at is None:
        trainer.save_checkpoint(path)
    weights = {key: value.detach().clone() for key, value in module.state_dict().items()}
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return Run(module.losses, weights, scaler and scaler.get_scale())


# -- the matrix ------------------------------------------------------------------------------------------------------

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
GROUPS = {
    "zero3, 2 groups of 2": 4, "zero2, 2 groups of 2": 4, "zero1, 2 groups of 2": 4,
    "zero3, 2 groups of 3": 6, "zero3, 3 groups of 2": 6,
}  # fmt: skip
"""Replicas of shards (HSDP), and the ranks that this takes."""
WORLD_SIZES = (1, 2, 3, 4)
FORMS = ("file", "sharded", "sharded-async")


@dataclass(frozen=True)
class Move:
    source: str
    source_ranks: int
    source_form: str
    target: str
    target_ranks: int
    target_form: str
    moment: str
    kind: str

    def __str__(self) -> str:
        return (
            f"{self.source} x{self.source_ranks} {self.source_form} -> {self.target} x{self.target_ranks}"
            f" {self.target_form}, {self.moment}, {self.kind}"
        )

    @property
    def possible(self) -> bool:
        """Lightning's own DDP replays an interrupted epoch of a map-style loader from its first batch."""
        return not (self.target == "ddp" and self.moment == "mid-epoch")


def all_moves() -> Iterator[Move]:
    """Every strategy, world size and form to every other, with the moments and module kinds in turn."""
    rest = itertools.cycle(itertools.product(STOPS, MODULES))
    for cell in itertools.product(STRATEGIES, WORLD_SIZES, FORMS[:2], STRATEGIES, WORLD_SIZES, FORMS[:2]):
        move = Move(*cell, *next(rest))
        yield move if move.possible else Move(*cell, "epoch end", move.kind)


def moves_of_groups() -> Iterator[Move]:
    """From the first of :data:`GROUPS` in both forms to every strategy, world size and form, and back again; and from
    each of them to each."""
    rest = itertools.cycle(itertools.product(STOPS, MODULES))
    first, *_ = groups = [[(name, ranks, form) for form in FORMS[:2]] for name, ranks in GROUPS.items()]
    others = list(itertools.product(STRATEGIES, WORLD_SIZES, FORMS[:2]))
    ways = [*itertools.product(first, others), *itertools.product(others, first)]
    ways += itertools.product(itertools.chain(*groups), repeat=2)
    for source, target in ways:
        move = Move(*source, *target, *next(rest))
        yield move if move.possible else Move(*source, *target, "epoch end", move.kind)


TOLERANCES = {"features": 2e-5, "two optimizers": 2e-5, "fp16": 2e-2}
"""Relative, of losses and weights after ten steps: fp32 sums in another order over ranks (measured up to 2e-6); fp16
products rounded to 11 bits, so that one rounding is 5e-4 and ten steps add them up."""


class Travel:
    """Walks moves, making each source checkpoint and each reference run once.

    Args:
        ranks: ``ranks(fn, *args, world_size=...)``, as the fixture of that name.
        folder: Where checkpoints go.
    """

    def __init__(self, ranks: Any, folder: Any) -> None:
        self._ranks, self._folder = ranks, folder
        self._references: dict[Any, Run] = {}
        self._sources: dict[Any, str] = {}

    def difference(self, move: Move) -> float:
        """Runs ``move``; the largest relative difference of losses, and of the weights in the file it ends with."""
        stop = STOPS[move.moment]
        resumed_from = self._in_form(self._source(move), "file" if move.target == "ddp" else None)
        path = str(self._folder / f"target-{random.random()}.ckpt")
        runs = self._ranks(
            run, move.target, move.target_form, move.kind, move.moment, stop + STEPS_AFTER, None, path, resumed_from,
            world_size=move.target_ranks, timeout_seconds=120.0,
        )  # fmt: skip
        reference = self._reference(move.kind, move.moment)
        per_step = 2 if move.kind == "two optimizers" else 1
        expected = torch.tensor(reference.losses[stop * per_step :])
        losses = torch.tensor([r.losses for r in runs]).mean(0)
        if move.target != "ddp" and move.target_form == "file":
            assert os.path.isfile(path)
        in_form = move.target_form if move.target == "ddp" else None  # DDP itself writes files only
        assert {r.scale for r in runs} == {reference.scale}
        written = torch.load(self._in_form(self._in_form(path, in_form), "file"), weights_only=True)["state_dict"]
        assert written.keys() == reference.weights.keys()
        return max(_gap(losses, expected), *(_gap(written[k], reference.weights[k]) for k in written))

    def _reference(self, kind: str, moment: str) -> Run:
        key = kind, STOPS[moment], "stateful" in moment
        if key not in self._references:
            args = ("ddp", "file", kind, moment, STOPS[moment] + STEPS_AFTER)
            self._references[key] = self._ranks(run, *args, world_size=1)[0]
        return self._references[key]

    def _source(self, move: Move) -> str:
        key = move.source, move.source_ranks, move.source_form, move.moment, move.kind
        if key not in self._sources:
            path = str(self._folder / f"source-{len(self._sources)}.ckpt")
            stop = STOPS[move.moment]
            self._ranks(
                run, move.source, move.source_form, move.kind, move.moment, stop, stop, path,
                world_size=move.source_ranks, timeout_seconds=120.0,
            )  # fmt: skip
            self._sources[key] = self._in_form(path, move.source_form if move.source == "ddp" else None)
        return self._sources[key]

    def _in_form(self, path: str, form: str | None) -> str:
        """``path``, converted where it has another form."""
        is_sharded = os.path.isdir(path)
        if form is None or is_sharded == form.startswith("sharded"):
            return path
        other = f"{path}-{random.random()}"
        convert(path, other)
        return other


def _gap(value: Tensor, reference: Tensor) -> float:
    assert value.shape == reference.shape, (value.shape, reference.shape)
    assert value.isfinite().all()
    return ((value - reference).abs().max() / reference.abs().max().clamp(min=1e-3)).item()
