"""What each rank really holds of the model's state, counted tensor by tensor. Floor 5.

Glossary: *whole* bytes are a tensor's bytes as DDP holds them on every rank, *local* bytes those of the part that this
rank holds (the local tensor of a ``DTensor``). Both are counted at the end of training, between two steps: this is the
state that stays. While computing, stages 1 and 2 gather the parameters (stage 1 also keeps whole gradients until the
last micro-batch), stage 3 one unit at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

KINDS = ("parameters", "gradients", "optimizer states")


class ModelStateReport(Callback):
    """Prints, when training ends, a table of model-state bytes per rank: as DDP would hold them and as measured."""

    def __init__(self) -> None:
        self.whole_bytes: dict[str, int] = {}
        """Kind -> bytes of the whole tensors."""
        self.local_bytes: list[dict[str, int]] = []
        """Per rank: kind -> bytes of this rank's part."""
        self._gradients = (0, 0)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # The one moment at which every gradient is there; with several optimizers the largest sum counts.
        self._gradients = max(self._gradients, count_bytes(gradients_of(pl_module)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counted = (
            count_bytes(pl_module.parameters()),
            self._gradients,
            count_bytes(tensor for optimizer in trainer.optimizers for tensor in states_of(optimizer)),
        )
        self.whole_bytes = {kind: whole for kind, (whole, _) in zip(KINDS, counted, strict=True)}
        mine = {kind: here for kind, (_, here) in zip(KINDS, counted, strict=True)}
        self.local_bytes = _gather(mine)
        rank_zero_only(print)(f"\n{self.table()}", flush=True)

    def table(self) -> str:
        """The bytes of every kind, for DDP and for each rank, in MiB."""
        ranks = [f"rank {rank}" for rank in range(len(self.local_bytes))]
        rows = [["model state, MiB", "DDP, each rank", *ranks]]
        for kind in KINDS:
            rows.append([kind, _mib(self.whole_bytes[kind]), *(_mib(local[kind]) for local in self.local_bytes)])
        whole = sum(self.whole_bytes.values())
        sums = [sum(local.values()) for local in self.local_bytes]
        rows.append(["together", _mib(whole), *map(_mib, sums)])
        rows.append(["share of DDP's", "", *(f"{total / whole:.1%}" if whole else "-" for total in sums)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def count_bytes(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """``(whole, local)`` bytes of ``tensors``; a tensor that is met twice counts once."""
    whole = here = 0
    # Counting looks at shards, which strategies may hide from user code behind gathered tensors.
    with torch._C.DisableTorchFunction():
        for tensor in {id(t): t for t in tensors}.values():
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            whole += tensor.numel() * tensor.element_size()
            here += part.numel() * part.element_size()
    return whole, here


def gradients_of(module: torch.nn.Module) -> Iterator[Tensor]:
    """Those that exist, shards where they are shards."""
    for p in module.parameters():
        with torch._C.DisableTorchFunction():
            grad = p.grad
        if grad is not None:
            yield grad


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor in an optimizer's state."""
    for state in getattr(optimizer, "_optimizer", optimizer).state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _gather(mine: dict[str, int]) -> list[dict[str, int]]:
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
