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
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from lightning_zero.comm.peer_memory import PeerMemory

FIRST_TAG = 8000
"""Lowest tag of the messages here; user code is unlikely to use it."""


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


@torch.no_grad()
def all_reduce(
    message: Tensor,
    op: Any,
    group: dist.ProcessGroup,
    tag: int,
    peers: PeerMemory | None = None,
    timeout: timedelta | None = None,
) -> Iterator[None]:
    """Reduces ``message`` (in host memory) over the ranks in place; ``op`` is a sum or a maximum.

    The caller takes the first step of the iterator to begin, and the rest to wait. The ``peers`` are reached
    through their own connections, all other ranks through gloo.

    Raises:
        RuntimeError: If another rank does not join within ``timeout``, by default that of ``group``, or has ended.
    """
    rank, below = group.rank(), children(group.rank(), group.size())
    edges = [*below, *([parent(rank)] if rank else [])]
    near = peers.ranks if peers is not None else ()
    # Post all receives first: gloo starts a peer's send only when its receiver is there.
    arriving: dict[int, tuple[Tensor, Any]] = {}
    for peer in edges:
        if peer not in near:
            content = torch.empty_like(message)
            with _naming(group, peer):
                arriving[peer] = content, dist.irecv(content, group=group, group_src=peer, tag=tag)
    sent: list[tuple[int, Any]] = []
    limit = () if timeout is None else (timeout,)

    def recv(peer: int) -> Tensor:
        if peer in arriving:
            content, work = arriving[peer]
            with _naming(group, peer):
                work.wait(*limit)
            return content
        assert peers is not None
        received = bytearray(peers.recv(peer, tag, message.nbytes))
        return torch.frombuffer(received, dtype=message.dtype) if received else message.new_empty(0)

    def send(peer: int) -> None:
        if peer in arriving:
            with _naming(group, peer):
                sent.append((peer, dist.isend(message, group=group, group_dst=peer, tag=tag)))
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
    for peer, work in sent:  # until then the caller must not change `message`
        with _naming(group, peer):
            work.wait()


@contextlib.contextmanager
def _naming(group: dist.ProcessGroup, peer: int) -> Iterator[None]:
    """Names ``peer``, for which this rank waits, in an error. It may wait for another rank itself."""
    try:
        yield
    except RuntimeError as error:  # also DistBackendError, if the peer has closed its connections
        rank = dist.get_global_rank(group, peer)
        raise RuntimeError(f"rank {rank} has ended, or did not respond in time: see its last output") from error


def gather(value: bytes, group: dist.ProcessGroup, tag: int, timeout: timedelta | None = None) -> list[bytes]:
    """Returns every rank's ``value``, by rank. It is a sum of one row per rank, so values should be small.

    Raises:
        RuntimeError: As :func:`all_reduce`.
    """
    rank, ranks = group.rank(), group.size()
    sizes = torch.zeros(ranks, dtype=torch.int64, device="cpu")  # 1D
    sizes[rank] = len(value)
    for _ in all_reduce(sizes, dist.ReduceOp.SUM, group, tag, timeout=timeout):
        pass
    nbytes = sizes.tolist()
    rows = torch.zeros(ranks, max(nbytes), dtype=torch.uint8, device="cpu")  # (ranks, largest size), padded
    rows[rank, : len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    for _ in all_reduce(rows, dist.ReduceOp.SUM, group, tag, timeout=timeout):
        pass
    return [bytes(row[:size].numpy()) for row, size in zip(rows, nbytes, strict=True)]
