"""Measures the bytes of model state on each rank, tensor by tensor.

It counts at the end of training, between two steps, so it shows the state that stays. During a step, stages 1 and 2
gather all parameters (stage 1 also keeps unsharded gradients until the last micro-batch), and stage 3 gathers one unit
at a time.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zero.engines.model_state import KINDS, ModelState, plain_state

LABELS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}
_T = TypeVar("_T")
ELSEWHERE = {"host": "of this in host memory", "disk": "of this on disk"}


class ModelStateReport(Callback):
    """Prints a table of model-state bytes per rank when training ends: what DDP would hold, and what was measured."""

    def __init__(self) -> None:
        self.states: list[ModelState] = []
        """Model state of each rank."""
        self._gradients = ModelState()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # Only here do all gradients exist. With several optimizers the largest sum counts.
        self._gradients = max(self._gradients, state_of_run(trainer, pl_module), key=lambda s: s.held("gradients"))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = state_of_run(trainer, pl_module)
        for each in ("whole", "here"):
            getattr(mine, each)["gradients"] = getattr(self._gradients, each)["gradients"]
        self.states = of_every_rank(mine)
        rank_zero_only(print)(f"\n{self.table()}", flush=True)

    def table(self) -> str:
        """Formats the bytes of every kind in MiB, for DDP and for each rank."""
        full = self.states[0].whole
        rows = [["model state, MiB", "DDP, each rank", *(f"rank {rank}" for rank in range(len(self.states)))]]
        for kind in KINDS:
            rows.append([LABELS[kind], _mib(full[kind]), *(_mib(state.held(kind)) for state in self.states)])
        total = sum(full.values())
        sums = [sum(map(state.held, KINDS)) for state in self.states]
        rows.append(["together", _mib(total), *map(_mib, sums)])
        rows.append(["share of DDP's", "", *(f"{each / total:.1%}" if total else "-" for each in sums)])
        for place, label in ELSEWHERE.items():
            if any(state.at(place) for state in self.states):
                rows.append([label, "", *(_mib(state.at(place)) for state in self.states)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def state_of_run(trainer: Trainer, module: LightningModule) -> ModelState:
    """This rank's current model state, counted by its engine if it has one."""
    engine = getattr(trainer.strategy, "engine", None)
    return plain_state(module, trainer.optimizers) if engine is None else engine.model_state(trainer.optimizers)


def of_every_rank(mine: _T) -> list[_T]:
    """Returns ``mine`` of each rank (collective)."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
