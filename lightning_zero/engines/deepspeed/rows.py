"""Stage-3 parameters as :mod:`lightning_zero.comm.reads` sends them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.reads import WRITE
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.parameters import Parameters

GRADIENT = WRITE - 1
"""The key of the first parameter's gradient, which the ranks put together; those of the others are below."""


class Rows:
    """This rank's parts of the flattened parameters, numbered in their order on the module.

    Args:
        params: All of the module's.
        device: Whole ones lie there.
    """

    def __init__(self, params: Parameters, device: torch.device) -> None:
        self._params, self._device = params, device
        self._held: list[Any] = list(params.held)
        self._keys = {p: key for key, p in enumerate(self._held)}
        self._names = {p: name for name, p in params.named.items()}
        self.members = range(dist.get_world_size())

    def key_of(self, tensor: Any) -> int:
        """Of a parameter."""
        return self._keys[tensor]

    def rows(self, key: int) -> Tensor | None:
        """This rank's part."""
        return private.cut_of(self._held[key])

    def room(self, key: int, member: int) -> Tensor:
        """For another rank's."""
        part = private.cut_of(self._held[key])
        assert part is not None
        return torch.empty(part.shape, dtype=part.dtype)

    def name(self, key: int) -> str:
        """For errors."""
        if key <= GRADIENT:
            return f"the gradient of parameter {self._names[self._held[GRADIENT - key]]!r}"
        if key == WRITE:
            return "a parameter that is written to"
        return f"parameter {self._names[self._held[key]]!r}"

    def is_gradient(self, key: int) -> bool:
        """Those are never sent."""
        return False

    def assemble(self, key: int, parts: list[Tensor]) -> Tensor:
        """Everyone's parts as the whole tensor, on the device."""
        shape = self._params.shapes[self._held[key]]
        return torch.cat(parts)[: shape.numel()].view(shape).to(self._device)
