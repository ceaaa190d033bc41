"""Rendezvous of a run's ranks at a key-value store, which global rank 0 (or torchrun's agent) serves.

Rank 0 names the ranks that it waits for. The wait ends after :data:`START_SECONDS`, independently of the timeout of
collectives.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

START_SECONDS = "LIGHTNING_ZERO_START_SECONDS"
"""Environment variable: seconds for which ranks wait for each other at the start. The default is 300, because imports
take minutes on a busy file system."""
PATIENCE_SECONDS = 5.0
"""Seconds until rank 0 reports the missing ranks. Each further report takes twice as long as the one before."""
_POLL_SECONDS = 0.05
_ASKED_PER_SECOND = 20_000
"""Upper bound of requests to a store by all ranks together. On two cores one process makes 55,000 per second."""


def start_seconds() -> float:
    """Returns the seconds for which ranks wait for each other at the start."""
    return float(os.environ.get(START_SECONDS, "300"))


class RankLost(RuntimeError):
    """Another rank ended before the run began; the supervisor has shown why."""


_stores: dict[tuple[str, int], Any] = {}
"""Address and port -> the store that this process serves there, or is connected to."""


def serve(address: str, port: int = 0) -> int:
    """Opens the store before the other ranks start, and returns its port.

    Args:
        address: Name of this host.
        port: 0 chooses a free port. No other program can take it before the ranks connect.
    """
    store = _open(address, port, serves=True, seconds=start_seconds())
    _stores[address, store.port] = store
    return int(store.port)


def forget() -> None:
    """Forgets the store, because the ranks of a session have ended."""
    _stores.clear()


def meet(
    address: str, port: int, rank: int, size: int, expected: str, lacks_a_rank: Callable[[], bool] = lambda: False
) -> Any:
    """Waits until all ``size`` ranks have connected, and returns the store for a new process group.

    Args:
        address, port: Location of the store.
        rank, size: This rank, and the number of ranks.
        expected: The settings that give ``size``, such as ``devices=2, num_nodes=1``.
        lacks_a_rank: Returns whether this process knows of a rank that has ended.

    Raises:
        TimeoutError: Ranks did not connect in time. Rank 0's message names them.
        RankLost: A rank has ended.
        RuntimeError: Another program uses the port.
    """
    limit = start_seconds()
    began = time.monotonic()
    if (address, port) not in _stores:
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent does
        _stores[address, port] = _open(address, port, serves, limit)
    base = _stores[address, port]
    barrier = _Round(base, rank, size)
    next_word = PATIENCE_SECONDS
    while not barrier.has_begun():
        if lacks_a_rank():
            raise RankLost("another rank ended before all had connected; its error is shown above.")
        waited = time.monotonic() - began
        if waited > min(next_word, limit):
            missing = barrier.missing() if rank == 0 else [0]
            text = (
                f"rank {rank} has waited {waited:.0f} s at {address}:{port} for rank {_few(missing)} of {size} ranks"
                f" ({expected})"
            )
            if waited > limit:
                raise TimeoutError(
                    f"{text}: start the missing ranks, or correct the number of ranks (devices, num_nodes, WORLD_SIZE)."
                    f" To wait longer, set {START_SECONDS}={2 * limit:g}."
                )
            if rank == 0:
                print(f"lightning_zero: {text}; it keeps waiting, {limit:.0f} s in total.", file=sys.stderr, flush=True)
            next_word *= 2
        time.sleep(max(_POLL_SECONDS, size / _ASKED_PER_SECOND))
    return dist.PrefixStore(barrier.name, base)


class _Round:
    """One rank's part in the round that the current rank 0 has called.

    A store may be older than the ranks. torchrun's agent keeps its store across a restart, with the entries of ended
    ranks, and no variable identifies the restart on all nodes (TORCHELASTIC_RESTART_COUNT counts the failures that one
    agent has seen). So rank 0 calls a round under a new name, each rank answers the newest call with its own token,
    and rank 0 begins the round with all tokens. A rank that finds an old round does not find its token in it, and
    answers the next call.
    """

    def __init__(self, base: Any, rank: int, size: int) -> None:
        self.name = ""
        self._base, self._rank, self._size = base, rank, size
        self._token = uuid.uuid4().hex
        self._call = f"lightning_zero/round_of_{size}"
        if rank == 0:
            base.set(self._call, f"lightning_zero/{self._token}")

    def has_begun(self) -> bool:
        """Returns whether rank 0 has begun the newest round with this rank in it. Answers the call if necessary."""
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
        """Returns the ranks that have not answered the call."""
        return [rank for rank in range(self._size) if not self._base.check([self._answer(rank)])]

    def _answer(self, rank: int) -> str:
        return f"{self.name}/here/{rank}"


def _open(address: str, port: int, serves: bool, seconds: float) -> Any:
    try:
        return dist.TCPStore(
            address, port, None, serves, timedelta(seconds=seconds), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:  # torch's DistNetworkError
        if not serves:
            raise TimeoutError(
                f"no rank 0 at {address}:{port} within {seconds:.0f} s ({str(error).splitlines()[0]}): start it there,"
                f" or correct MASTER_ADDR and MASTER_PORT. To wait longer, set {START_SECONDS}={2 * seconds:g}."
            ) from None
        if "in use" not in str(error):
            raise
        raise RuntimeError(
            f"port {port} of {address}, at which the ranks connect, is in use by another program: set MASTER_PORT to a"
            " free port, or unset it to have one chosen."
        ) from None


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} in total)" if len(ranks) > 8 else shown
