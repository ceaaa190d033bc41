"""Reads that not all ranks make: the others send their rows, wherever their own code has got to.

Code written for DDP reads parameters on rank 0 alone (``if trainer.is_global_zero: torch.save(net.state_dict())``).
Gathering is collective, so before it ranks find out whether all of them are at the same read.

[Plan of a read, N ranks]

    round     each rank says what it reads, a number: one small message on the host. Are all alike, they gather, by a
              collective of the caller's
    bell      a rank whose round is not over after :data:`DELAY_SECONDS` wakes the other ranks' service threads, through
              the store of the process group
    service   where the main thread is elsewhere, a service thread takes its place in the round, and says so
    details   who reads what, and at which count of changes
    rows      every rank sends each reader its rows, those that only serve from their service thread

Each rank takes part in each round exactly once, by one thread or the other, so rounds never get mixed up.

A service must neither be early nor late: rows belong to a count of :class:`Changes`. A rank that has changed them less
often than the reader waits for its main thread. One that has gone on to write to them (``if trainer.is_global_zero:
torch.save(...)``, then on all ranks ``p.clamp_()``) has kept what was there before; before writes to more than
:data:`KEPT_BYTES` of its rows ranks meet instead. Optimizers step after messages that the reader has not answered.
Behind a backward they step without any: where user code runs between the two there is one, a meeting, and until then
gradients can be read, too. Where none is known of, there is none, and a read there raises.

Reads of all ranks cost one message of 16 bytes more than the gather; steps cost nothing but that meeting.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agree import IN_STEP, READS, ROWS, Agreement
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.private.torch import DisableTorchFunction

DELAY_SECONDS = 0.02
"""After which a rank that waits in a round wakes the others: most rounds are over before."""
PATIENCE_SECONDS = 1.0
"""For a main thread that has told the others nothing since: it may be about to read, too."""
_POLL_SECONDS = 0.003
_AGAIN_SECONDS = 0.05
"""After which a rank that nobody can help asks again."""
_APART_SECONDS, _IN_TURN = 0.02, 64
"""Between the connections of neighbouring ranks, so many one after the other. torch asks the resolver for the name
behind each connection, on both of its ends; a resolver that is asked by all ranks at once, as they start, leaves some
without an answer, and each of those is 5 s of rank 0's store."""
_BEHIND_SECONDS = 5.0
"""For changes of a main thread that has gone on without them."""
_FOR_EVER = timedelta(days=3650)
_ENDS = b"null"
UNKNOWN = -1
"""The key of what others cannot send rows of. So are those below."""
WRITE = UNKNOWN - 1
"""The key of any write, where all ranks must have come to it."""

KEPT_BYTES = 32 << 20
"""Of rows as they were before the user's writes, on each rank, since ranks last met."""


class Ahead(IntEnum):
    """The event after the user's code that runs now."""

    MESSAGES = 0
    """Of all ranks, before rows change."""
    STEP = 1
    """The optimizer's, before which ranks do not wait for each other."""
    MEETING = 2
    """And then the optimizer's step. Until then gradients stay as they are, too."""


class Changes:
    """Counts what changes this rank's rows: an optimizer's step, or a write of the user's.

    Attributes:
        begun, done: So far.
        kept_bytes: Of the rows of before, alike on all ranks.
        lost: The latest whose rows of before are not kept.
        ahead: What comes next.
        mark: Called at the end of each change, by the thread that made it.
    """

    def __init__(self) -> None:
        self.mark: Callable[[], object] = lambda: None
        self.begun = self.done = self.lost = 0
        self.ahead = Ahead.MESSAGES
        self.kept_bytes = 0
        self._before: dict[int, list[tuple[int, Tensor]]] = {}  # key -> changes, and rows before each of them

    def begin(self) -> None:
        """Rows change from here on, until :meth:`end`; does not nest."""
        self.lost = self.begun = self.done + 1
        self._before, self.kept_bytes = {}, 0

    def end(self) -> None:
        """See :meth:`begin`; does nothing where nothing has begun."""
        if self.done != self.begun:
            self.mark()
        self.done = self.begun

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Rows change inside it."""
        nested = self.begun != self.done
        self.begin()
        try:
            yield
        finally:
            if not nested:
                self.end()

    @contextmanager
    def of(self, rows: Mapping[int, Tensor], nbytes: int) -> Iterator[None]:
        """Only ``rows`` change inside it, by key: a copy of them is kept until :meth:`forget`. ``nbytes`` are those of
        the rank that has most."""
        if self.begun != self.done:  # inside another
            yield
            return
        number = self.done + 1
        self.kept_bytes += nbytes
        for key, part in rows.items():
            self._before.setdefault(key, []).append((number, part.clone()))
        self.begun = number
        try:
            yield
        finally:
            self.mark()
            self.done = number

    def rows_at(self, done: int, key: int, now: Tensor) -> Tensor:
        """The rows of ``key`` after so many changes; ``now`` they are these."""
        return next((part for number, part in self._before.get(key, ()) if number > done), now)

    def forget(self) -> None:
        """All ranks have met since: nobody reads what was there before."""
        self._before, self.kept_bytes, self.lost = {}, 0, max(self.lost, self.done)


class HostCopies:
    """Copies of rows to host memory, made by any thread, one at a time.

    On an accelerator the main thread's stream may be waiting in a gather for the very rank that wants to read. So
    copies have a stream of their own, which waits for the latest change alone.

    Args:
        device: The rows lie there.
        changes: Of these rows.
    """

    def __init__(self, device: torch.device, changes: Changes) -> None:
        self._module: Any = None
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream, self._changed = self._module.Stream(device), self._module.Event()
            self._changed.record()
            changes.mark = self._changed.record

    def of(self, rows: Tensor) -> Tensor:
        """``rows``, flat."""
        rows = rows.detach()
        if self._module is not None:
            with self._module.stream(self._stream):
                self._stream.wait_event(self._changed)
                rows = rows.cpu()  # returns when it has arrived
        return rows.contiguous().view(-1)


class Holder(Protocol):
    """Owner of the tensors that are read. ``key`` is a number that all ranks have for the same tensor, alike or not."""

    @property
    def members(self) -> Sequence[int]:
        """The ranks over which one copy of the tensors is shared out, in the order of their rows."""

    def rows(self, key: int) -> Tensor | None:
        """This rank's, in memory of any device; ``None`` where they cannot be reached from another thread."""

    def room(self, key: int, member: int) -> Tensor:
        """In host memory, for the rows of the member with this index."""

    def is_gradient(self, key: int) -> bool:
        """Whether it stays as it is only while ranks meet before the step."""

    def name(self, key: int) -> str:
        """For an error."""


class _Said(NamedTuple):
    """A rank's message to the others in a round that is not alike."""

    keys: tuple[int, ...]  # empty: it reads nothing
    members: tuple[int, ...]
    calls: int  # on the channel
    begun: int
    done: int
    lost: int
    ahead: int
    of_gradients: bool


class _Asked(NamedTuple):
    """The content of a bell."""

    round: int
    calls: int  # on the channel
    done: int


class Reads:
    """The reads of a run's ranks. The constructor is collective.

    Args:
        agreement: Of the run.
        changes: Of this rank.
        holder: Of the tensors.
        device: Their rows lie there.
        peer_memory: Among all ranks, for the main thread's messages.
    """

    def __init__(
        self,
        agreement: Agreement,
        changes: Changes,
        holder: Holder,
        device: torch.device,
        peer_memory: PeerMemory | None = None,
    ) -> None:
        assert agreement.channel is not None
        self._peer_memory = peer_memory
        self._run_agreement, self._agreement = agreement, agreement.beside(READS)
        self._channel, self._changes, self._holder = agreement.channel, changes, holder
        self._host_copies = HostCopies(device, changes)
        self.rank = agreement.rank
        self._prefix = f"lightning_zero/reads/{agreement.run}"
        self._turn = threading.Lock()  # of the thread that takes part in a round
        self._round = 0  # the latest that this rank takes part in
        self._asked: _Asked | None = None  # the read that the main thread waits in
        self._served_at = -1  # what the channel had counted when main threads last were elsewhere
        self._bell = threading.Event()
        self._closed = threading.Event()
        world = dist.group.WORLD
        assert world is not None
        # Who tells is in a round meanwhile, and nowhere else in the store. Who waits to be told would hold this
        # connection until then: it has one of its own
        self._store: Any = world.get_group_store()
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=target, name=f"lightning_zero-{name}", daemon=True)
            for name, target in (("reads", self._serve), ("bell", self._ring_late))
        ]
        for thread in self._threads:
            thread.start()

    # -- the main thread -----------------------------------------------------------------------------------------

    def _require_own_process(self) -> None:
        """A fork has this rank's connections, on which the others' messages to it arrive."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "a parameter of the sharded module is read or written in a process that this rank has started, as"
                " num_workers= of a DataLoader does, where other ranks cannot send their parts of it. Use"
                " num_workers=0, or read it in the rank itself (on_after_batch_transfer, training_step), or hand the"
                " process a copy that was made before."
            )

    def ask(self, keys: tuple[int, ...], how: Sequence[int] = ()) -> dict[int, list[Tensor]] | None:
        """This rank reads the tensors of ``keys``. ``None`` if all ranks read the same: then they gather. Else
        everyone's rows of each, in host memory.

        ``how`` tells gathers of the same tensors apart that are not the same collectives.

        Raises:
            RuntimeError: If other ranks do not read the same and cannot send their rows as they were, or in another
                process than the rank's.
        """
        self._require_own_process()
        with DisableTorchFunction(), torch.no_grad(), self._turn:
            while True:
                try:
                    self._round += 1
                    self._asked = _Asked(self._round, self._channel.calls, self._changes.done)
                    if self._served_at == self._channel.calls:
                        self._ring(self._asked)
                    else:
                        self._bell.set()
                    if self._is_alike(_number_of(keys, how), keys):
                        return None
                    self._served_at = self._channel.calls
                    found, others_read = self._exchange(keys)
                    if found is not None:
                        return found
                finally:
                    self._asked = None
                # Others may still come to it, perhaps after reads that they make alone
                time.sleep(0.0 if others_read else _AGAIN_SECONDS)

    def meet(self) -> None:
        """Waits until all ranks have come to the optimizer's step; ranks that wait here serve those that still read.

        Raises:
            RuntimeError: If not all of them come.
        """
        with DisableTorchFunction(), torch.no_grad(), self._waiting(lambda: "the optimizer's step"):
            # No round of reads: those take a socket's way, and a tiny model's step would take half as long again
            self._run_agreement.all_reduce(torch.zeros(1), dist.ReduceOp.MAX, IN_STEP, self._peer_memory).wait()

    def _is_alike(self, number: int, keys: tuple[int, ...] = ()) -> bool:
        ends = torch.tensor([number, -number])
        with self._waiting(lambda: self._reading(keys)):
            self._agreement.all_reduce(ends, dist.ReduceOp.MAX, READS).wait()
        high, low = ends.tolist()
        return bool(high == -low)

    @contextmanager
    def _waiting(self, call: Callable[[], str]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{call()} on rank {self.rank}: not all ranks have come to it or answered within"
                f" timeout_seconds={self._agreement.timeout_seconds:g} ({error})."
            ) from error

    def _exchange(self, keys: tuple[int, ...]) -> tuple[dict[int, list[Tensor]] | None, bool]:
        """A round in which ranks read different tensors: rows travel to one reader after the other. ``None`` if this
        rank is to ask again; and whether others read, too."""
        calls, changes = self._channel.calls, self._changes
        of_gradients = any(key > UNKNOWN and self._holder.is_gradient(key) for key in keys)
        counts = changes.begun, changes.done, changes.lost, changes.ahead
        mine = _Said(keys, tuple(self._holder.members), calls, *counts, of_gradients)
        said = [_Said(*each) for each in self._agreement.gather(tuple(mine), self._reading(keys))]
        found: dict[int, list[Tensor]] | None = None
        error = None
        for reader, its in enumerate(said):
            if not its.keys:
                continue
            why, is_final = _obstacle(reader, its, said)
            if reader != self.rank:
                if why is None and self.rank in its.members:
                    self._give(reader, its)
                continue
            if why is None:
                found = {}
                why, is_final = self._take(keys, found)
                found = None if why is not None else found
            if why is not None and is_final:
                error = self._error(keys, why, said)
        if error is not None:
            raise error
        return found, any(its.keys for rank, its in enumerate(said) if rank != self.rank)

    def _take(self, keys: tuple[int, ...], found: dict[int, list[Tensor]]) -> tuple[str | None, bool]:
        """Receives everyone's rows into ``found``; returns why they are not what they should be, and will not be."""
        answers: dict[int, dict[int, Tensor]] = {}
        why, is_final = None, False
        for index, member in enumerate(self._holder.members):
            if member == self.rank:
                continue
            if self._receive(torch.empty(1, dtype=torch.uint8), member).item():
                answers[member] = {key: self._receive(self._holder.room(key, index), member) for key in keys}
                if not self._receive(torch.empty(1, dtype=torch.uint8), member).item():
                    why = _WENT_ON.format(member)
            else:
                why, is_final = f"rank {member} has none, or in files, which only its own step reads", True
        if why is not None:  # after all have been heard: later messages must not meet these
            return why, is_final
        for key in keys:
            own = self._holder.rows(key)
            assert own is not None
            found[key] = [
                answers[member][key] if member != self.rank else self._host_copies.of(own)
                for member in self._holder.members
            ]
        return None, False

    def _give(self, reader: int, its: _Said) -> None:
        now = {key: self._holder.rows(key) for key in its.keys}
        rows = {key: self._changes.rows_at(its.done, key, part) for key, part in now.items() if part is not None}
        is_here = len(rows) == len(now)
        self._send(torch.tensor([is_here], dtype=torch.uint8), reader)
        if not is_here:
            return
        for part in rows.values():
            self._send(self._host_copies.of(part), reader)
        # The main thread may have gone on to change them meanwhile
        unchanged = all(self._changes.rows_at(its.done, key, part) is part for key, part in rows.items())
        as_asked = unchanged and self._changes.lost <= its.done
        self._send(torch.tensor([as_asked], dtype=torch.uint8), reader)

    def _send(self, tensor: Tensor, peer: int) -> None:
        if tensor.numel():
            tag, group = self._agreement.tag(ROWS), self._channel.group
            sent: Any = dist.isend(tensor.view(torch.uint8), group=group, group_dst=peer, tag=tag)
            sent.wait()

    def _receive(self, tensor: Tensor, peer: int) -> Tensor:
        if tensor.numel():
            tag, group = self._agreement.tag(ROWS), self._channel.group
            arriving: Any = dist.irecv(tensor.view(torch.uint8), group=group, group_src=peer, tag=tag)
            arriving.wait()
        return tensor

    # -- words ---------------------------------------------------------------------------------------------------

    def _reading(self, keys: Collection[int]) -> str:
        names = [self._holder.name(key) for key in keys]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        hook = hook_above()
        return f"a read of {shown}" + (f" in {hook}" if hook else "")

    def _error(self, keys: tuple[int, ...], why: str, said: Sequence[_Said]) -> RuntimeError:
        alike = [rank for rank, its in enumerate(said) if its.keys == keys]
        others = [rank for rank in range(len(said)) if rank not in alike]
        return RuntimeError(
            f"{self._reading(keys)} by rank {_listed(alike)} and not by rank {_listed(others)}, and {why}: make it on"
            " every rank, and write on one, as in `state = self.net.state_dict()` followed by `if"
            " self.trainer.is_global_zero: torch.save(state, path)`."
        )

    # -- the bell ------------------------------------------------------------------------------------------------

    def _ring_late(self) -> None:
        while True:
            self._bell.wait()
            self._bell.clear()
            asked = self._asked
            time.sleep(DELAY_SECONDS)
            if self._closed.is_set():
                return
            if asked is not None and self._asked is asked:
                with suppress(RuntimeError):  # the store went with the rank that keeps it
                    self._ring(asked)

    def _ring(self, asked: _Asked) -> None:
        for rank in range(self._agreement.world_size):
            if rank != self.rank:
                self._tell(rank, json.dumps(asked))

    def _tell(self, rank: int, text: str | bytes) -> None:
        number = self._store.add(f"{self._prefix}/{rank}/told", 1)
        self._store.set(f"{self._prefix}/{rank}/{number}", text)

    # -- the service ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with suppress(RuntimeError), torch.no_grad():  # the store or a rank has gone
            if self._closed.wait(self.rank % _IN_TURN * _APART_SECONDS):
                return
            store = self._store.clone()
            for number in count(1):
                key = f"{self._prefix}/{self.rank}/{number}"
                store.wait([key], _FOR_EVER)
                text = store.get(key)
                store.delete_key(key)
                if text == _ENDS:
                    return
                self._help(_Asked(*json.loads(text)))

    def _help(self, asked: _Asked) -> None:
        """Takes the main thread's place, once it is clear that it is not about to come itself."""
        begin = time.monotonic()
        while self._round < asked.round and not self._closed.is_set():
            waited = time.monotonic() - begin
            has_passed = self._channel.calls > asked.calls
            is_elsewhere = has_passed or waited > PATIENCE_SECONDS or self._served_at == asked.calls
            is_behind = self._changes.done < asked.done and not (has_passed and waited > _BEHIND_SECONDS)
            if is_elsewhere and not is_behind and self._turn.acquire(blocking=False):
                try:
                    if self._round < asked.round:
                        self._round += 1
                        self._served_at = asked.calls
                        if not self._is_alike(0):
                            self._exchange(())
                finally:
                    self._turn.release()
            else:
                time.sleep(_POLL_SECONDS if waited < 1 else 0.05)

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self, together: bool) -> None:
        """Ends the threads; with ``together`` when all ranks have come here (collective), for others may still read."""
        if together:
            self._run_agreement.gather(None, "the end of a run")
        self._closed.set()
        self._bell.set()
        with suppress(RuntimeError):
            self._tell(self.rank, _ENDS)
            # After an error a service may wait for a rank that has ended. It must not be left in the store's code
            # where it need not be: a process that ends there aborts
            for thread in self._threads:
                thread.join(None if together else 1.0)


_WENT_ON = "rank {} has gone on to change parameters meanwhile"


def _obstacle(reader: int, its: _Said, said: Sequence[_Said]) -> tuple[str | None, bool]:
    """Why the members' rows are not those that the reader asks for; and whether they never will be, and not all ranks
    come to the same read either."""
    have_passed = any(other.calls > its.calls for other in said)
    if min(its.keys) <= UNKNOWN or (its.of_gradients and its.ahead != Ahead.MEETING):
        return "nothing is sent for that", have_passed
    if its.ahead == Ahead.STEP or its.begun != its.done:
        return "others go on to the optimizer's step", have_passed
    for member in its.members:
        if said[member].lost > its.done:
            return _WENT_ON.format(member), True
        if said[member].done < its.done:
            return f"rank {reader} alone has written to parameters before", said[member].calls > its.calls
        if its.ahead == Ahead.MEETING != said[member].ahead:  # it is in its backward
            return f"rank {member} has not ended its backward", said[member].calls > its.calls
    return None, False


def _number_of(keys: tuple[int, ...], how: Sequence[int]) -> int:
    """Of a read, the same on all ranks; not 0, which is no read."""
    return hash((*keys, -1, *how)) % 2**61 + 1


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def hook_above() -> str | None:
    """The user's hook or step that is running, with its class where that is known."""
    frame: Any = sys._getframe(1)
    found = None
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if name.startswith("on_") and not module.startswith(("lightning.", "lightning_zero.", "pytorch_lightning.")):
            owner = frame.f_locals.get("self")
            found = f"{type(owner).__name__}.{name}" if owner is not None else name
        frame = frame.f_back
    return found
