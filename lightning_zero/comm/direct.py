"""Gathers and reduces shards by direct exchange between CPU processes, instead of gloo's collectives.

gloo's own reduce-scatter sends some bytes more than once, and its all-gather needs twice the memory of its result. Here
each rank sends every other rank exactly the elements that it needs, Ψ(N-1)/N in all, which is the lower bound:

    all_gather       my shard -> every other rank, received directly into its place in the output
    reduce_scatter   the part of rank j -> rank j, piece by piece; each arriving piece is added to my own part
    all_reduce       of a few numbers, along the tree of comm.tree

A call begins an exchange and returns a work; the exchange is complete when ``wait()`` returns. Between hosts the bytes
travel through gloo's sockets while the caller computes. Ranks on one host read each other's memory (``peer_memory``):
the call offers this rank's tensors, and ``wait()`` reads those of the others.

[Plan of one reduction, N ranks]
All sends are posted at once; gloo starts each when its receiver is ready, however late that is. Rank r adds the parts
of r-1, r-2, ... in this order. Through sockets they arrive in pieces of :data:`PIECE_BYTES`: one piece is in flight
while the previous one is added. From peer memory, pieces of :data:`NEAR_PIECE_BYTES` are read and added in turn. Keep
the order of additions fixed: results must depend neither on timing nor on which ranks share a host.

Accelerators and backends other than gloo keep their own collectives.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lightning_zero.comm import tree
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.errors import MovedError
from lightning_zero.private.torch import TESTED

PIECE_BYTES = 4 * 2**20
"""Small enough to add one while the next arrives, large enough that the number of messages does not matter."""
NEAR_PIECE_BYTES = 2**19
"""Size of a piece read from peer memory: small enough to be still in the cache when it is added."""
SMALL_BYTES = 2**18
"""Shards below this size share one message: one more copy costs less than one more message."""
IDLE_BYTES = 8 * 2**20
"""The pool keeps only one idle block of this size or more; it keeps all smaller ones."""
_GATHER, _REDUCTION, _FULL, _COLLECTED = 7001, 7002, 7003, 7004
"""Tags of messages. A gather may begin and end during a reduction on the same group, and a full tensor may be requested
during both, so each kind needs its own tag. The numbers are unlikely to be used by a user's own messages."""


Parts = Sequence[Tensor]
"""One tensor for each rank."""


_peer_memories: WeakKeyDictionary[dist.ProcessGroup, weakref.ref[PeerMemory]] = WeakKeyDictionary()


def connect(group: dist.ProcessGroup, peer_memory: PeerMemory) -> None:
    """Lets gathers over ``group`` use the connections of ``peer_memory``, an engine's, while that object is alive and
    open. Otherwise they would open new connections between every two ranks."""
    _peer_memories[group] = weakref.ref(peer_memory)


@torch.no_grad()
def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gathers every rank's ``shard`` into ``output``, in the order of ranks; both 1D and contiguous.

    ``output`` has N times the size of ``shard``, which may alias its own part of ``output``. After the wait no rank
    reads either tensor.
    """
    parts = output.chunk(group.size())
    _place(parts[group.rank()], shard)
    peer_memory = _connected(group)
    near, far = _near_and_far(group, peer_memory)
    works = [_send(parts, shard, group, _FULL, far)] if far else []
    if peer_memory is None or not near or not shard.numel():
        return Begun(work.wait() for work in works)
    works.insert(0, _read([(parts, shard)], _FULL, peer_memory))
    return Begun((work.wait() for work in works), peer_memory.await_readers)


@torch.no_grad()
def collect(mine: Tensor, group: dist.ProcessGroup, into: Sequence[Tensor] = ()) -> None:
    """Sends ``mine`` of every rank to the group's rank 0, which receives them into ``into``, by rank; 1D, contiguous.

    ``mine`` of the last ranks may be empty. No rank allocates anything. After the call no rank reads ``mine``.
    """
    peer_memory = _connected(group)
    near, _ = _near_and_far(group, peer_memory)
    if group.rank():
        if not mine.numel():
            return
        if peer_memory is not None and 0 in near:
            peer_memory.send_tensor(0, _COLLECTED, mine)
        else:
            dist.send(mine, group=group, group_dst=0, tag=_COLLECTED)
        return
    for sender, part in enumerate(into):
        if sender == 0:
            part.copy_(mine)
        elif part.numel() and peer_memory is not None and sender in near:
            peer_memory.recv_tensor(sender, _COLLECTED, part)
        elif part.numel():
            dist.recv(part, group=group, group_src=sender, tag=_COLLECTED)


def _connected(group: dist.ProcessGroup) -> PeerMemory | None:
    found = _peer_memories.get(group)
    return None if found is None else found()


@torch.no_grad()
def all_gather_each(
    outputs: Sequence[Parts],
    shards: Sequence[Tensor],
    group: dist.ProcessGroup,
    pool: Pool,
    peer_memory: PeerMemory | None = None,
) -> dist.Work:
    """Runs :func:`all_gather` for every pair of an output and a shard.

    Outputs are already split into the ranks' parts, so that outputs that are kept are split only once. Peers read
    ``shards`` in place: do not write to them before ``peer_memory.await_readers()``, not even after the wait.
    """
    pairs = [(parts, shard) for parts, shard in zip(outputs, shards, strict=True) if shard.numel()]
    for parts, shard in pairs:
        _place(parts[group.rank()], shard)
    near, far = _near_and_far(group, peer_memory)
    works = _send_each(pairs, group, pool, far) if pairs and far else []
    if peer_memory is not None and pairs and near:
        works.insert(0, _read(pairs, _GATHER, peer_memory))  # waited for first: other hosts' messages arrive meanwhile
    return Begun(work.wait() for work in works)


def _place(part: Tensor, shard: Tensor) -> None:
    if part.data_ptr() != shard.data_ptr():
        part.copy_(shard)


def _send(parts: Parts, mine: Tensor, group: dist.ProcessGroup, tag: int, peers: Sequence[int]) -> dist.Work:
    """Sends ``mine`` to ``peers`` and receives theirs into ``parts``, through sockets."""
    # Post receives first: gloo starts a peer's send when its receiver is posted. Messages of one tag between two ranks
    # are matched in the order of posting, so all ranks must begin their exchanges in the same order.
    works: list[Any] = [dist.irecv(parts[peer], group=group, group_src=peer, tag=tag) for peer in peers]
    works += [dist.isend(mine, group=group, group_dst=peer, tag=tag) for peer in reversed(peers)]
    return Begun(work.wait() for work in works)


def _send_each(
    pairs: Sequence[tuple[Parts, Tensor]], group: dist.ProcessGroup, pool: Pool, peers: Sequence[int]
) -> list[dist.Work]:
    """Runs :func:`_send` for every pair; small shards share one message, and the wait copies them to their parts."""
    works = [_send(parts, shard, group, _GATHER, peers) for parts, shard in pairs if shard.nbytes >= SMALL_BYTES]
    small = [(parts, shard.view(torch.uint8)) for parts, shard in pairs if shard.nbytes < SMALL_BYTES]
    if not small:
        return works
    sizes = [shard.numel() for _, shard in small]
    packed = pool.empty(group.size() * sum(sizes), torch.uint8).chunk(group.size())
    mine = packed[group.rank()]
    torch._foreach_copy_(mine.split(sizes), [shard for _, shard in small])
    work = _send(packed, mine, group, _GATHER, peers)

    def unpack() -> None:
        for peer in peers:
            places = [parts[peer].view(torch.uint8) for parts, _ in small]
            torch._foreach_copy_(places, packed[peer].split(sizes))

    return [*works, Begun((w.wait() for w in [work]), unpack)]


def _read(pairs: Sequence[tuple[Parts, Tensor]], kind: int, peer_memory: PeerMemory) -> dist.Work:
    """Offers this rank's shards; the wait reads the shards of every peer on this host into their parts."""
    offer = peer_memory.offer(kind, [mine for _, mine in pairs])

    def rest() -> Iterator[None]:
        for peer in peer_memory.ranks:
            source = peer_memory.source(offer, peer)
            peer_memory.read(source, [parts[peer] for parts, _ in pairs])
            peer_memory.done(offer, source)
            yield

    return Begun(rest())


@torch.no_grad()
def reduce_scatter(
    output: Tensor,
    full: Tensor,
    group: dist.ProcessGroup,
    pool: Pool,
    mean: bool = False,
    peer_memory: PeerMemory | None = None,
) -> dist.Work:
    """Reduces ``full`` over the ranks and writes this rank's part of the sum, or mean, to ``output``; 1D, contiguous.

    Do not touch either tensor before the wait. Peers read ``full`` in place: do not write to it before
    ``peer_memory.await_readers()``, not even after the wait.
    """
    rest = _reduced(output, full, group, pool, peer_memory)
    next(rest)
    return Begun(rest, partial(output.div_, group.size()) if mean else None)


def _reduced(
    output: Tensor, full: Tensor, group: dist.ProcessGroup, pool: Pool, peer_memory: PeerMemory | None
) -> Iterator[None]:
    """Yields once, when all sends are posted and all offers made; the wait runs the rest, which receives and adds."""
    if group.size() == 1 or not output.numel():
        output.copy_(full)
        yield
        return
    near, far = _near_and_far(group, peer_memory)
    sent = _Sent(full, group, pool, far) if far else None
    read = _Read(full, group, pool, peer_memory) if peer_memory is not None and near else None
    yield
    # The wait begins here. Do not write to `full`: peers, and sends in flight, read their parts from it.
    so_far = full.chunk(group.size())[group.rank()]
    for peer in _others(group):
        carrier = read if peer in near else sent
        assert carrier is not None
        sums = output.split(carrier.numel)
        for mine, arrived, piece in zip(so_far.split(carrier.numel), carrier.pieces(peer), sums, strict=True):
            torch.add(mine, arrived, out=piece)
        so_far = output
    if sent is not None:
        sent.end()


class _Sent:
    """Sends the parts of ``full`` to ``peers`` and receives theirs, through sockets, into two slots in turn: one piece
    arrives while the previous one is added.

    Attributes:
        numel: Number of elements of a piece.
    """

    def __init__(self, full: Tensor, group: dist.ProcessGroup, pool: Pool, peers: Sequence[int]) -> None:
        parts = full.chunk(group.size())
        self.numel, self._group = PIECE_BYTES // full.itemsize, group
        self._sends: list[Any] = [
            dist.isend(piece, group=group, group_dst=peer, tag=_REDUCTION)
            for peer in reversed(peers)
            for piece in parts[peer].split(self.numel)
        ]
        sizes = [piece.numel() for piece in parts[group.rank()].split(self.numel)]
        slots = [pool.empty(sizes[0], full.dtype) for _ in range(2)]
        self._slices = [slots[i % 2][:size] for i, size in enumerate(sizes * len(peers))]
        self._sources = [peer for peer in peers for _ in sizes]
        self._arriving = [self._receive(i) for i in range(len(self._slices))[:2]]

    def _receive(self, i: int) -> Any:
        return dist.irecv(self._slices[i], group=self._group, group_src=self._sources[i], tag=_REDUCTION)

    def pieces(self, peer: int) -> Iterator[Tensor]:
        """Yields the pieces of ``peer``, which must be the next of ``peers``. A piece is valid until the next one is
        requested: then its slot receives another piece."""
        for i, source in enumerate(self._sources):
            if source == peer:
                self._arriving[i].wait()
                yield self._slices[i]
                if i + 2 < len(self._slices):  # the caller has added this piece, so its slot is free again
                    self._arriving.append(self._receive(i + 2))

    def end(self) -> None:
        """Waits until ``full`` has been sent; until then its memory must not change."""
        for send in self._sends:
            send.wait()


class _Read:
    """Does the same as :class:`_Sent` for peers on this host: reads their parts out of their memory, into one slot."""

    def __init__(self, full: Tensor, group: dist.ProcessGroup, pool: Pool, peer_memory: PeerMemory) -> None:
        parts = full.chunk(group.size())
        part = parts[group.rank()]
        self.numel = NEAR_PIECE_BYTES // full.itemsize
        self._peer_memory, self._offer = peer_memory, peer_memory.offer(_REDUCTION, [full])
        self._sizes = [piece.numel() for piece in part.split(self.numel)]
        self._slot = pool.empty(self._sizes[0], full.dtype)
        self._start_bytes = part.data_ptr() - full.data_ptr()

    def pieces(self, peer: int) -> Iterator[Tensor]:
        source, start = self._peer_memory.source(self._offer, peer), self._start_bytes
        for numel in self._sizes:
            piece = self._slot[:numel]
            self._peer_memory.read(source, [piece], start)
            start += piece.nbytes
            yield piece
        self._peer_memory.done(self._offer, source)


class Begun(dist.Work):
    """An exchange that has begun; ``wait`` runs the rest of it, once, on the calling thread."""

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
def all_reduce(
    message: Tensor,
    op: Any,
    group: dist.ProcessGroup,
    peer_memory: PeerMemory | None = None,
    tag: int = tree.FIRST_TAG,
) -> dist.Work:
    """Reduces ``message``, a few numbers (1D), over the ranks in place; ``op`` is a sum or a maximum."""
    rest = tree.all_reduce(message, op, group, tag, peer_memory)
    next(rest)
    return Begun(rest)


def _near_and_far(group: dist.ProcessGroup, peer_memory: PeerMemory | None) -> tuple[list[int], list[int]]:
    """The other ranks: those whose memory this rank reads, and those that it reaches through sockets."""
    near = peer_memory.ranks if peer_memory is not None else ()
    others = _others(group)
    return [peer for peer in others if peer in near], [peer for peer in others if peer not in near]


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, beginning with the previous one, so that no two ranks begin with the same peer."""
    return [(group.rank() - distance) % group.size() for distance in range(1, group.size())]


class Pool:
    """Memory for messages. A block is reused when the last tensor in it is gone; the pool's end frees all of them.

    The general allocator would reuse memory as well. But it places large, short-lived blocks among small, long-lived
    tensors, and their gaps stay resident. Idle blocks are resident, too, so of large ones (``IDLE_BYTES``) the pool
    keeps only the last that was returned, and uses it only for messages of at least half its size.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # small ones
        self._idle: mmap.mmap | None = None  # a large one

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized 1D tensor on the CPU."""
        nbytes = max(numel, 1) * dtype.itemsize
        memory = self._take(nbytes)
        lease = (ctypes.c_char * nbytes).from_buffer(memory)  # lives as long as the tensor's storage
        weakref.finalize(lease, self._give_back, memory)
        return torch.frombuffer(lease, dtype=dtype)[:numel]

    def _take(self, nbytes: int) -> mmap.mmap:
        if nbytes >= IDLE_BYTES:
            memory, self._idle = self._idle, None
            fitting = [memory] if memory is not None and nbytes <= len(memory) <= 2 * nbytes else []
            return fitting[0] if fitting else _mapped(nbytes)
        fitting = [memory for memory in self._free if nbytes <= len(memory) <= 2 * nbytes]
        if not fitting:
            return _mapped(nbytes)
        memory = min(fitting, key=len)
        self._free.remove(memory)
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        """Runs on any thread at any moment, as a finalizer does: take no lock here."""
        if len(memory) >= IDLE_BYTES:
            self._idle = memory
        else:
            self._free.append(memory)


def _mapped(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= IDLE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):  # the block is soon written from end to end
        with contextlib.suppress(OSError):  # the kernel may not support it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class ReduceScatter:
    """The argument of ``FSDPModule.set_custom_reduce_scatter``; one object serves all units, which take turns.

    Args:
        world_size: Size of the groups that it is called with.
        apart: Context manager for allocations that outlive the reduction.

    Attributes:
        may_wait: Lets the next call return before its reduction is complete. Nobody may read or move its output before
            :meth:`finish`.
    """

    def __init__(
        self,
        pool: Pool,
        world_size: int,
        peer_memory: PeerMemory | None = None,
        apart: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._pool, self._world_size, self._peer_memory, self._apart = pool, world_size, peer_memory, apart
        self._input = 0  # address of the input allocated last
        self._input_numel: int | None = None  # elements of an input whose output has not been allocated yet
        self._under_way: dist.Work | None = None
        self.may_wait = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates the reduction's input from the pool, or its output, which stays as the gradients' storage.

        The size tells the two apart: an output is one rank's part of the input allocated just before it. If a backward
        fails between the two, both may come from the pool, which costs memory and breaks nothing. :meth:`__call__`
        raises if torch allocates the output first.
        """
        self.finish()  # one reduction at a time: the next call overwrites _under_way
        if self._peer_memory is not None:
            self._peer_memory.release_read()  # returns memory that all peers have read to the pool
        numel = math.prod(size)
        if self._input_numel == numel * self._world_size:
            self._input_numel = None
            with self._apart():  # not from the pool: gradients outlive the next input
                return torch.empty(*size, dtype=dtype, device=device)
        self._input_numel = numel
        sent = self._pool.empty(numel, dtype)
        self._input = sent.data_ptr()
        return sent

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Begins :func:`reduce_scatter`, of the mean if ``op`` is ``AVG``."""
        self._input_numel = None
        if self._input not in (0, input_tensor.data_ptr()):
            raise MovedError(
                f"torch {torch.__version__} allocates a reduction's output before its input, so gradients would lie in"
                f" memory that is reused: use 'torch{TESTED}', which was tested."
            )
        with record_function("exchange::reduce_scatter"):  # its messages have no names in a profiler's trace
            self._under_way = reduce_scatter(
                output_tensor, input_tensor, group, self._pool, op == dist.ReduceOp.AVG, self._peer_memory
            )
        if not self.may_wait:
            self.finish()

    def finish(self) -> None:
        """Waits for the current reduction, if there is one."""
        if self._under_way is not None:
            with record_function("exchange::reduce_scatter_wait"):
                self._under_way.wait()
            self._under_way = None
