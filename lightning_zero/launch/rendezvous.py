"""Rendezvous of a run's ranks at a key-value store, which global rank 0 serves.

Rank 0 names the ranks that it waits for. The wait ends after :data:`START_SECONDS`, independently of the timeout of
collectives.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
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
_PORT = "lightning_zero/port"
"""Key of the port of rank 0's store in that of torchrun's agent. It may be the port of a rank 0 that has ended, so a
connection to it is tried for :data:`_CONNECT_SECONDS`, and the key is read again."""
_CONNECT_SECONDS = 2.0


def start_seconds() -> float:
    """Returns the seconds for which ranks wait for each other at the start."""
    return float(os.environ.get(START_SECONDS, "300"))


_stores: dict[tuple[str, int], Any] = {}
"""Address and port -> the store that this process serves there, or is connected to."""


def serve(address: str, port: int = 0) -> int:
    """Opens the store before the other ranks start, and returns its port.

    Args:
        address: Name of this host.
        port: 0 chooses a free port. No other program can take it before the ranks connect.
    """
    store = _open(address, port, serves=True)
    _stores[address, store.port] = store
    return int(store.port)


def forget() -> None:
    """Forgets the store, because the ranks of a session have ended."""
    _stores.clear()


def meet(address: str, port: int, rank: int, size: int, expected: str) -> Any:
    """Waits until all ``size`` ranks have connected, and returns the store for a new process group.

    Args:
        address, port: Location of the store.
        rank, size: This rank, and the number of ranks.
        expected: The settings that give ``size``, such as ``devices=2, num_nodes=1``.

    Raises:
        TimeoutError: Ranks did not connect in time. Rank 0's message names them.
        RuntimeError: Another program uses the port.
    """
    limit = start_seconds()
    began = time.monotonic()
    if (address, port) not in _stores:
        _stores[address, port] = _connect(address, port, rank)
    base = _stores[address, port]
    number = base.add(f"lightning_zero/groups_of/{rank}", 1)  # user code may end a process group: all ranks count alike
    store = dist.PrefixStore(f"lightning_zero/{number}", base)
    here = [f"here/{other}" for other in range(size)]
    store.set(here[rank], "")
    next_word = PATIENCE_SECONDS
    while not store.check(here if rank == 0 else ["begun"]):
        waited = time.monotonic() - began
        if waited > min(next_word, limit):
            missing = [other for other in range(size) if not store.check([here[other]])] if rank == 0 else [0]
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
    if rank == 0:
        store.set("begun", "")
    return store


def _connect(address: str, port: int, rank: int) -> Any:
    """Returns a store of rank 0, in which no earlier ranks have left anything.

    torchrun's agent keeps its store across restarts, and no variable identifies the restart on all nodes
    (TORCHELASTIC_RESTART_COUNT counts the failures that one agent has seen). So rank 0 serves a store of its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _open(address, port, serves=rank == 0)
    agents = _open(address, port, serves=False)
    if rank == 0:
        store = _open(address, 0, serves=True)
        agents.set(_PORT, str(store.port))
        return store
    deadline = time.monotonic() + start_seconds()
    while time.monotonic() < deadline:
        with suppress(TimeoutError):
            if agents.check([_PORT]):
                store = _open(address, int(agents.get(_PORT)), serves=False, seconds=_CONNECT_SECONDS)
                store.set_timeout(timedelta(seconds=start_seconds()))
                return store
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(
        f"rank {rank} found no store of rank 0 at {address} within {start_seconds():.0f} s: start rank 0 there, and let"
        f" other hosts reach its ports. To wait longer, set {START_SECONDS}={2 * start_seconds():g}."
    )


def _open(address: str, port: int, serves: bool, seconds: float | None = None) -> Any:
    limit = start_seconds()
    try:
        return dist.TCPStore(
            address, port, None, serves, timedelta(seconds=seconds or limit), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:  # torch's DistNetworkError
        if not serves:
            raise TimeoutError(
                f"no rank 0 at {address}:{port} within {limit:.0f} s ({str(error).splitlines()[0]}): start it there,"
                f" or correct MASTER_ADDR and MASTER_PORT. To wait longer, set {START_SECONDS}={2 * limit:g}."
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
