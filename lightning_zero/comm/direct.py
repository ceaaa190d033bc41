"""Gathers and reduces shards by direct exchange between the CPU processes of one host, instead of gloo's collectives.

gloo's own reduce-scatter sends some bytes more than once, and its all-gather needs twice the memory of its result. Here
each rank reads from every other rank exactly the elements that it needs, Ψ(N-1)/N in all, which is the lower bound
(:mod:`~lightning_zero.comm.peer_memory`):

    all_gather       the shard of every other rank, read directly into its place in the output
    reduce_scatter   my part of every other rank's tensor, read piece by piece; each piece is added to my own part

A gather offers this rank's tensors and returns a work, whose ``wait()`` reads those of the others. A reduction is
complete when it returns.

Rank r adds the parts of r-1, r-2, ... in this order. Keep the order of additions fixed: results must not depend on
timing.

Ranks that cannot read each other's memory (on several hosts, not on Linux, or forbidden by a container), accelerators,
and backends other than gloo keep their own collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lightning_zero.comm.peer_memory import PeerMemory

PIECE_BYTES = 2**19
"""Size of a piece of a reduction: small enough to be still in the cache when it is added."""
_GATHER, _REDUCTION, _FULL = range(1, 4)
"""Kinds of exchanges. A reduction, and a gather into one tensor, may begin and end during a gather of a unit, so each
needs its own."""


Parts = Sequence[Tensor]
"""One tensor for each rank."""


_peer_memories: WeakKeyDictionary[dist.ProcessGroup, weakref.ref[PeerMemory]] = WeakKeyDictionary()


def connect(group: dist.ProcessGroup, peer_memory: PeerMemory) -> None:
    """Lets gathers over ``group`` use ``peer_memory``, an engine's, while that object is alive and open. Otherwise they
    use gloo, which opens new connections."""
    _peer_memories[group] = weakref.ref(peer_memory)


def _connected(group: dist.ProcessGroup) -> PeerMemory | None:
    """The open peer memory of ``group``, if there is one; never on an accelerator."""
    reference = _peer_memories.get(group)
    found = None if reference is None else reference()
    return found if found is not None and found.ranks else None


@torch.no_grad()
def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gathers every rank's ``shard`` into ``output``, in the order of ranks; both 1D and contiguous, on any device.

    ``output`` has N times the size of ``shard``, which may alias its own part of ``output``. After the wait no rank
    reads either tensor.
    """
    peer_memory = _connected(group)
    if peer_memory is None:
        work = dist.all_gather_into_tensor(output, shard, group=group, async_op=True)
        assert work is not None
        return work
    pairs = [(output.chunk(group.size()), shard)]
    return Begun(_exchange(pairs, _FULL, group.rank(), peer_memory), peer_memory.await_readers)


@torch.no_grad()
def all_gather_each(
    outputs: Sequence[Parts], shards: Sequence[Tensor], group: dist.ProcessGroup, peer_memory: PeerMemory
) -> dist.Work:
    """Runs :func:`all_gather` for every pair of an output and a shard, through the ``peer_memory`` of ``group``.

    Outputs are already split into the ranks' parts, so that outputs that are kept are split only once. Peers read
    ``shards`` in place: do not write to them before ``peer_memory.await_readers()``, not even after the wait.
    """
    pairs = [(parts, shard) for parts, shard in zip(outputs, shards, strict=True) if shard.numel()]
    return Begun(_exchange(pairs, _GATHER, group.rank(), peer_memory))


def _exchange(pairs: Sequence[tuple[Parts, Tensor]], kind: int, rank: int, peer_memory: PeerMemory) -> Iterator[None]:
    """Copies this rank's shards into their parts and offers them; the iterator reads those of every peer."""
    for parts, shard in pairs:
        if parts[rank].data_ptr() != shard.data_ptr():
            parts[rank].copy_(shard)
    if not pairs or not peer_memory.ranks:
        return iter(())
    offer = peer_memory.offer(kind, [mine for _, mine in pairs])

    def rest() -> Iterator[None]:
        for peer in peer_memory.ranks:
            source = peer_memory.source(offer, peer)
            peer_memory.read(source, [parts[peer] for parts, _ in pairs])
            peer_memory.done(offer, source)
            yield

    return rest()


@torch.no_grad()
def reduce_scatter(
    output: Tensor, full: Tensor, group: dist.ProcessGroup, peer_memory: PeerMemory, mean: bool = False
) -> None:
    """Reduces ``full`` over the ranks and writes this rank's part of the sum, or mean, to ``output``; 1D, contiguous.

    Peers read ``full`` in place: do not write to it before ``peer_memory.await_readers()``.
    """
    if group.size() == 1 or not output.numel():
        output.copy_(full)
        return
    offer = peer_memory.offer(_REDUCTION, [full])
    so_far, numel = full.chunk(group.size())[group.rank()], PIECE_BYTES // full.itemsize
    slot = full.new_empty(min(numel, so_far.numel()))
    for peer in peer_memory.ranks:
        source, start_bytes = peer_memory.source(offer, peer), group.rank() * so_far.nbytes
        for mine, piece in zip(so_far.split(numel), output.split(numel), strict=True):
            arrived = slot[: mine.numel()]
            peer_memory.read(source, [arrived], start_bytes)
            start_bytes += mine.nbytes
            torch.add(mine, arrived, out=piece)
        peer_memory.done(offer, source)
        so_far = output
    if mean:
        output.div_(group.size())


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


class ReduceScatter:
    """The argument of ``FSDPModule.set_custom_reduce_scatter``; one object serves all units, which take turns.

    Args:
        peer_memory: Of all ranks of the groups that it is called with.
    """

    def __init__(self, peer_memory: PeerMemory) -> None:
        self._peer_memory = peer_memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates the input or the output of the next reduction."""
        self._peer_memory.release_read()  # frees inputs that all peers have read
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Runs :func:`reduce_scatter`, of the mean if ``op`` is ``AVG``."""
        with record_function("exchange::reduce_scatter"):  # its messages have no names in a profiler's trace
            reduce_scatter(output_tensor, input_tensor, group, self._peer_memory, op == dist.ReduceOp.AVG)
