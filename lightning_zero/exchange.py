"""Gathering and reducing shards by direct exchange between processes: what ``fully_shard`` calls on the CPU. Floor 2.

gloo's own reduce-scatter sends what it reduces more than once and its all-gather needs room for its result twice. Here
each rank sends every other rank exactly what that one needs, Ψ(N-1)/N elements in all, the least there is:

    all_gather       my shard -> every other rank, received where it belongs
    reduce_scatter   the part of rank j -> rank j, piece by piece; what arrives is added to my own part
    all_reduce       of a few numbers: mine -> every other rank, reduced by each for itself

Either has begun when the call returns, and is complete when the work that it returns has been waited for: what is
computed in between overlaps with it.

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lightning_zero.memory import FEW_RANKS

PIECE_BYTES = 4 * 2**20
"""Small enough to add one while the next arrives, large enough that the number of messages does not matter."""
SMALL_BYTES = 2**18
"""Of a shard: below, what a message costs by itself counts for more than copying it once more."""
_GATHER, _REDUCTION, AGREEMENT = 7001, 7002, 7003
"""Tags of messages: one may begin and end while the other is under way, and neither may meet the user's own."""


@torch.no_grad()
def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup, tag: int = _GATHER) -> dist.Work:
    """``output``, N times the size of ``shard``, will hold every rank's shard in the order of ranks; 1D, contiguous.

    ``shard`` may lie in ``output``, in its place.
    """
    rank, world_size = group.rank(), group.size()
    parts = output.chunk(world_size)
    if parts[rank].data_ptr() != shard.data_ptr():
        parts[rank].copy_(shard)
    others = _others(rank, world_size)
    works: list[Any] = [dist.irecv(parts[peer], group=group, group_src=peer, tag=tag) for peer in others]
    works += [dist.isend(shard, group=group, group_dst=peer, tag=tag) for peer in reversed(others)]
    return Begun(work.wait() for work in works)


@torch.no_grad()
def all_gather_each(
    outputs: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup, pool: Pool
) -> dist.Work:
    """:func:`all_gather` of every pair. What is small goes in one message, and from there to where it belongs."""
    pairs = [(o, s) for o, s in zip(outputs, shards, strict=True) if group.size() > 1 or o.data_ptr() != s.data_ptr()]
    small = [(o.view(torch.uint8), s.view(torch.uint8)) for o, s in pairs if 0 < s.nbytes < SMALL_BYTES]
    works = [all_gather(o, s, group) for o, s in pairs if s.nbytes >= SMALL_BYTES]
    if not small:
        return Begun(work.wait() for work in works)
    world_size, sizes = group.size(), [shard.numel() for _, shard in small]
    packed = pool.empty(world_size * sum(sizes), torch.uint8)
    parts = packed.chunk(world_size)
    mine = parts[group.rank()]
    torch._foreach_copy_(mine.split(sizes), [shard for _, shard in small])
    works.append(all_gather(packed, mine, group))

    def unpack() -> None:
        places = [output.chunk(world_size) for output, _ in small]
        pieces = [part.split(sizes) for part in parts]
        for rank in range(world_size):
            torch._foreach_copy_([place[rank] for place in places], pieces[rank])

    return Begun((work.wait() for work in works), unpack)


@torch.no_grad()
def reduce_scatter(
    output: Tensor, whole: Tensor, group: dist.ProcessGroup, buffer: Tensor, mean: bool = False
) -> dist.Work:
    """``output`` will be the sum over the ranks, or the mean, of part ``rank`` of their ``whole``; 1D, contiguous.

    Args:
        buffer: Two pieces to receive into, in the dtype of ``whole``: what overlaps with the caller. Like the other two
            nobody else's until the wait.
    """
    rest = _reduced(output, whole, group, buffer)
    next(rest)
    return Begun(rest, partial(output.div_, group.size()) if mean else None)


def _reduced(output: Tensor, whole: Tensor, group: dist.ProcessGroup, buffer: Tensor) -> Iterator[None]:
    """Stops once, when everything is on its way."""
    rank, world_size = group.rank(), group.size()
    if world_size == 1 or not output.numel():
        output.copy_(whole)
        yield
        return
    slots = buffer.chunk(2)
    parts, piece_numel = whole.chunk(world_size), slots[0].numel()
    others = _others(rank, world_size)
    sends: list[Any] = [
        dist.isend(piece, group=group, group_dst=peer, tag=_REDUCTION)
        for peer in reversed(others)
        for piece in parts[peer].split(piece_numel)
    ]
    own, sums = parts[rank].split(piece_numel), output.split(piece_numel)
    pieces = [
        (peer, so_far, piece)
        for peer in others
        for so_far, piece in zip(own if peer == others[0] else sums, sums, strict=True)
    ]
    slices = [slots[i % 2][: piece.numel()] for i, (_, _, piece) in enumerate(pieces)]

    def receive(i: int) -> Any:
        return dist.irecv(slices[i], group=group, group_src=pieces[i][0], tag=_REDUCTION)

    arriving = [receive(i) for i in range(len(pieces))[:2]]
    yield
    for i, (_, so_far, piece) in enumerate(pieces):
        arriving[i].wait()
        torch.add(so_far, slices[i], out=piece)
        if i + 2 < len(pieces):
            arriving.append(receive(i + 2))
    for send in sends:
        send.wait()


class Begun(dist.Work):
    """An exchange that has begun; the rest of it happens when it is waited for."""

    def __init__(self, rest: Iterator[Any], then: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._rest, self._then = rest, then

    @torch.no_grad()
    def wait(self, *timeout: Any) -> bool:
        for _ in self._rest:
            pass
        if self._then is not None:
            self._then()
            self._then = None
        return True


@torch.no_grad()
def all_reduce(message: Tensor, op: Any, group: dist.ProcessGroup) -> dist.Work:
    """``message``, a few numbers that ranks must agree on, 1D, will be their sum or their maximum, as ``op`` says."""
    if group.size() > FEW_RANKS:
        work = dist.all_reduce(message, op, group=group, async_op=True)
        assert work is not None
        return work
    everyones = message.new_empty(group.size(), message.numel())
    arriving = all_gather(everyones.view(-1), message, group, AGREEMENT)

    def reduce() -> None:
        if op == dist.ReduceOp.MAX:
            torch.amax(everyones, 0, out=message)
        else:
            torch.sum(everyones, 0, dtype=message.dtype, out=message)

    return Begun((work.wait() for work in (arriving,)), reduce)


def _others(rank: int, world_size: int) -> list[int]:
    """The other ranks, beginning with the one before this, so that no two ranks begin with the same."""
    return [(rank - distance) % world_size for distance in range(1, world_size)]


class Pool:
    """Memory for messages, handed out again when the last tensor in it is gone; all of it is freed with the pool.

    The general allocator would hand it out again as well, but between small and lasting tensors, where large blocks
    that come and go leave gaps.
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


class ReduceScatter:
    """For ``FSDPModule.set_custom_reduce_scatter``; one object serves all units, which take turns.

    Attributes:
        may_wait: The next reduction need not be complete when the call returns, but only after :meth:`finish`: nobody
            reads or moves its output before.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._begun = False  # what is allocated next is an output
        self._under_way: dist.Work | None = None
        self.may_wait = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """In turn what is sent, which is gone afterwards, and what stays as the gradients' storage."""
        self.finish()
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
        buffer = self._buffer.view(output_tensor.dtype)
        with record_function("exchange::reduce_scatter"):  # for traces: its messages have no name
            self._under_way = reduce_scatter(output_tensor, input_tensor, group, buffer, op == dist.ReduceOp.AVG)
        if not self.may_wait:
            self.finish()

    def finish(self) -> None:
        """Waits for the reduction that has begun, if one has."""
        if self._under_way is not None:
            with record_function("exchange::reduce_scatter_wait"):
                self._under_way.wait()
            self._under_way = None
