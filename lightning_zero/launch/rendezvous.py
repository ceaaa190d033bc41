"""Where the ranks of a run find each other: a key-value store that global rank 0 (or torchrun's agent) keeps.

While it waits for the others a rank says for whom, and the wait ends after :data:`START_SECONDS`, however long a
collective may take afterwards. The store stays for the life of the ranks: the words that they exchange when a run has
failed, where no collective can be trusted, go through it as well (:mod:`~lightning_zero.launch.failure`).
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
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


def start_seconds() -> float:
    """How long ranks wait for each other at the start."""
    return float(os.environ.get(START_SECONDS, "300"))


_stores: dict[tuple[str, int], Any] = {}
"""Address and port -> the store that this process keeps or is connected to."""
_counts: Counter[tuple[str, str, int]] = Counter()


def count(what: str, address: str, port: int) -> int:
    """How often this process has come to ``what`` at a store; the same on ranks that have done so together."""
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
    _counts.clear()


def words(address: str, port: int, rank: int) -> Any:
    """The store, for words beside a run's own; connects where this rank is not yet."""
    return dist.PrefixStore(f"lightning_zero/words_{_attempt()}", _store(address, port, rank, 2 * _CONNECT_SECONDS))


def meet(address: str, port: int, rank: int, size: int, expected: str) -> Any:
    """The store for a new process group, when all ``size`` ranks are there.

    Args:
        address, port: Where the store is.
        rank, size: Of this rank, and of the run.
        expected: What the number of ranks was made of, as ``devices=2, num_nodes=1``.

    Raises:
        TimeoutError: Naming the ranks that did not come.
        RuntimeError: The port is taken by another program.
    """
    limit = start_seconds()
    began = time.monotonic()
    base = _store(address, port, rank, limit)
    base.set_timeout(timedelta(seconds=limit))  # one that connected in short attempts has theirs
    # torchrun keeps its store over a restart, with the addresses of the ranks that have died
    store = dist.PrefixStore(f"lightning_zero/attempt_{_attempt()}/{count('meet', address, port)}", base)
    store.set(f"here/{rank}", "1")
    store.add("here", 1)
    next_word = PATIENCE_SECONDS
    while store.add("here", 0) < size:
        waited = time.monotonic() - began
        if waited > min(next_word, limit):
            missing = [other for other in range(size) if not store.check([f"here/{other}"])]
            text = (
                f"rank {rank} has waited {waited:.0f} s at {address}:{port} for rank {_few(missing)} of {size} ranks"
                f" ({expected})"
            )
            if waited > limit:
                raise TimeoutError(
                    f"{text}: start the missing ones, or correct what says how many there are (devices, num_nodes,"
                    f" WORLD_SIZE). More patience: {START_SECONDS}={2 * limit:g}."
                )
            if missing and rank == min(set(range(size)) - set(missing)):
                _tell(f"{text}; it goes on waiting, {limit:.0f} s in all.")
            next_word *= 2
        time.sleep(_POLL_SECONDS)
    return store


def _store(address: str, port: int, rank: int, seconds: float) -> Any:
    if (address, port) not in _stores:
        forget()  # ranks that this process belonged to before: a port may come again, with others who never counted
        of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if rank == 0 and not of_agent:
            _stores[address, port] = _open(address, port, serves=True, seconds=seconds)
        else:
            _stores[address, port] = _connected(address, port, rank, seconds)
    return _stores[address, port]


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


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} in all)" if len(ranks) > 8 else shown


def _tell(text: str) -> None:
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)
