"""Meeting of a run's ranks at a key-value store that global rank 0 (or torchrun's agent) keeps.

While it waits for the others rank 0 says for whom, and the wait ends after :data:`START_SECONDS`, however long a
collective may take afterwards. The store stays for the life of the ranks: the words that they exchange when a run has
failed, where no collective can be trusted, go through it as well (:mod:`~lightning_zero.launch.failure`).
"""

from __future__ import annotations

import json
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
"""After which rank 0 says for whom it waits, and then each time after twice as long."""
_WORD_SECONDS = 12.0
"""To connect for a word about a failure."""
_POLL_SECONDS = 0.05
_ASKED_PER_SECOND = 20_000
"""At most, of a store by all ranks together. One process on two cores asks and is answered 55,000 times."""


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
    return dist.PrefixStore(f"{of_round}/words", _store(address, port, rank, _WORD_SECONDS))


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
    base.set_timeout(timedelta(seconds=limit))  # one that connected for a word has less
    meeting = _Round(base, rank, size)
    next_word = PATIENCE_SECONDS
    while not meeting.has_begun():
        if lacks_a_rank():
            raise RankLost("another rank ended before all had met (shown above).")
        waited = time.monotonic() - began
        if waited > min(next_word, limit):
            missing = meeting.missing() if rank == 0 else [0]
            text = (
                f"rank {rank} has waited {waited:.0f} s at {address}:{port} for rank {_few(missing)} of {size} ranks"
                f" ({expected})"
            )
            if waited > limit:
                raise TimeoutError(
                    f"{text}: start the missing ones, or correct what says how many there are (devices, num_nodes,"
                    f" WORLD_SIZE). More patience: {START_SECONDS}={2 * limit:g}."
                )
            if rank == 0:
                print(f"lightning_zero: {text}; it goes on waiting, {limit:.0f} s in all.", file=sys.stderr, flush=True)
            next_word *= 2
        time.sleep(max(_POLL_SECONDS, size / _ASKED_PER_SECOND))
    _rounds[address, port] = meeting.name
    return dist.PrefixStore(meeting.name, base)


class _Round:
    """One rank's way into the round that a living rank 0 has called.

    A store may be older than the ranks: torchrun's agent keeps its own over a restart, with what the dead ranks have
    written, and nothing that it tells them names the restart alike on all nodes (TORCHELASTIC_RESTART_COUNT counts the
    failures that an agent has seen itself). So rank 0 calls a round of a name that was never there, each rank answers
    the newest call with a token of its own, and rank 0 begins the round with the tokens of all. A rank that finds a
    round of dead ranks does not find its token there, and answers the next call.
    """

    def __init__(self, base: Any, rank: int, size: int) -> None:
        self.name = ""
        self._base, self._rank, self._size = base, rank, size
        self._token = uuid.uuid4().hex
        self._call = f"lightning_zero/round_of_{size}"
        if rank == 0:
            base.set(self._call, f"lightning_zero/{self._token}")

    def has_begun(self) -> bool:
        """Whether all ranks of the newest round have answered its call, this one among them."""
        if not self._base.check([self._call]):
            return False
        if (called := self._base.get(self._call).decode()) != self.name:
            self.name = called
            self._base.set(self._answer(self._rank), self._token)
        if self._rank == 0 and self._base.check([self._answer(rank) for rank in range(self._size)]):
            tokens = [self._base.get(self._answer(rank)).decode() for rank in range(self._size)]
            self._base.set(f"{self.name}/begun", json.dumps(tokens))
        begun = f"{self.name}/begun"
        return self._base.check([begun]) and json.loads(self._base.get(begun))[self._rank] == self._token

    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(self._size) if not self._base.check([self._answer(rank)])]

    def _answer(self, rank: int) -> str:
        return f"{self.name}/here/{rank}"


def _store(address: str, port: int, rank: int, seconds: float) -> Any:
    if (address, port) not in _stores:
        forget()  # ranks that this process belonged to before: a port may come again, with others who never counted
        serves = rank == 0 and not is_kept_by_agent()
        _stores[address, port] = _open(address, port, serves, seconds)
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
        if not serves:
            raise TimeoutError(
                f"no rank 0 at {address}:{port} within {seconds:.0f} s ({str(error).splitlines()[0]}): start it there,"
                f" or correct MASTER_ADDR and MASTER_PORT. More patience: {START_SECONDS}={2 * seconds:g}."
            ) from None
        if "in use" not in str(error):
            raise
        raise RuntimeError(
            f"port {port} of {address}, where the ranks are to find each other, is in use by another program: set"
            " MASTER_PORT to a free one, or unset it, and one is chosen."
        ) from None


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} in all)" if len(ranks) > 8 else shown
