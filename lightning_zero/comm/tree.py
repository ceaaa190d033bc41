"""Small messages of all ranks, up and down a binomial tree of ranks.

[Plan of one round, N ranks]

    up      each rank receives from its children, combines their values with its own, and sends to its parent
    down    rank 0 has the combined value; each rank forwards it to its children

The parent of a rank is the rank without its lowest set bit, so a subtree is a block of neighbors, and few edges leave
a host. A rank sends and receives two messages on average and ``log2(N)`` each at most, over as many connections; a
round takes ``2 log2(N)`` hops. Gloo's own all-reduce and all-gather are rings: ``2 (N - 1)`` messages per rank, one
after the other.

Receivers are posted when a round begins: gloo starts a send when its receiver is there. Messages between two ranks are
matched by their tag, in the order of posting, so rounds of different tags never meet, on one thread or on several;
those of one tag begin in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
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
    """A rank does not answer: the one that this rank has waited for in vain, or one that that one waits for itself."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.rank = missing(dist.get_global_rank(group, rank))
        super().__init__(f"rank {self.rank} has ended, or has not come in time: its last output says why")


_WAITED = "lightning_zero/waited_for"
_PATIENCE_SECONDS = 1.5
"""Time in which a rank may say for whom it has waited. All give up at about the same time, or at once where one has
closed its connections."""


def missing(rank: int) -> int:
    """The rank that all wait for, where this one has waited for ``rank``: ranks that have given up say for whom at the
    store of the process group, and one that is waited for and says nothing is missing. By global ranks."""
    found, world = [rank], dist.group.WORLD
    if world is None or world.size() == 2:  # nobody else
        return rank

    def follow() -> None:
        with contextlib.suppress(Exception):  # the store may be gone with the rank that keeps it
            store = world.get_group_store()
            store.set(f"{_WAITED}/{dist.get_rank()}", str(rank))
            until = time.monotonic() + _PATIENCE_SECONDS
            while time.monotonic() < until:
                if not store.check([f"{_WAITED}/{found[-1]}"]):
                    time.sleep(0.05)
                elif (other := int(store.get(f"{_WAITED}/{found[-1]}"))) in found:
                    return
                else:
                    found.append(other)

    # On a thread: a store whose process is stopped answers never
    following = threading.Thread(target=follow, daemon=True, name="missing rank")
    with contextlib.suppress(RuntimeError):  # no memory for its stack
        following.start()
        following.join(_PATIENCE_SECONDS + 1)
    return found[-1]


def forget_missing() -> None:
    """Before ranks begin anew: takes back what this one has said."""
    if dist.group.WORLD is not None:
        dist.group.WORLD.get_group_store().delete_key(f"{_WAITED}/{dist.get_rank()}")


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
            try:
                return arriving[peer].wait()
            except RuntimeError as error:
                raise LostRankError(group, peer) from error
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


def gather(value: bytes, group: dist.ProcessGroup, tag: int, timeout_seconds: float) -> list[bytes]:
    """Every rank's ``value``, by rank.

    Raises:
        LostRankError: When another rank has not come after ``timeout_seconds``, or has ended.
    """
    with _gathered_up(value, group, tag, timeout_seconds) as (round_, of_subtree):
        everyones = pickle.dumps(of_subtree)
        if group.rank():
            round_.send(parent(group.rank()), everyones)
            everyones = round_.receive(parent(group.rank()))
        for child in reversed(children(group.rank(), group.size())):
            round_.send(child, everyones)
    values: list[bytes] = pickle.loads(everyones)
    return values


def deal(
    value: bytes,
    decide: Callable[[list[bytes]], list[bytes]],
    group: dist.ProcessGroup,
    tag: int,
    timeout_seconds: float,
) -> bytes:
    """This rank's part of what rank 0 decides from every rank's ``value``; both are by rank.

    As :func:`gather`, but what goes down to a rank is for its subtree only, and only rank 0 holds everything.

    Args:
        decide: Called on rank 0 alone; an error of it would leave the others waiting.
    """
    rank = group.rank()
    with _gathered_up(value, group, tag, timeout_seconds) as (round_, of_subtree):
        if rank:
            round_.send(parent(rank), pickle.dumps(of_subtree))
            parts: list[bytes] = pickle.loads(round_.receive(parent(rank)))
        else:
            parts = decide(of_subtree)
        for child in reversed(children(rank, group.size())):
            at = child - rank
            round_.send(child, pickle.dumps(parts[at : 2 * at]))  # a subtree has as many ranks as lie before it
    return parts[0]


@contextlib.contextmanager
def _gathered_up(
    value: bytes, group: dist.ProcessGroup, tag: int, timeout_seconds: float
) -> Iterator[tuple[_Round, list[bytes]]]:
    """A round that has come up to this rank: with the values of its subtree. It ends when all has been sent."""
    rank, below = group.rank(), children(group.rank(), group.size())
    round_ = _Round(group, tag, time.monotonic() + timeout_seconds, [*below, *([parent(rank)] if rank else [])])
    with torch.no_grad():
        of_subtree = [value]  # its ranks are neighbours, this one the first of them
        for child in below:
            of_subtree += pickle.loads(round_.receive(child))
        yield round_, of_subtree
        round_.finish()


class _Round:
    """Messages of any size between this rank and ``peers``, until ``deadline`` (of the monotonic clock)."""

    def __init__(self, group: dist.ProcessGroup, tag: int, deadline: float, peers: list[int]) -> None:
        self._group, self._tag, self._deadline = group, tag, deadline
        self._sent: list[tuple[Any, int, Tensor]] = []  # with their memory
        self._first = {peer: self._begun(peer, _FIRST_BYTES) for peer in peers}

    def _begun(self, peer: int, nbytes: int) -> tuple[Any, Tensor]:
        into = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        try:
            return dist.irecv(into, group=self._group, group_src=peer, tag=self._tag), into
        except RuntimeError as error:
            raise LostRankError(self._group, peer) from error

    def receive(self, peer: int) -> bytes:
        """The message of ``peer`` in this round."""
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
                    raise LostRankError(self._group, peer) from error
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
            raise LostRankError(self._group, peer) from error
