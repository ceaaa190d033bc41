"""Lets ranks that share a host read each other's memory: one copy, where a socket needs several.

Linux lets a process read the memory of another process that it may trace (``process_vm_readv(2)``). MPI libraries
exchange data within a host in this way. Messages of a few bytes on local sockets carry the addresses and confirm the
reads.

[Plan of one exchange]

    offer           each rank sends its peers the addresses of its tensors
    read            each peer copies the bytes it needs out of the owner's memory, and confirms
    await_readers   the owner holds the tensors, and nobody writes to them, until all peers have confirmed

When the ranks of a group connect, each tries to read all others. If one of them cannot (it is on another host, not on
Linux, or a container or a kernel setting forbids it), no rank does, and the caller uses gloo for everything.

*Peers* are the other ranks of the group.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import socket
import struct
import sys
import uuid
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm import tree

_CONTENT_BYTES = 2048
"""Limit of a message's content; a socket's buffer holds many such messages."""
_HEADER = struct.Struct("=qQ")
"""Kind of the exchange (negated in a confirmation) and its number; 0 outside exchanges. The content follows."""
_ADDRESS = struct.Struct("=Q")
_CALL_BYTES, _CALL_PIECES = 2**30, 1024
"""Limits of one call; the kernel's own are 0x7ffff000 bytes and IOV_MAX pieces."""
_CONNECT_SECONDS = 60.0
"""Time to connect. It can be short: all ranks come from the same collective call, so they arrive together."""


@dataclass
class Offer:
    """This rank's tensors in one exchange, which its peers read.

    Attributes:
        table: The addresses of the tensors.
        readers: Peers that have not yet confirmed that they have read these tensors.
        sources: Peers whose tensors this rank has not finished reading.
    """

    kind: int
    number: int
    tensors: Sequence[Tensor]
    table: Any
    readers: set[int]
    sources: set[int]


@dataclass
class Source:
    """The tensors that ``rank`` offers: addresses in its memory."""

    rank: int
    addresses: list[int]


class PeerMemory:
    """Connections to the other ranks of ``group``, if all are on this host and may read each other's memory.

    The constructor is collective. Exchanges of one kind must begin in the same order on all ranks, with the same number
    of tensors of the same sizes (contiguous, on the CPU). Exchanges of different kinds may interleave.

    Args:
        group: A group of CPU processes. All ranks in this class are ranks of this group.
        timeout_seconds: How long a call waits for another rank.

    Attributes:
        ranks: The peers, beginning with the previous rank, so that no two ranks begin with the same peer. Empty if
            reading is forbidden.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._links = _links_of_host(group, timeout_seconds)
        self._numbers: dict[int, int] = {}
        self._offers: dict[tuple[int, int], Offer] = {}  # kind, number -> tensors that are still held
        self._arrived = defaultdict[tuple[int, int, int], deque[bytes]](deque)  # rank, kind, number -> contents

    @property
    def ranks(self) -> Collection[int]:
        return self._links.keys()

    def offer(self, kind: int, tensors: Sequence[Tensor]) -> Offer:
        """Begins an exchange of ``kind``, a positive number; do not write to ``tensors`` before :meth:`await_readers`.

        Raises:
            RuntimeError: As all methods: if a peer has ended, or does not answer within ``timeout_seconds``.
        """
        self._bound_held(kind)
        # Each rank counts for itself, so no rank may skip an exchange: it would read the wrong tensors from then on.
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        table = (ctypes.c_size_t * len(tensors))(*(t.data_ptr() for t in tensors))
        offer = Offer(kind, number, tensors, table, set(self._links), set(self._links))
        self._offers[kind, number] = offer  # before any message: keeps table and tensors alive while peers read them
        for rank in self._links:
            self._send_message(rank, kind, number, _ADDRESS.pack(ctypes.addressof(table)))
        return offer

    def source(self, offer: Offer, rank: int) -> Source:
        """Waits for the offer of ``rank`` in the same exchange."""
        (address,) = _ADDRESS.unpack(self._take(rank, offer.kind, offer.number))
        table = type(offer.table)()
        self._copy(rank, [(ctypes.addressof(table), address, ctypes.sizeof(table))])
        return Source(rank, list(table))

    def read(self, source: Source, into: Sequence[Tensor], start_bytes: int = 0) -> None:
        """Fills each tensor of ``into`` from ``start_bytes`` on of the tensor of ``source`` at the same index."""
        pairs = zip(into, source.addresses, strict=True)
        self._copy(source.rank, ((t.data_ptr(), at + start_bytes, t.nbytes) for t, at in pairs))

    def done(self, offer: Offer, source: Source) -> None:
        """Confirms to the owner of ``source`` that this rank has read it."""
        offer.sources.remove(source.rank)
        # Only after the last read: the owner writes to its tensors once all have confirmed.
        self._send_message(source.rank, -offer.kind, offer.number)

    def send(self, rank: int, kind: int, content: bytes) -> None:
        """Sends ``content``, a few numbers, to one peer. ``kind`` must not be the kind of an exchange."""
        for start in range(0, len(content), _CONTENT_BYTES):
            self._send_message(rank, kind, 0, content[start : start + _CONTENT_BYTES])

    def recv(self, rank: int, kind: int, nbytes: int) -> bytes:
        """Waits for the next ``nbytes`` that ``rank`` sends to this rank by :meth:`send` with this ``kind``."""
        content = b""
        while len(content) < nbytes:
            content += self._take(rank, kind, 0)
        return content

    def release_read(self) -> None:
        """Releases the tensors that all peers have read, without waiting."""
        for rank in self._links if self._offers else ():
            while self._recv_message(rank, socket.MSG_DONTWAIT):
                pass

    def await_readers(self) -> None:
        """Waits until the peers have read this rank's tensors; the caller may write to them afterwards.

        Exchanges in which this rank itself has not read everything are skipped: waiting for them here could block both
        sides."""
        for offer in list(self._offers.values()):
            if not offer.sources:
                self._await(offer)

    def close(self) -> None:
        """Waits for the readers and disconnects; afterwards ``ranks`` is empty."""
        self.await_readers()
        for link in self._links.values():
            link.socket.close()
        self._links = {}

    def _bound_held(self, kind: int) -> None:
        """Bounds the memory held by offers of ``kind``, before the next one: waits for all but the latest of them. So a
        peer that is only a little late delays nobody."""
        for offer in [o for o in self._offers.values() if o.kind == kind and not o.sources][:-1]:
            self._await(offer)

    def _await(self, offer: Offer) -> None:
        while offer.readers:  # keeps other messages that arrive meanwhile, because kinds interleave
            self._recv_message(next(iter(offer.readers)))

    def _take(self, rank: int, kind: int, number: int) -> bytes:
        """Waits for the next content from ``rank`` with this ``kind`` and ``number``."""
        while not (contents := self._arrived[rank, kind, number]):
            self._recv_message(rank)
        content = contents.popleft()
        if not contents:
            del self._arrived[rank, kind, number]
        return content

    def _send_message(self, rank: int, kind: int, number: int, content: bytes = b"") -> None:
        try:
            self._links[rank].socket.send(_HEADER.pack(kind, number) + content)
        except OSError as error:
            raise self._lost(rank, error) from error

    def _recv_message(self, rank: int, flags: int = 0) -> bool:
        """Receives one message; returns ``False`` if there is none and ``flags`` forbid waiting."""
        try:
            message = self._links[rank].socket.recv(_HEADER.size + _CONTENT_BYTES, flags)
        except OSError as error:
            if flags and isinstance(error, BlockingIOError):
                return False
            raise self._lost(rank, error) from error
        if not message and flags:  # a peer that ended its run has closed its socket: no error unless somebody waits
            return False
        if not message:
            raise self._lost(rank, "it closed its connection")
        kind, number = _HEADER.unpack_from(message)
        if kind > 0:
            self._arrived[rank, kind, number].append(message[_HEADER.size :])
            return True
        offer = self._offers[-kind, number]
        offer.readers.remove(rank)
        if not offer.readers:
            del self._offers[-kind, number]
        return True

    def _copy(self, rank: int, pieces: Iterable[tuple[int, int, int]]) -> None:
        for batch in _batches(pieces):
            if _read_memory(self._links[rank].pid, batch) != sum(size for _, _, size in batch):
                raise self._lost(rank, os.strerror(ctypes.get_errno()))

    def _lost(self, rank: int, reason: object) -> RuntimeError:
        who = f"rank {dist.get_global_rank(self._group, rank)}"
        if isinstance(reason, BlockingIOError):  # how the kernel reports a socket's time-out
            return RuntimeError(
                f"{who} did not respond within timeout_seconds={self._timeout_seconds:g}. Either it hangs (see its last"
                " output), or ranks have diverged: a backward through other layers (the loss of an early exit, a"
                " gradient penalty or frozen layers on some ranks), or a call under `if rank == 0`."
            )
        return RuntimeError(f"{who} has ended ({reason}): see its last output.")


def _batches(pieces: Iterable[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Groups ``pieces`` (local address, remote address, bytes) into batches within the limits of one call."""
    batch: list[tuple[int, int, int]] = []
    nbytes = 0
    for here, there, size in pieces:
        for start in range(0, size, _CALL_BYTES):
            part = min(_CALL_BYTES, size - start)
            if nbytes + part > _CALL_BYTES or len(batch) == _CALL_PIECES:
                yield batch
                batch, nbytes = [], 0
            batch.append((here + start, there + start, part))
            nbytes += part
    if batch:
        yield batch


def _read_memory(pid: int, batch: Sequence[tuple[int, int, int]]) -> int:
    """Calls ``process_vm_readv(2)``; returns the bytes copied, or -1 with errno set."""
    vector = ctypes.c_size_t * (2 * len(batch))  # of struct iovec: address, size
    here = vector(*(word for to, _, size in batch for word in (to, size)))
    there = vector(*(word for _, at, size in batch for word in (at, size)))
    return int(_libc().process_vm_readv(pid, here, len(batch), there, len(batch), 0))


@functools.cache
def _libc() -> Any:
    libc, size, array = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong, ctypes.c_void_p
    libc.process_vm_readv.argtypes = [ctypes.c_int, array, size, array, size, size]
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


# -- connecting --------------------------------------------------------------------------------------------------------


@dataclass
class _Link:
    pid: int
    socket: socket.socket


@dataclass
class _Card:
    """A rank's introduction to the others."""

    pid: int
    name: bytes  # of the socket that it listens on; no other host has the same
    sample_address: int


def _links_of_host(group: dist.ProcessGroup, timeout_seconds: float) -> dict[int, _Link]:
    """Connects all ranks; returns the link to each peer, by rank, or nothing if not all may read each other.

    All ranks must make the same collective calls here, even if something fails on one of them.
    """
    if group.size() == 1 or sys.platform != "linux":
        return {}
    # Where only ancestors may trace a process (``kernel.yama.ptrace_scope`` is 1), allow it to all of this user's.
    _libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    sample, links = ctypes.c_size_t(), dict[int, _Link]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(_CONNECT_SECONDS)
        listener.bind(b"\0lightning_zero-" + uuid.uuid4().hex.encode())  # abstract: nothing to delete afterwards
        listener.listen(group.size())
        cards = _gather(_Card(os.getpid(), listener.getsockname(), ctypes.addressof(sample)), group)
        # The higher rank connects, the lower one accepts: a link per pair
        works = all(_gather(_connect(links, cards[: group.rank()]), group)) and _accept(links, cards, listener)
    everyones = _gather(works, group)  # keep the sample alive until here: all ranks have read it now
    if not all(everyones):
        for link in links.values():
            link.socket.close()
        return {}
    limit = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6))  # struct timeval
    for link in links.values():
        link.socket.settimeout(None)
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return {other: links[other] for other in sorted(links, key=lambda other: (group.rank() - other) % group.size())}


def _gather(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    return [pickle.loads(each) for each in tree.gather(pickle.dumps(mine), group, tree.FIRST_TAG)]


def _connect(links: dict[int, _Link], cards: Sequence[_Card]) -> bool:
    """Connects to the ranks that ``cards`` are of; fails at once if one is in another network or process namespace."""
    try:
        for rank, card in enumerate(cards):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            links[rank] = _Link(card.pid, made)
            made.settimeout(_CONNECT_SECONDS)
            made.connect(card.name)
            if _pid_of(made) != card.pid:
                return False
    except OSError:
        return False
    return True


def _accept(links: dict[int, _Link], cards: Sequence[_Card], listener: socket.socket) -> bool:
    """Accepts the other ranks, which have connected already; returns whether this rank may read all of them."""
    ranks = {card.pid: rank for rank, card in enumerate(cards)}
    try:
        while len(links) < len(cards) - 1:
            made, _ = listener.accept()
            if (rank := ranks.get(_pid_of(made))) is not None:
                links[rank] = _Link(cards[rank].pid, made)
            else:  # another process of this host
                made.close()
    except OSError:
        return False
    return all(_can_read(cards[rank]) for rank in links)


def _pid_of(connected: socket.socket) -> int:
    """The process at the other end of a socket."""
    pid, _, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _can_read(card: _Card) -> bool:
    found = ctypes.c_size_t()
    size = ctypes.sizeof(found)
    return _read_memory(card.pid, [(ctypes.addressof(found), card.sample_address, size)]) == size


_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
"""Defined in ``<linux/prctl.h>``."""
