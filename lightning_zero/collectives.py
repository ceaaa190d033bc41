"""Exchanges beside the engines' own: many tensors in one message, and small agreements. Floor 2.

All functions are collective over ``group`` and do nothing when it holds one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
"""Tensors are joined up to this size, so that the copies never take more than a small part of the memory."""


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[Tensor], src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Rank ``src``'s values of ``tensors`` (any dtypes and shapes, one device) become every rank's, in place."""
    if dist.get_world_size(group) == 1:
        return
    for bucket in _buckets([t for t in tensors if t.numel()]):
        flat = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in bucket])
        dist.broadcast(flat, src, group=group)
        if dist.get_rank(group) != src:
            for tensor, part in zip(bucket, flat.split([_nbytes(t) for t in bucket]), strict=True):
                # A clone aligns the bytes for the wider dtype.
                tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def all_reduce_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Averages ``tensors`` over the ranks, in place."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return
    for dtype in {t.dtype: None for t in tensors}:
        for bucket in _buckets([t for t in tensors if t.dtype == dtype and t.numel()]):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            flat.div_(world_size)
            dist.all_reduce(flat, group=group)
            parts = flat.split([t.numel() for t in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + _nbytes(tensor) > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += _nbytes(tensor)
    if bucket:
        yield bucket


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
