"""How errors are told, and how ranks agree on whether all have raised the same one."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_zero.launch import failure


def _compare(store: Any, said: list[tuple[str, float]], size: int) -> list[str | None]:
    """Verdicts of ranks that raise what ``said`` says after so many seconds; ``size`` may be more than raise."""
    verdicts: list[str | None] = [""] * len(said)

    def raise_it(rank: int, alike: str, seconds: float) -> None:
        threading.Event().wait(seconds)
        verdicts[rank] = failure.compare(store, rank, size, f"{alike}!", alike).why

    threads = [threading.Thread(target=raise_it, args=(rank, *each)) for rank, each in enumerate(said)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def test_a_rank_that_raises_otherwise_or_not_at_all_is_named(store, monkeypatch):
    monkeypatch.setattr(failure, "WAIT_SECONDS", 0.5)
    first, second = _compare(store, [("a", 0.0), ("b", 0.1)], 2)
    assert first == second == "2 of 2 ranks raised an error, 1 of them this one (rank 0 first: a!)"
    other = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert _compare(other, [("a", 0.0)], 3) == ["1 of 3 ranks raised an error, 1 of them this one (rank 0 first: a!)"]


def test_one_that_comes_when_another_has_given_up_gives_up_as_well(store, monkeypatch):
    """Or it would wait in a collective save for ever."""
    monkeypatch.setattr(failure, "WAIT_SECONDS", 0.2)
    early, late = _compare(store, [("a", 0.0), ("a", 0.8)], 2)
    assert early is not None
    assert late is not None


def test_a_store_that_never_answers_does_not_keep_a_rank(monkeypatch):
    """Of a rank 0 that is stopped: connected, and silent."""
    held = threading.Event()
    monkeypatch.setattr(failure, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(failure, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(failure, "ask_the_others", lambda *args: held.wait(60.0))
    strategy = SimpleNamespace(num_processes=2, num_nodes=1, global_rank=1)
    assert failure.judge(LookupError("x"), strategy, None, lambda: False).why == "rank 0 does not answer"
    held.set()


def test_an_error_that_was_noted_does_not_outlive_the_script_that_caught_it():
    """Its frames hold the tensors of the step: after out-of-memory, the next fit needs their memory."""

    class OwnError(Exception):
        pass

    error = OwnError()
    failure.note(error, "the run failed with")
    alive = weakref.ref(error)
    del error
    assert alive() is None
