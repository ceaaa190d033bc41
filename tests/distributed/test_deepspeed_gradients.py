"""Gradients under the engine ``deepspeed`` are DDP's whichever parameters a backward uses, wherever masters lie and
whether or not DeepSpeed reduces beside the backward.

A failure of ``second_backward`` is about what one backward leaves for the next, of ``first_micro_batch`` about windows,
of ``own_head`` about what ranks reduce together. ``overlap`` is the default on CUDA.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero.engines.deepspeed.order import Order
from tests.distributed import test_loops as loops
from tests.helpers import zoo
from tests.helpers.ranks import outcome
from tests.helpers.zoo import Zoo, make_trainer

pytest.importorskip("deepspeed")


class Heads(Zoo):
    """Two heads of one shape and a 0-dim gain; ``which(i)`` names what the ``i``-th backward uses."""

    def build(self) -> None:
        self.net = zoo.Net(num_blocks=1)
        self.heads = nn.ModuleDict({name: nn.Linear(zoo.WIDTH, zoo.WIDTH) for name in "ab"})
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.backwards = 0

    def which(self, i: int) -> str:
        return "ab"[i % 2]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        which = self.which(self.backwards)
        self.backwards += 1
        x = self.heads[which](self.net(x))
        return F.mse_loss(x * self.gain if which == "a" else x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SecondBackward(Heads):
    """The second backward before a step does without what the first one used."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in (0, 1):
            self.manual_backward(self.record(self.loss((batch[0] + part, batch[1]))))
        optimizer.step()
        optimizer.zero_grad()


class OwnHead(Heads):
    """Ranks use different heads."""

    def which(self, i: int) -> str:
        return "ab"[(i + int(os.environ["RANK"])) % 2]


KINDS: dict[str, tuple[type[Heads], int]] = {
    # name -> module, micro-batches per step
    "second_backward": (SecondBackward, 1),
    "first_micro_batch": (Heads, 2),
    "own_head_accumulated": (OwnHead, 2),
}


def _train(strategies: list[Any]) -> dict[str, list[dict[str, Tensor]]]:
    """Kind -> what it has learned under each of ``strategies``."""
    learned: dict[str, list[dict[str, Tensor]]] = {kind: [] for kind in KINDS}
    for kind, (make, accumulation) in KINDS.items():
        for settings in strategies:
            torch.manual_seed(5)
            module = make()
            options = {"accumulate_grad_batches": accumulation, "limit_train_batches": 4, "limit_val_batches": 0}
            make_trainer(settings, max_epochs=1, **options).fit(module, loops._loader())
            learned[kind].append(loops._weights(module) | {"losses": torch.tensor(module.losses)})
    return learned


def test_what_a_backward_does_not_use_keeps_its_gradient(ranks2) -> None:
    offload = {"offload": "cpu", "deepspeed_config": {"zero_optimization": {"overlap_comm": True}}}
    strategies = [{"engine": "deepspeed", "stage": 1}, {"engine": "deepspeed", "stage": 2, **offload}]
    for learned in ranks2(_train, [zoo.UNUSED, *strategies]):
        for kind, (expected, *results) in learned.items():
            for settings, result in zip(strategies, results, strict=True):
                assert zoo.largest_difference(result, expected)[0] < 1e-5, (kind, settings)


class EndsEarly(Heads):
    """The first epoch ends in the middle of an accumulation, whose gradients no step uses."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 and self.trainer.current_epoch == 0 else None


def _end_early(settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(8)
    module = EndsEarly()
    options = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 0, "accumulate_grad_batches": 2}
    make_trainer(settings, **options).fit(module, loops._loader())
    return loops._weights(module) | {"losses": torch.tensor(module.losses)}


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_an_epoch_that_ended_early_are_dropped(stage: int, ranks2) -> None:
    expected = ranks2(_end_early, zoo.UNUSED)
    for result, reference in zip(ranks2(_end_early, {"engine": "deepspeed", "stage": stage}), expected, strict=True):
        assert zoo.largest_difference(result, reference)[0] < 1e-5


class Unfreezes(Callback):
    """As Lightning's ``BaseFinetuning``: frozen parameters are trained from the second epoch on, in a new group."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            late = [p for p in module.parameters() if not p.requires_grad]
            for p in late:
                p.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": late, "lr": 1e-3})


class Frozen(Heads):
    def build(self) -> None:
        super().build()
        self.net.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def _fine_tune() -> None:
    settings = {"engine": "deepspeed", "stage": 1}
    make_trainer(settings, callbacks=[Unfreezes()], max_epochs=2).fit(Frozen(), loops._loader())


def test_unfreezing_during_a_run_is_refused(ranks2) -> None:
    for name, text in ranks2(outcome, _fine_tune):
        assert name == "ValueError"
        assert "was unfrozen after the run began" in text
        assert "engine='fsdp2'" in text


class TokenOnOddRanks(Zoo):
    """A parameter of the LightningModule itself, which only some ranks use: no module's gather brings it."""

    def build(self) -> None:
        super().build()
        self.token = nn.Parameter(torch.zeros(zoo.WIDTH))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x + self.token if zoo._odd_rank() else x), y)


def _use_token() -> None:
    make_trainer({"engine": "deepspeed", "stage": 3}, max_epochs=1).fit(TokenOnOddRanks(), loops._loader())


def test_parameters_that_only_some_ranks_gather_are_named(ranks2) -> None:
    for name, text in ranks2(outcome, _use_token):
        assert name == "ValueError"
        assert "'token'" in text
        assert "stage=2" in text


class ShiftsOnOddRanks(Zoo):
    """Every rank runs every module; inside, odd ranks use one parameter more."""

    def build(self) -> None:
        self.net, self.shift = zoo.Net(), _Shift()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(self.shift(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(zoo.WIDTH))
        self.shift = nn.Parameter(torch.zeros(zoo.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift if zoo._odd_rank() else x * self.gain


def _shift(settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(7)
    module = ShiftsOnOddRanks()
    make_trainer(settings, max_epochs=1, limit_val_batches=0).fit(module, loops._loader())
    return loops._weights(module)


def _buckets(numel: int | None) -> dict[str, Any]:
    return {"zero_optimization": {"reduce_bucket_size": "auto" if numel is None else numel}}


@pytest.mark.parametrize(("stage", "numel"), [(2, 20), (3, None)], ids=["many_buckets", "one_bucket"])
def test_ranks_that_use_different_parameters_fill_the_same_buckets(stage: int, numel: int | None, ranks2) -> None:
    """Reduced as they come they would give other numbers, without a word, or wait for ever."""
    expected = ranks2(_shift, zoo.UNUSED)
    settings = {"engine": "deepspeed", "stage": stage, "deepspeed_config": _buckets(numel)}
    for result, reference in zip(ranks2(_shift, settings), expected, strict=True):
        assert zoo.largest_difference(result, reference)[0] < 1e-5


def test_stage_3_refuses_buckets_that_differ(ranks2) -> None:
    settings = {"engine": "deepspeed", "stage": 3, "deepspeed_config": _buckets(20)}
    numel = sum(p.numel() for p in ShiftsOnOddRanks().parameters())
    for name, text in ranks2(outcome, _shift, settings):
        assert name == "ValueError"
        assert f"reduce_bucket_size={numel}" in text


class RunsInAnotherOrder(Zoo):
    """Two modules of one shape, so that messages are mixed up without a word."""

    def build(self) -> None:
        self.net, self.a, self.b = zoo.Net(), nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(self.b(self.a(x)) if zoo._odd_rank() else self.a(self.b(x))), y)


def _run_in_another_order() -> None:
    def as_on_an_accelerator(self: Any, *args: Any) -> None:
        made(self, *args)
        self._agreement = None  # which lets ranks agree on each gather, between CPU processes alone

    made = Order.__init__
    with mock.patch.object(Order, "__init__", as_on_an_accelerator):
        make_trainer({"engine": "deepspeed", "stage": 3}, max_epochs=1).fit(RunsInAnotherOrder(), loops._loader())


def test_modules_that_run_in_another_order_are_noticed_before_the_step(ranks2) -> None:
    for name, text in ranks2(outcome, _run_in_another_order):
        assert name == "ValueError", text
        assert "stage=3: ranks ran modules in different orders" in text


class KeepsGraph(Zoo):
    """A graph of the step before that has saved a view of a weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.view = self.net.head.weight.detach().view(-1)
        loss = self.loss(batch) + (self.kept if batch_idx else 0.0)
        self.kept = (torch.ones(self.view.shape, requires_grad=True) * self.view).sum()
        return self.record(loss)


def _keep_graph(strategy: Any) -> None:
    make_trainer(strategy, max_epochs=1, limit_val_batches=0).fit(KeepsGraph(), loops._loader())


def test_a_graph_from_before_a_step_is_no_longer_gone_through(ranks2: Any) -> None:
    """As under DDP: what it saved has been brought up to date since."""
    for strategy in ("ddp", {"engine": "deepspeed", "stage": 3}):
        for _, text in ranks2(outcome, _keep_graph, strategy):
            assert "has been modified by an inplace operation" in text
