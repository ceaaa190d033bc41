"""Small messages of all ranks, up and down a binomial tree of ranks.

[Plan of one round, N ranks]

    up      each rank waits for its children, combines what they say with its own, and tells its parent
    down    rank 0 has everyone's; each rank passes it on to its children

The parent of a rank is the rank without its lowest set bit, so a subtree is a block of neighbours, and few edges leave
a host. A rank sends and receives two messages on average and ``log2(N)`` each at most, over as many connections; a
round takes ``2 log2(N)`` hops. Gloo's own all-reduce and all-gather are rings: ``2 (N - 1)`` messages per rank, one
after the other.

Receivers are posted when a round begins: gloo starts a send when its receiver is there. Messages between two ranks are
matched by their tag, in the order of posting, so rounds of different tags never meet, on one thread or on several;
those of one tag begin in the same order on all ranks.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

FIRST_TAG = 8000
"""Of the messages here; beyond those of the direct exchange, and no number that a user's own are likely to have."""
_HEADER = struct.Struct("=Q")
"""The size of what is sent."""
_FIRST_BYTES = 1024
"""Of the first message, header included. What does not fit into it follows in a second one."""


def parent(rank: int) -> int:
    """Of any rank but 0."""
    return rank & (rank - 1)


def children(rank: int, size: int) -> list[int]:
    """The ranks whose parent is ``rank``, those with the smallest subtrees first: they have the fewest to wait for."""
    found, step = [], 1
    while rank + step < size and not rank & step:
        found.append(rank + step)
        step *= 2
    return found


class Peers(Protocol):
    """Ranks with connections beside gloo's: those of ``peer_memory``."""

    @property
    def ranks(self) -> Collection[int]: ...

    def tell(self, rank: int, kind: int, content: bytes) -> None: ...

    def hear(self, rank: int, kind: int, nbytes: int) -> bytes: ...


class LostRankError(RuntimeError):
    """The rank that this one has waited for in vain; it, or one that it waits for itself, does not answer."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"this rank has waited for rank {rank}, and so perhaps for one that rank {rank} waits for")


@torch.no_grad()
def all_reduce(message: Tensor, op: Any, group: dist.ProcessGroup, tag: int, peers: Peers | None) -> Iterator[None]:
    """``message``, a few numbers, 1D, will be the sum or the maximum over the ranks, as ``op`` says.

    The caller takes the first step of the iterator to begin, and the rest to wait. The ``peers`` are reached
    through their own connections, the others through gloo.
    """
    rank, below = group.rank(), children(group.rank(), group.size())
    edges = [*below, *([parent(rank)] if rank else [])]
    near = peers.ranks if peers is not None else ()
    arriving = {peer: _Arriving(message, peer, group, tag) for peer in edges if peer not in near}
    sent: list[Any] = []

    def hear(peer: int) -> Tensor:
        if peer in arriving:
            return arriving[peer].wait()
        assert peers is not None
        content = bytearray(peers.hear(peer, tag, message.nbytes))
        return torch.frombuffer(content, dtype=message.dtype) if content else message.new_empty(0)

    def tell(peer: int) -> None:
        if peer in arriving:
            sent.append(dist.isend(message, group=group, group_dst=peer, tag=tag))
        else:
            assert peers is not None
            peers.tell(peer, tag, bytes(message.view(torch.uint8).numpy()))

    if rank and not below:
        tell(parent(rank))
    yield
    for child in below:
        if op == dist.ReduceOp.MAX:
            torch.maximum(message, hear(child), out=message)
        else:
            message.add_(hear(child))
    if rank:
        if below:
            tell(parent(rank))
        message.copy_(hear(parent(rank)))
    for child in reversed(below):  # the largest subtree has the longest way
        tell(child)
    for work in sent:  # before, their memory must not change
        work.wait()


class _Arriving:
    """A message from ``peer``, of the size of ``like``."""

    def __init__(self, like: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> None:
        self._message = torch.empty_like(like)
        self._work: Any = dist.irecv(self._message, group=group, group_src=peer, tag=tag)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._message


@torch.no_grad()
def gather(value: bytes, group: dist.ProcessGroup, tag: int, timeout_seconds: float) -> list[bytes]:
    """Every rank's ``value``, by rank.

    Raises:
        LostRankError: When another rank has not come after ``timeout_seconds``, or has ended.
    """
    rank, below = group.rank(), children(group.rank(), group.size())
    round_ = _Round(group, tag, time.monotonic() + timeout_seconds, [*below, *([parent(rank)] if rank else [])])
    of_subtree = [value]  # its ranks are neighbours, this one the first of them
    for child in below:
        of_subtree += pickle.loads(round_.receive(child))
    everyones = pickle.dumps(of_subtree)
    if rank:
        round_.send(parent(rank), everyones)
        everyones = round_.receive(parent(rank))
    for child in reversed(below):
        round_.send(child, everyones)
    round_.finish()
    values: list[bytes] = pickle.loads(everyones)
    return values


class _Round:
    """Messages of any size between this rank and ``peers``, until ``deadline`` (of the monotonic clock)."""

    def __init__(self, group: dist.ProcessGroup, tag: int, deadline: float, peers: list[int]) -> None:
        self._group, self._tag, self._deadline = group, tag, deadline
        self._sent: list[tuple[Any, int, Tensor]] = []  # with their memory
        self._first = {peer: self._begun(peer, _FIRST_BYTES) for peer in peers}

    def _begun(self, peer: int, nbytes: int) -> tuple[Any, Tensor]:
        into = torch.empty(nbytes, dtype=torch.uint8)
        try:
            return dist.irecv(into, group=self._group, group_src=peer, tag=self._tag), into
        except RuntimeError as error:
            raise LostRankError(peer) from error

    def receive(self, peer: int) -> bytes:
        """What ``peer`` says in this round."""
        first = self._whole(peer, *self._first[peer])
        (size,) = _HEADER.unpack_from(first)
        rest = size - (_FIRST_BYTES - _HEADER.size)
        if rest <= 0:
            return first[_HEADER.size : _HEADER.size + size]
        return first[_HEADER.size :] + self._whole(peer, *self._begun(peer, rest))

    def _whole(self, peer: int, work: Any, into: Tensor) -> bytes:
        self._wait(work, peer)
        return bytes(into.numpy())

    def send(self, peer: int, value: bytes) -> None:
        framed = _HEADER.pack(len(value)) + value
        for part in (framed[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"), framed[_FIRST_BYTES:]):
            if part:
                memory = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                try:
                    work = dist.isend(memory, group=self._group, group_dst=peer, tag=self._tag)
                except RuntimeError as error:
                    raise LostRankError(peer) from error
                self._sent.append((work, peer, memory))

    def finish(self) -> None:
        """Waits until all has been sent."""
        for work, peer, _ in self._sent:
            self._wait(work, peer)

    def _wait(self, work: Any, peer: int) -> None:
        left = max(self._deadline - time.monotonic(), 0.001)  # gloo takes 0 for its default
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise LostRankError(peer) from error
