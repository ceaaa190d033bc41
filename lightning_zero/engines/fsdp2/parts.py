"""This rank's rows, as :mod:`~lightning_zero.engines.optimizer_step` steps on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.checkpoint.later import full_value
from lightning_zero.comm.shards import as_shard, local, mesh_device, shard_like
from lightning_zero.engines.after_run import LeftState
from lightning_zero.engines.residency import States


class Rows:
    """See :class:`~lightning_zero.engines.optimizer_step.Parts`.

    Args:
        shards: The user's parameters -> their shards.
        states: Shows states to user code.
        keep: Moves a state to its file, with offload to NVMe.
        settle, begin_full, full_step, stepped: Methods of the engine.
    """

    def __init__(
        self,
        shards: Mapping[Tensor, DTensor],
        states: States,
        settle: Callable[[], None],
        begin_full: Callable[[], None],
        full_step: Callable[[bool], AbstractContextManager[None]],
        stepped: Callable[[Any], None],
        keep: Callable[[Tensor], Tensor] = lambda state: state,
    ) -> None:
        self._shards, self._states, self._keep = shards, states, keep
        self.settle, self.begin_full, self.full_step, self.stepped = settle, begin_full, full_step, stepped

    def of(self, p: Tensor) -> Tensor | None:
        shard = self._shards.get(p)
        return None if shard is None else local(shard)

    def size(self, p: Tensor) -> torch.Size:
        return self._shards[p].shape

    def grad(self, p: Tensor, part: Tensor) -> Tensor | None:
        grad = self._shards[p].grad
        return None if grad is None else local(grad)

    def store_grad(self, p: Tensor, grad: Tensor) -> None:
        """Do nothing: :meth:`grad` returns the engine's gradient itself, not a copy."""

    def attributes(self, p: Tensor) -> Mapping[str, Any]:
        return vars(p)

    def cut(self, p: Tensor, full: Tensor) -> Tensor:
        shard = self._shards[p]
        if isinstance(full, LeftState):
            if isinstance(full.shard, DTensor) and local(full.shard).shape == local(shard).shape:
                return local(full.shard).to(local(shard).device)
            full = full_value(full.shard)
        return local(shard_like(full, shard, full.dtype))

    def of_state(self, value: Any) -> Tensor | None:
        shard = self._states.part_of(value)
        return None if shard is None else local(shard)

    def state(self, p: Tensor, part: Tensor) -> Tensor:
        shard = as_shard(self._keep(part), self._shards[p])
        return self._states.show(shard, shard, mesh_device(shard))
