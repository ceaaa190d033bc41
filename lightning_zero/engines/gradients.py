"""Arithmetic on lists of gradients, for both engines."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, 0-dim, on ``device``. All ranks get the same dtype, even if some shards are
    empty, because ranks all-reduce the result."""
    tensors = list(tensors)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return torch.zeros((), device=device, dtype=dtype)
    norms = [torch.stack(torch._foreach_norm(kind)).to(device, dtype) for kind in by_kind(tensors)]
    return torch.cat(norms).square().sum()


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups ``tensors`` by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.dtype, t.device), []).append(t)
    return list(groups.values())


def scale_to_norm(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales ``grads`` by their joint norm, as ``torch.nn.utils.clip_grad_norm_`` does."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for kind in by_kind(grads):
        torch._foreach_mul_(kind, scale.to(kind[0].device, kind[0].dtype))


def clamp(grads: Iterable[Tensor], limit: float) -> None:
    """Limits every element to ``[-limit, limit]``."""
    for kind in by_kind(grads):
        torch._foreach_clamp_min_(kind, -limit)
        torch._foreach_clamp_max_(kind, limit)
