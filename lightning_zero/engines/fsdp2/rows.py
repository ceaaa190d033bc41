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

from lightning_zero.comm.reads import UNKNOWN, WRITE
from lightning_zero.comm.shards import local, mesh_device

UNIT = WRITE - 1
"""The key of a forward of the first unit; those of the others are below."""


class Rows:
    """The shards of ``module``, numbered in an order that all ranks share.

    Args:
        shards: The user's parameters -> their shards.
        module: For names.
        mesh: Of the run.
        units: Their names. Ranks must gather them together, so they have keys, and no rows.
    """

    def __init__(
        self, shards: Mapping[Tensor, DTensor], module: nn.Module, mesh: DeviceMesh, units: Sequence[str]
    ) -> None:
        names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        self._names = [*(f"parameter {names.get(p, '?')!r}" for p in shards)]
        self._units = units
        self._shards = list(shards.values())
        self._keys = {id(shard): key for key, shard in enumerate(self._shards)}
        self.members = dist.get_process_group_ranks(mesh.get_group("shard"))

    def key_of(self, tensor: Any) -> int:
        """Of a shard; a gradient or a state is not known to other ranks."""
        return self._keys.get(id(tensor), UNKNOWN)

    def rows(self, key: int) -> Tensor:
        """This rank's."""
        return local(self._shards[key]).detach()

    def room(self, key: int, member: int) -> Tensor:
        """For another rank's."""
        shard = self._shards[key]
        total, each = shard.shape[0], -(-shard.shape[0] // len(self.members))
        length = max(min(each, total - member * each), 0)
        return torch.empty(length * math.prod(shard.shape[1:]), dtype=shard.dtype)

    def name(self, key: int) -> str:
        """For errors."""
        if key == WRITE:
            return "a parameter that is written to"
        if key < UNKNOWN:
            return f"all parameters of {self._units[UNIT - key]!r}, whose forward is called"
        return "a gradient or an optimizer's state" if key == UNKNOWN else self._names[key]

    def assemble(self, key: int, parts: list[Tensor]) -> Tensor:
        """Everyone's rows as the whole tensor, on the device."""
        shard = self._shards[key]
        return torch.cat(parts).view(shard.shape).to(mesh_device(shard))
