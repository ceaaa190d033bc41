"""Fits a module under the monitor, and asks the allocator itself what the peak was."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from lightning_zero.callbacks import ZeroMonitor
from lightning_zero.engines.model_state import plain_state
from tests.helpers import zoo


class AllocatorPeak(Callback):
    """The most that the CPU allocator had given out at once, from every block's own allocation and release.

    Blocks that were there before are not seen: for sharded modules watching starts when training starts and the
    parameters are added; DDP's buckets are made before that, so for DDP it starts with the run.
    """

    def __init__(self, whole_run: bool) -> None:
        self.whole_run = whole_run
        self.bytes = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.whole_run:
            self._start(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.whole_run:
            self._start(trainer, pl_module)

    def _start(self, trainer: Any, module: nn.Module) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        state = engine.model_state([]) if engine is not None else plain_state(module, [])
        self.before = state.held("parameters")
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
        live: dict[int, int] = {}
        now = peak = 0
        for event in sorted(events, key=lambda e: e["ts"]):
            # gloo's threads release blocks unseen; an address that is given out again was free
            now -= live.pop(event["args"]["Addr"], 0)
            if event["args"]["Bytes"] > 0:
                live[event["args"]["Addr"]] = event["args"]["Bytes"]
                now += event["args"]["Bytes"]
            peak = max(peak, now)
        self.bytes = self.before + peak


def settings_of(stage: int, offload: str = "none", recompute: Any = "none") -> Any:
    return (
        {
            "stage": stage,
            "after_fit": "sharded",
            "offload": offload,
            "activation_checkpointing": recompute,
            **zoo.BLOCKS,
        }
        if stage
        else "ddp_find_unused_parameters_true"
    )


def observe(
    module: L.LightningModule,
    dataset: Dataset,
    stage: int,
    batch_size: int = zoo.BATCH,
    num_steps: int = 3,
    peak: bool = False,
    offload: str = "none",
    recompute: Any = "none",
    **trainer_options: Any,
) -> dict[str, Any]:
    """``measured``, ``planned`` (a row), ``notes`` and, if asked, ``peak`` of a short fit on this rank."""
    monitor = ZeroMonitor(every_n_steps=1)
    watch = AllocatorPeak(whole_run=stage == 0)
    accumulated = trainer_options.get("accumulate_grad_batches", 1)
    trainer = zoo.make_trainer(
        settings_of(stage, offload, recompute),
        max_epochs=1,
        limit_train_batches=num_steps * accumulated,
        limit_val_batches=0,
        callbacks=[monitor, *([watch] if peak else [])],
        **trainer_options,
    )
    trainer.fit(module, DataLoader(dataset, batch_size=batch_size))
    assert monitor.plan is not None
    row = monitor.plan.row(f"zero{stage}{'_offload' if offload == 'cpu' else ''}" if stage else "ddp")
    return {
        "measured": monitor.rows[trainer.global_rank],
        "planned": row,
        "notes": monitor.plan.notes,
        "peak": watch.bytes,
        "global_step": trainer.global_step,
    }


def observe_kind(name: str, stages: tuple[int, ...], offload: str = "none", **options: Any) -> list[dict[str, Any]]:
    """One of the zoo's modules under every stage."""
    kind = zoo.KINDS[name]
    found = []
    options = {**kind.trainer, **options}
    for stage in stages:
        data: Dataset = ConcatDataset([kind.dataset()] * 4)  # whole accumulation windows on every number of ranks
        found.append(observe(zoo.make_module(name), data, stage, offload=offload, **options))
    return found


# -- modules whose activations are worth counting --------------------------------------------------------------------


class MlpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mlp(L.LightningModule):
    """Six equal blocks."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(6))
        self.head = nn.Linear(width, 1000)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Attention(Mlp):
    """Encoder layers with attention, dropout and SGD with momentum."""

    def __init__(self, width: int = 128) -> None:
        super().__init__(width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True) for _ in range(4)
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Convolutions(L.LightningModule):
    """Convolutions, BatchNorm and unequal blocks."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 96]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(96 * 16, 100)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


class Tokens(Dataset):
    """``(65,)`` ids of a vocabulary of 1000."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(1000, (65,), generator=torch.Generator().manual_seed(index))


class Images(Dataset):
    """``(3, 32, 32)``."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))


SIZEABLE: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], Dataset]]] = {
    "mlp": (Mlp, Tokens),
    "attention": (Attention, Tokens),
    "convolutions": (Convolutions, Images),
}


def observe_peak(name: str, stages: tuple[int, ...], options: dict[str, Any]) -> list[dict[str, Any]]:
    """One of :data:`SIZEABLE` under every stage, with the allocator watched."""
    make, dataset = SIZEABLE[name]
    found = []
    for stage in stages:
        torch.manual_seed(0)
        found.append(observe(make(), dataset(), stage, batch_size=16, num_steps=2, peak=True, **options))
    return found


def observe_peaks(ranks: Any, *args: Any, world_size: int) -> list[list[dict[str, Any]]]:
    """:func:`observe_peak` on each rank. Blocks that gloo's threads release are missed by the record, which only ever
    adds to it; so where it is too high, the lower of two counts."""
    results = ranks(observe_peak, *args, world_size=world_size)
    if world_size > 1 and any(each["planned"].peak < 0.9 * each["peak"] for found in results for each in found):
        for found, again in zip(results, ranks(observe_peak, *args, world_size=world_size), strict=True):
            for each, other in zip(found, again, strict=True):
                each["peak"] = min(each["peak"], other["peak"])
    return results


def disagreements(found: dict[str, Any]) -> list[str]:
    """Where the plan is not what was measured on this rank: bytes gathered and reduced within 1 %, as units are counted
    one by one; a watched peak within the 10 % that the plan promises."""
    measured, planned = found["measured"], found["planned"]
    pairs = {
        kind: (planned.sent.get(kind, 0.0), measured.get(f"sent per step: {kind} bytes", 0.0), 0.01, 0.0)
        for kind in ("all_gather", "reduce_scatter")
    }
    # Agreements are not planned: some bytes for each parameter, unit and batch
    total = sum(value for name, value in measured.items() if name.startswith("sent per step"))
    pairs["sent"] = (planned.sent_total, total, 0.01, 2048.0)
    if not planned.stage:  # DDP's reducer is not counted
        pairs = {}
    if found["peak"]:
        pairs["peak"] = (planned.peak, found["peak"], 0.1, 0.0)
    return [
        f"{planned.name}: {what}: {ours:.0f} bytes planned, {theirs:.0f} measured"
        for what, (ours, theirs, part, slack) in pairs.items()
        if abs(ours - theirs) > max(part * theirs, slack)
    ]


# -- states without activations ---------------------------------------------------------------------------------------


class Stack(L.LightningModule):
    """Sixty small equal units and next to no activations, so that a step's peak is its states."""

    NUM_UNITS = 60
    WIDTH = 192

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(self.NUM_UNITS))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Vectors(Dataset):
    """``(width,)``."""

    def __init__(self, width: int = Stack.WIDTH) -> None:
        self.width = width

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(self.width, generator=torch.Generator().manual_seed(index))


def bytes_per_parameter(stage: int, mixed: bool, accumulating: bool) -> float:
    """The allocator's peak on this rank, divided by Ψ."""
    found = observe(
        Stack(),
        Vectors(),
        stage,
        batch_size=1,
        num_steps=2,
        peak=True,
        precision="bf16-mixed" if mixed else "32-true",
        accumulate_grad_batches=2 if accumulating else 1,
    )
    return found["peak"] / (Stack.NUM_UNITS * Stack.WIDTH**2)
