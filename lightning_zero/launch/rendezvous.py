"""Meeting of a run's ranks at a key-value store that global rank 0 (or torchrun's agent) keeps.

While it waits for the others a rank says for whom, and the wait ends after :data:`START_SECONDS`, however long a
collective may take afterwards. The store stays for the life of the ranks: the words that they exchange when a run has
failed, where no collective can be trusted, go through it as well (:mod:`~lightning_zero.launch.failure`).
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

START_SECONDS = "LIGHTNING_ZERO_START_SECONDS"
"""In the environment: how long ranks wait for each other at the start; 300 if it is not set. Importing on a busy file
system takes minutes."""
PATIENCE_SECONDS = 5.0
"""After which a rank says for whom it waits, and then each time after twice as long."""
_CONNECT_SECONDS = 6.0
"""Of one attempt. torch asks the resolver for the name behind each connection, and a question that gets lost among many
takes 5 s: an attempt that ends before is made again, with more questions."""
_POLL_SECONDS = 0.05
_ASKED_PER_SECOND = 20_000
"""At most, of a store by all ranks together. One process on two cores asks and is answered 55,000 times."""
_POLLS_PER_CALL = 10
"""A rank that is in a round looks this seldom whether there is a newer one, so that many ranks ask little."""


def start_seconds() -> float:
    """Seconds for which ranks wait for each other at the start."""
    return float(os.environ.get(START_SECONDS, "300"))


class RankLost(RuntimeError):
    """Another rank ended before the run began; the supervisor has shown why."""


_stores: dict[tuple[str, int], Any] = {}
"""Address and port -> the store that this process keeps or is connected to."""
_rounds: dict[tuple[str, int], str] = {}
"""Address and port -> the round in which this process met the others there."""
_counts: Counter[tuple[str, str, int]] = Counter()


def count(what: str, address: str, port: int) -> int:
    """Number of times that this process has come to ``what`` at a store; the same on ranks that came together."""
    _counts[what, address, port] += 1
    return _counts[what, address, port]


def serve(address: str, port: int = 0) -> int:
    """Opens the store, before other ranks exist that may look for it; returns its port.

    Args:
        address: Name of this host.
        port: 0 takes a free one, which nobody can take in between.
    """
    store = _open(address, port, serves=True, seconds=start_seconds())
    _stores[address, store.port] = store
    return int(store.port)


def forget() -> None:
    """The ranks of a session are gone, and with them its store and what was counted there."""
    _stores.clear()
    _rounds.clear()
    _counts.clear()


def words(address: str, port: int, rank: int) -> Any:
    """The store, for words beside a run's own; connects where this rank is not yet."""
    of_round = _rounds.get((address, port), "lightning_zero")
    return dist.PrefixStore(f"{of_round}/words", _store(address, port, rank, 2 * _CONNECT_SECONDS))


def meet(
    address: str, port: int, rank: int, size: int, expected: str, lacks_a_rank: Callable[[], bool] = lambda: False
) -> Any:
    """The store for a new process group, when all ``size`` ranks are there.

    Args:
        address, port: Where the store is.
        rank, size: Of this rank, and of the run.
        expected: What the number of ranks was made of, as ``devices=2, num_nodes=1``.
        lacks_a_rank: Whether this process knows of one that has ended and will not come.

    Raises:
        TimeoutError: Naming the ranks that did not come.
        RankLost: One of them has ended.
        RuntimeError: The port is taken by another program.
    """
    limit = start_seconds()
    began = time.monotonic()
    base = _store(address, port, rank, limit)
    base.set_timeout(timedelta(seconds=limit))  # one that connected in short attempts has theirs
    meeting = _Meeting(base, rank, size)
    next_word = PATIENCE_SECONDS
    while not meeting.has_begun():
        if lacks_a_rank():
            raise RankLost("another rank ended before all had met (shown above).")
        waited = time.monotonic() - began
        if waited > min(next_word, limit):
            missing = meeting.missing()
            text = (
                f"rank {rank} has waited {waited:.0f} s at {address}:{port} for rank {_few(missing)} of {size} ranks"
                f" ({expected})"
            )
            if waited > limit:
                raise TimeoutError(
                    f"{text}: start the missing ones, or correct what says how many there are (devices, num_nodes,"
                    f" WORLD_SIZE). More patience: {START_SECONDS}={2 * limit:g}."
                )
            if missing and meeting.speaks(missing):
                _tell(f"{text}; it goes on waiting, {limit:.0f} s in all.")
            next_word *= 2
        time.sleep(max(_POLL_SECONDS, size / _ASKED_PER_SECOND))
    _rounds[address, port] = meeting.round
    return dist.PrefixStore(meeting.round, base)


class _Meeting:
    """One rank's way into the round that a living rank 0 has called.

    A store may be older than the ranks: torchrun's agent keeps its own over a restart, with what the dead ranks have
    written, and nothing that it tells them names the restart alike on all nodes (TORCHELASTIC_RESTART_COUNT counts the
    failures that an agent has seen itself). So rank 0 calls a round of a name that was never there, and declares it
    begun once it is full. A rank that is early finds an old round: a full one takes nobody in, and one that
    never was is not declared begun by anybody; it goes on to the next.
    """

    def __init__(self, base: Any, rank: int, size: int) -> None:
        self.round = ""
        self._base, self._rank, self._ranks = base, rank, size
        self._calls = f"lightning_zero/round_of_{size}"
        self._place = size + 1
        self._polls = 0
        self._first = False
        if rank == 0:
            base.set(self._calls, f"lightning_zero/{uuid.uuid4().hex}")

    def has_begun(self) -> bool:
        """Whether all ranks of this rank's round are there; once it has said so, for good."""
        if self._is_in():
            if self._rank == 0 and self._base.add(f"{self.round}/came", 0) >= self._ranks:
                self._base.set(f"{self.round}/begun", "1")
            if self._base.check([f"{self.round}/begun"]):
                return True
        if not self._is_in() or self._polls % _POLLS_PER_CALL == 0:
            self._follow_call()
        self._polls += 1
        return False

    def missing(self) -> list[int]:
        """Ranks that are not in this rank's round; rank 0, if it has called none that takes this rank in."""
        if not self._is_in():
            return [0]
        return [other for other in range(self._ranks) if not self._base.check([f"{self.round}/here/{other}"])]

    def speaks(self, missing: list[int]) -> bool:
        """Whether this rank is the one that says who is missing."""
        if self._is_in():
            return self._rank == min(set(range(self._ranks)) - set(missing))
        self._first = self._first or self._base.add(f"{self.round or self._calls}/uncalled", 1) == 1
        return self._first

    def _is_in(self) -> bool:
        return self._place <= self._ranks

    def _follow_call(self) -> None:
        if not self._base.check([self._calls]):
            return
        called = self._base.get(self._calls).decode()
        if called == self.round:
            return
        self.round = called
        self._base.set(f"{called}/here/{self._rank}", "1")
        self._place = self._base.add(f"{called}/came", 1)


def _store(address: str, port: int, rank: int, seconds: float) -> Any:
    if (address, port) not in _stores:
        forget()  # ranks that this process belonged to before: a port may come again, with others who never counted
        if rank == 0 and not is_kept_by_agent():
            _stores[address, port] = _open(address, port, serves=True, seconds=seconds)
        else:
            _stores[address, port] = _connected(address, port, rank, seconds)
    return _stores[address, port]


def is_kept_by_agent() -> bool:
    """Whether torchrun's agent keeps the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open(address: str, port: int, serves: bool, seconds: float) -> Any:
    try:
        return dist.TCPStore(
            address, port, None, serves, timedelta(seconds=seconds), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:  # torch's DistNetworkError
        if not serves or "in use" not in str(error):
            raise
        raise RuntimeError(
            f"port {port} of {address}, where the ranks are to find each other, is in use by another program: set"
            " MASTER_PORT to a free one, or unset it, and one is chosen."
        ) from None


def _connected(address: str, port: int, rank: int, seconds: float) -> Any:
    """In short attempts, so that this rank can speak and be interrupted between them."""
    began = time.monotonic()
    spoke = False
    while True:
        left = seconds - (time.monotonic() - began)
        try:
            return _open(address, port, serves=False, seconds=max(min(_CONNECT_SECONDS, left), 0.1))
        except RuntimeError as error:
            waited = time.monotonic() - began
            text = f"rank {rank} has looked for rank 0 at {address}:{port} for {waited:.0f} s"
            if waited > seconds:
                raise TimeoutError(
                    f"{text} ({str(error).splitlines()[0]}): start it there, or correct MASTER_ADDR and MASTER_PORT."
                    f" More patience: {START_SECONDS}={2 * seconds:g}."
                ) from None
            if waited > PATIENCE_SECONDS and not spoke:
                spoke = True
                _tell(f"{text}; it goes on, {seconds:.0f} s in all.")


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} in all)" if len(ranks) > 8 else shown


def _tell(text: str) -> None:
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)
