"""Small messages of all ranks, sent up and down a binomial tree of ranks.

[Plan of one round, N ranks]

    up      each rank receives from its children, combines their values with its own, and sends to its parent
    down    rank 0 has the combined value; each rank forwards it to its children

The parent of a rank is the rank without its lowest set bit. So a subtree is a block of neighbouring ranks, and few
edges leave a host. A rank sends and receives two messages on average and at most ``log2(N)``, over as many connections;
a round takes ``2 log2(N)`` hops. Gloo's own all-reduce and all-gather are rings: ``2 (N - 1)`` messages per rank, one
after the other.

Receivers are posted when a round begins, because gloo starts a send only when its receiver is there. Messages between
two ranks are matched by tag, in the order of posting. So rounds of different tags never mix, on one thread or several;
rounds of one tag must begin in the same order on all ranks.
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
"""Lowest tag of the messages here: above those of the direct exchange, and unlikely to be used by a user's own."""
_HEADER = struct.Struct("=Q")
"""Size of the content."""
_FIRST_BYTES = 1024
"""Size of the first message, header included. A longer content continues in a second message."""


def parent(rank: int) -> int:
    """The parent of any rank but 0."""
    return rank & (rank - 1)


def children(rank: int, size: int) -> list[int]:
    """The ranks whose parent is ``rank``, smallest subtrees first: these are ready first."""
    found, step = [], 1
    while rank + step < size and not rank & step:
        found.append(rank + step)
        step *= 2
    return found


class Peers(Protocol):
    """Ranks that are connected without gloo, as by ``peer_memory``."""

    @property
    def ranks(self) -> Collection[int]: ...

    def send(self, rank: int, kind: int, content: bytes) -> None: ...

    def recv(self, rank: int, kind: int, nbytes: int) -> bytes: ...


class LostRankError(RuntimeError):
    """A rank does not answer: the one that this rank waited for, or the one that that rank is waiting for itself."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.rank = missing(dist.get_global_rank(group, rank))
        super().__init__(f"rank {self.rank} has ended or did not respond in time: see its last output")


_WAITING = "lightning_zero/waited_for"
_PATIENCE_SECONDS = 1.5
"""Time for a rank to report whom it waited for. All ranks give up at about the same time, or at once if a peer has
closed its connections."""


def missing(rank: int) -> int:
    """Finds the rank that all others wait for, after this rank waited for ``rank`` in vain; both are global ranks.

    A rank that gives up writes to the process group's store whom it waited for. This function follows these entries: a
    rank that others wait for, and that has written nothing, is missing.
    """
    found, world = [rank], dist.group.WORLD
    if world is None or world.size() == 2:  # there is no third rank to follow
        return rank

    def follow() -> None:
        with contextlib.suppress(Exception):  # the store may have ended with the rank that hosts it
            store = world.get_group_store()
            store.set(f"{_WAITING}/{dist.get_rank()}", str(rank))
            until = time.monotonic() + _PATIENCE_SECONDS
            while time.monotonic() < until:
                if not store.check([f"{_WAITING}/{found[-1]}"]):
                    time.sleep(0.05)
                elif (other := int(store.get(f"{_WAITING}/{found[-1]}"))) in found:
                    return
                else:
                    found.append(other)

    # On a thread, because a store in a stopped process never answers.
    following = threading.Thread(target=follow, daemon=True, name="missing rank")
    with contextlib.suppress(RuntimeError):  # no memory for its stack
        following.start()
        following.join(_PATIENCE_SECONDS + 1)
    return found[-1]


def withdraw_waiting() -> None:
    """Deletes what this rank wrote in :func:`missing`, before ranks begin again."""
    if dist.group.WORLD is not None:
        dist.group.WORLD.get_group_store().delete_key(f"{_WAITING}/{dist.get_rank()}")


@torch.no_grad()
def all_reduce(message: Tensor, op: Any, group: dist.ProcessGroup, tag: int, peers: Peers | None) -> Iterator[None]:
    """Reduces ``message``, a few numbers (1D), over the ranks in place; ``op`` is a sum or a maximum.

    The caller takes the first step of the iterator to begin, and the rest to wait. The ``peers`` are reached
    through their own connections, all other ranks through gloo.
    """
    rank, below = group.rank(), children(group.rank(), group.size())
    edges = [*below, *([parent(rank)] if rank else [])]
    near = peers.ranks if peers is not None else ()
    # Post all receives first: gloo starts a peer's send only when its receiver is there.
    arriving = {peer: _Arriving(message, peer, group, tag) for peer in edges if peer not in near}
    sent: list[Any] = []

    def recv(peer: int) -> Tensor:
        if peer in arriving:
            try:
                return arriving[peer].wait()
            except RuntimeError as error:
                raise LostRankError(group, peer) from error
        assert peers is not None
        content = bytearray(peers.recv(peer, tag, message.nbytes))
        return torch.frombuffer(content, dtype=message.dtype) if content else message.new_empty(0)

    def send(peer: int) -> None:
        if peer in arriving:
            sent.append(dist.isend(message, group=group, group_dst=peer, tag=tag))
        else:
            assert peers is not None
            peers.send(peer, tag, bytes(message.view(torch.uint8).numpy()))

    if rank and not below:  # a leaf has nothing to wait for, so its message travels while the caller continues
        send(parent(rank))
    yield
    for child in below:
        if op == dist.ReduceOp.MAX:
            torch.maximum(message, recv(child), out=message)
        else:
            message.add_(recv(child))
    if rank:
        if below:
            send(parent(rank))
        message.copy_(recv(parent(rank)))
    for child in reversed(below):  # largest subtree first: its messages have the most hops left
        send(child)
    for work in sent:  # until then the caller must not change `message`
        work.wait()


class _Arriving:
    """A posted receive from ``peer`` of a message with the size of ``like``."""

    def __init__(self, like: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> None:
        self._message = torch.empty_like(like)
        self._work: Any = dist.irecv(self._message, group=group, group_src=peer, tag=tag)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._message


def gather(value: bytes, group: dist.ProcessGroup, tag: int, timeout_seconds: float) -> list[bytes]:
    """Returns every rank's ``value``, by rank.

    Raises:
        LostRankError: If another rank does not join within ``timeout_seconds``, or has ended.
    """
    with _gathered_up(value, group, tag, timeout_seconds) as (round_, of_subtree):
        everyones = pickle.dumps(of_subtree)
        if group.rank():
            round_.send(parent(group.rank()), everyones)
            everyones = round_.recv(parent(group.rank()))
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
    """Returns this rank's part of what rank 0 decides from every rank's ``value``; both lists are by rank.

    Works like :func:`gather`, but a rank receives only the parts of its subtree, so only rank 0 holds everything.

    Args:
        decide: Called on rank 0 alone. It must not raise: the other ranks would wait until their time-out.
    """
    rank = group.rank()
    with _gathered_up(value, group, tag, timeout_seconds) as (round_, of_subtree):
        if rank:
            round_.send(parent(rank), pickle.dumps(of_subtree))
            parts: list[bytes] = pickle.loads(round_.recv(parent(rank)))
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
    """Runs the upward half of a round and yields it with the values of this rank's subtree. Leaving the block waits
    until everything is sent."""
    rank, below = group.rank(), children(group.rank(), group.size())
    round_ = _Round(group, tag, time.monotonic() + timeout_seconds, [*below, *([parent(rank)] if rank else [])])
    with torch.no_grad():
        of_subtree = [value]  # its ranks are neighbours, this one the first of them
        for child in below:
            of_subtree += pickle.loads(round_.recv(child))
        yield round_, of_subtree
        round_.finish()


class _Round:
    """Messages of any size between this rank and ``peers``, until ``deadline`` (of the monotonic clock)."""

    def __init__(self, group: dist.ProcessGroup, tag: int, deadline: float, peers: list[int]) -> None:
        self._group, self._tag, self._deadline = group, tag, deadline
        self._sent: list[tuple[Any, int, Tensor]] = []  # keeps the memory of messages in flight alive
        self._first = {peer: self._irecv(peer, _FIRST_BYTES) for peer in peers}

    def _irecv(self, peer: int, nbytes: int) -> tuple[Any, Tensor]:
        into = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        try:
            return dist.irecv(into, group=self._group, group_src=peer, tag=self._tag), into
        except RuntimeError as error:
            raise LostRankError(self._group, peer) from error

    def recv(self, peer: int) -> bytes:
        """The message of ``peer`` in this round."""
        first = self._received(peer, *self._first[peer])
        (size,) = _HEADER.unpack_from(first)
        rest = size - (_FIRST_BYTES - _HEADER.size)
        if rest <= 0:
            return first[_HEADER.size : _HEADER.size + size]
        return first[_HEADER.size :] + self._received(peer, *self._irecv(peer, rest))

    def _received(self, peer: int, work: Any, into: Tensor) -> bytes:
        self._wait(work, peer)
        return bytes(into.numpy())

    def send(self, peer: int, value: bytes) -> None:
        framed = _HEADER.pack(len(value)) + value
        # The first part is padded: its receive was posted with a fixed size, before anybody knew the content's size.
        for part in (framed[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"), framed[_FIRST_BYTES:]):
            if part:
                memory = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                try:
                    work = dist.isend(memory, group=self._group, group_dst=peer, tag=self._tag)
                except RuntimeError as error:
                    raise LostRankError(self._group, peer) from error
                self._sent.append((work, peer, memory))

    def finish(self) -> None:
        """Waits until everything is sent."""
        for work, peer, _ in self._sent:
            self._wait(work, peer)

    def _wait(self, work: Any, peer: int) -> None:
        left = max(self._deadline - time.monotonic(), 0.001)  # gloo reads 0 as its default time-out
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise LostRankError(self._group, peer) from error
