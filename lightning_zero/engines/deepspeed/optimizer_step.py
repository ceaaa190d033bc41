"""Steps users' optimizers on DeepSpeed's flats: the engine's side of :mod:`~lightning_zero.engines.optimizer_step`.

DeepSpeed receives one optimizer, :class:`Joined`, whose groups say which parameters share a flat. ``Joined`` never
steps; the users' own optimizers do. An element-wise optimizer steps in place on this rank's *pieces* of the masters,
1-D views. A parameter that no rank used has no gradient, so weight decay and step counts leave it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.later import full_value
from lightning_zero.engines.after_run import LeftState
from lightning_zero.engines.deepspeed.private import Shards, attributes
from lightning_zero.engines.residency import States
from lightning_zero.private.torch import DisableTorchFunction


class Joined(Optimizer):
    """Gives DeepSpeed the parameters of all optimizers; never steps.

    Each optimizer's parameters are a group, which DeepSpeed lays out as a flat, because a step publishes entire flats.
    The parameters ``trainable`` that are in no optimizer are another group."""

    def __init__(self, trainable: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> None:
        left = dict.fromkeys(trainable)
        groups = [
            [p for p in dict.fromkeys(parameters(optimizer)) if left.pop(p, p) is None] for optimizer in optimizers
        ]
        # DeepSpeed reads these keys of a group if offload.ratio is below 1
        unused = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
        super().__init__([{"params": group} for group in [*groups, list(left)] if group], unused)


@dataclass(frozen=True)
class Pieces:
    """Implements :class:`~lightning_zero.engines.optimizer_step.Parts` on DeepSpeed's pieces.

    The part of a state that user code sees is a function that assembles it."""

    shards: Shards
    states: States
    settle: Callable[[], None]
    begin_full: Callable[[], None]
    full_step: Callable[[bool], AbstractContextManager[None]]

    def of(self, p: Tensor) -> Tensor | None:
        return self.shards.master(p) if p in self.shards else None

    def size(self, p: Tensor) -> torch.Size:
        return p.shape

    def grad(self, p: Tensor, part: Tensor) -> Tensor | None:
        if p not in self.shards.with_grad:
            return None
        return self.shards.grad(p).to(part)  # no copy, unless device or dtype differ from the master's

    def store_grad(self, p: Tensor, grad: Tensor) -> None:
        mine = self.shards.grad(p)
        if mine.data_ptr() != grad.data_ptr():
            mine.copy_(grad)

    def attributes(self, p: Tensor) -> Mapping[str, Any]:
        return attributes(p)

    def cut(self, p: Tensor, full: Tensor) -> Tensor:
        """Returns a copy of this rank's piece of ``full``, a state of ``p``, on the master's device.

        A state in the parameter's dtype is cast to the master's dtype, because ``optimizer.load_state_dict`` casts to
        the parameter's: a checkpoint may come from a run that stepped on bf16 weights."""
        master, dtype = self.shards.master(p), full.dtype
        if isinstance(full, LeftState):
            full = full_value(full.shard)
        elif dtype == p.dtype:
            dtype = master.dtype
        return self.shards.cut(p, full).to(master.device, dtype, copy=True)

    def of_state(self, value: Any) -> Tensor | None:
        found = self.states.part_of(value)
        return None if found is None else found.part

    def state(self, p: Tensor, part: Tensor) -> Tensor:
        assembly = self.shards.assembly(p, part)
        return self.states.show(assembly, torch.empty(assembly.shape, dtype=part.dtype, device="meta"), p.device)

    def stepped(self, optimizer: Optimizer) -> None:
        """Publishes the stepped masters to the module; otherwise the module's old values would overwrite them."""
        with DisableTorchFunction(), torch.no_grad():
            self.shards.publish(self.shards.with_grad.intersection(parameters(optimizer)))


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterates over the parameters of ``optimizer``, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]
