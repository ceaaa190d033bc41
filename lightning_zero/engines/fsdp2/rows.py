"""The parameters of a run as :mod:`lightning_zero.comm.reads` sends them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.comm.reads import UNKNOWN, WRITE
from lightning_zero.comm.shards import local, mesh_device

UNIT = WRITE - 1
"""The key of a forward of the first unit; those of the others are below."""


class Rows:
    """The shards of ``module``, numbered in an order that all ranks share, and as many gradients behind them.

    Args:
        shards: The user's parameters -> their shards.
        module: For names.
        mesh: Of the run.
        units: Their names. Ranks must gather them together, so they have keys, and no rows.
    """

    def __init__(
        self, shards: Mapping[Tensor, DTensor], module: nn.Module, mesh: DeviceMesh, units: Sequence[str]
    ) -> None:
        self._of_gradients: Any = WeakIdKeyDictionary()  # gradients that user code was given -> their keys
        names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        self._names = [*(f"parameter {names.get(p, '?')!r}" for p in shards)]
        self._units = units
        self._shards = list(shards.values())
        self._keys = {id(shard): key for key, shard in enumerate(self._shards)}
        self.members = dist.get_process_group_ranks(mesh.get_group("shard"))

    def given(self, grad: Tensor, shard: DTensor) -> None:
        """User code looks at ``grad``, of ``shard``."""
        if isinstance(grad, DTensor) and id(shard) in self._keys:
            self._of_gradients[grad] = len(self._shards) + self._keys[id(shard)]

    def key_of(self, tensor: Any) -> int:
        """Of a shard, or of its gradient; other ranks know neither states nor gradients of before."""
        if (key := self._keys.get(id(tensor))) is None:
            key = self._of_gradients.get(tensor)
            if key is not None and self._tensor(key) is not tensor:
                key = None
        return UNKNOWN if key is None else key

    def is_gradient(self, key: int) -> bool:
        """Not a parameter."""
        return key >= len(self._shards)

    def _tensor(self, key: int) -> Any:
        index = key - len(self._shards)
        return self._shards[key] if index < 0 else self._shards[index].grad

    def rows(self, key: int) -> Tensor | None:
        """This rank's."""
        tensor = self._tensor(key)
        return local(tensor).detach() if isinstance(tensor, DTensor) else None

    def room(self, key: int, member: int) -> Tensor:
        """For another rank's."""
        shard = self._tensor(key)
        total, each = shard.shape[0], -(-shard.shape[0] // len(self.members))
        length = max(min(each, total - member * each), 0)
        return torch.empty(length * math.prod(shard.shape[1:]), dtype=shard.dtype)

    def name(self, key: int) -> str:
        """For errors."""
        if key == WRITE:
            return "a parameter that is written to"
        if key < UNKNOWN:
            return f"all parameters of {self._units[UNIT - key]!r}, whose forward is called"
        if key == UNKNOWN:
            return "an optimizer's state or a gradient of before"
        index = key - len(self._shards)
        return self._names[key] if index < 0 else f"the gradient of {self._names[index]}"

    def assemble(self, key: int, parts: list[Tensor]) -> Tensor:
        """Everyone's rows as the whole tensor, on the device."""
        shard = self._tensor(key)
        return torch.cat(parts).view(shard.shape).to(mesh_device(shard))
