"""Norms and clipping of gradients that lie in shards: what both engines do alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.private.torch import DisableTorchFunction


@dataclass(frozen=True)
class Gradients:
    """All gradients of one optimizer on this rank."""

    shards: Sequence[Tensor]
    """Plain tensors, a part of each gradient; some ranks may hold empty ones."""
    wholes: Sequence[Tensor]
    """Gradients that every rank holds whole and alike."""
    home: torch.device
    """Where the ranks join the norms of their shards."""
    group: dist.ProcessGroup | None
    """The ranks that share out the gradients; ``None``: this one alone."""

    @torch.no_grad()
    def clip_norm(self, max_norm: float) -> Tensor:
        """As :func:`torch.nn.utils.clip_grad_norm_`, in place; returns the joint 2-norm before, 0-dim (collective)."""
        with DisableTorchFunction():
            squared = sum_of_squares(self.shards, self.home)
            if self.group is not None:
                dist.all_reduce(squared, group=self.group)
            if self.wholes:
                squared = squared + sum_of_squares(self.wholes, self.home)
            norm = squared.sqrt()
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for grads in by_kind([*self.shards, *self.wholes]):
                torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].dtype))
            return norm

    @torch.no_grad()
    def clip_value(self, clip_value: float) -> None:
        """Limits every element to ``[-clip_value, clip_value]``, in place."""
        with DisableTorchFunction():
            for grads in by_kind([*self.shards, *self.wholes]):
                torch._foreach_clamp_min_(grads, -clip_value)
                torch._foreach_clamp_max_(grads, clip_value)


def sum_of_squares(tensors: Sequence[Tensor], home: torch.device) -> Tensor:
    """0-dim, on ``home``; its dtype is the same on all ranks although some shards are empty."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return torch.zeros((), device=home, dtype=dtype)
    norms = torch._foreach_norm(filled)
    return torch.stack([n.to(home, dtype) for n in norms]).square().sum()


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups of one dtype on one device, as foreach functions take them."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.dtype, t.device), []).append(t)
    return list(groups.values())
