"""Gathering and reducing shards by direct exchange between processes: what ``fully_shard`` calls on the CPU. Floor 2.

gloo's own reduce-scatter sends what it reduces more than once and its all-gather needs room for its result twice. Here
each rank sends every other rank exactly what that one needs, Ψ(N-1)/N elements in all, the least there is:

    all_gather       my shard -> every other rank, received where it belongs
    reduce_scatter   the part of rank j -> rank j, piece by piece; what arrives is added to my own part

[Plan of one reduction, N ranks]
All sends are posted at once; gloo starts each when its receiver is ready, so ranks may come as late as they like.
Rank r receives from r-1, r-2, ..., in pieces of :data:`PIECE_BYTES`, one arriving while the other is added. The order
of additions is fixed, so that results do not depend on timing.

Accelerators keep their own collectives, and so do other backends than gloo.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

PIECE_BYTES = 4 * 2**20
"""Small enough to add one while the next arrives, large enough that the number of messages does not matter."""


@torch.no_grad()
def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """``output``, N times the size of ``shard``, will hold every rank's shard in the order of ranks; 1D, contiguous.

    ``shard`` may lie in ``output``, in its place. Whatever is computed until the returned work is waited for overlaps
    with the exchange.
    """
    rank, world_size = group.rank(), group.size()
    parts = output.chunk(world_size)
    if parts[rank].data_ptr() != shard.data_ptr():
        parts[rank].copy_(shard)
    others = _others(rank, world_size)
    works = [dist.irecv(parts[peer], group=group, group_src=peer) for peer in others]
    works += [dist.isend(shard, group=group, group_dst=peer) for peer in reversed(others)]
    return Together(works)


class Together(dist.Work):
    """Several pieces of work, waited for as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, *timeout: Any) -> bool:
        while self._works:
            self._works.pop(0).wait(*timeout)
        return True


@torch.no_grad()
def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup, buffer: Tensor) -> None:
    """``output`` is the sum over the ranks of part ``rank`` of their ``whole``; 1D, contiguous.

    Args:
        buffer: Two pieces to receive into, in the dtype of ``whole``.
    """
    rank, world_size = group.rank(), group.size()
    if world_size == 1:
        output.copy_(whole)
    if world_size == 1 or not output.numel():
        return
    slots = buffer.chunk(2)
    parts, piece_numel = whole.chunk(world_size), slots[0].numel()
    others = _others(rank, world_size)
    sends: list[Any] = [
        dist.isend(piece, group=group, group_dst=peer)
        for peer in reversed(others)
        for piece in parts[peer].split(piece_numel)
    ]
    own, sums = parts[rank].split(piece_numel), output.split(piece_numel)
    pieces = [
        (peer, so_far, piece)
        for peer in others
        for so_far, piece in zip(own if peer == others[0] else sums, sums, strict=True)
    ]
    arriving: list[tuple[Any, ...]] = []
    for i, (peer, so_far, piece) in enumerate(pieces):
        if len(arriving) == 2:
            _add(*arriving.pop(0))
        slot = slots[i % 2][: piece.numel()]
        arriving.append((dist.irecv(slot, group=group, group_src=peer), so_far, slot, piece))
    for each in arriving:
        _add(*each)
    for send in sends:
        send.wait()


def _add(work: Any, so_far: Tensor, slot: Tensor, out: Tensor) -> None:
    work.wait()
    torch.add(so_far, slot, out=out)


def _others(rank: int, world_size: int) -> list[int]:
    """The other ranks, beginning with the one before this, so that no two ranks begin with the same."""
    return [(rank - distance) % world_size for distance in range(1, world_size)]


class Pool:
    """Memory for messages, handed out again when the last tensor in it is gone; all of it is freed with the pool.

    The general allocator would hand it out again as well, but between small and lasting tensors, where large blocks
    that come and go leave gaps: a fifth of a process's memory.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized 1D tensor on the CPU."""
        nbytes = max(numel, 1) * dtype.itemsize
        memory = self._take(nbytes)
        lease = (ctypes.c_char * nbytes).from_buffer(memory)  # lives as long as the tensor's storage
        weakref.finalize(lease, self._free.append, memory)
        return torch.frombuffer(lease, dtype=dtype)[:numel]

    def _take(self, nbytes: int) -> mmap.mmap:
        fitting = [memory for memory in self._free if nbytes <= len(memory) <= 2 * nbytes]
        if not fitting:
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = min(fitting, key=len)
        self._free.remove(memory)
        return memory


class AllGather:
    """For ``FSDPModule.set_custom_all_gather``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where the parameters of a unit arrive."""
        return self._pool.empty(math.prod(size), dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """:func:`all_gather`; ``fully_shard`` waits for the work where it needs the parameters."""
        with record_function("exchange::all_gather"):
            return all_gather(output_tensor, input_tensor, group)


class ReduceScatter:
    """For ``FSDPModule.set_custom_reduce_scatter``; one object serves all units, which take turns."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._begun = False  # what is allocated next is an output

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """In turn what is sent, which is gone afterwards, and what stays as the gradients' storage."""
        self._begun = not self._begun
        if self._begun:
            return self._pool.empty(math.prod(size), dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """:func:`reduce_scatter`, or its mean where ``op`` says so."""
        self._begun = False
        wanted = 2 * min(PIECE_BYTES, -(-output_tensor.nbytes // 16) * 16)  # whole elements of any dtype
        if self._buffer.numel() < wanted:
            self._buffer = torch.empty(wanted, dtype=torch.uint8)
        with record_function("exchange::reduce_scatter"):  # for traces: its messages have no name
            reduce_scatter(output_tensor, input_tensor, group, self._buffer.view(output_tensor.dtype))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
