"""Ranks that run units in another order all raise, and none is left in a gather that the others do not join.

Ranks are threads here: the n-th gather, and the n-th message, of each is one of all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.engines.fsdp2 import order, private

NUM_RANKS = 2
PATIENCE_SECONDS = 5.0
NAMES = ["a", "b", "c", "d", "(root)"]


class _Group:
    """What ranks do together."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._done: dict[tuple[str, int], list[Any]] = {}

    def join(self, what: str, number: int, mine: Any) -> list[Any]:
        with self._lock:
            others = self._done.setdefault((what, number), [])
            others.append(mine)
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: len(others) == NUM_RANKS, PATIENCE_SECONDS), f"hangs in {what} {number}"
            return others


class _Rank:
    def __init__(self, group: _Group, waits: bool) -> None:
        self._group, self._num = group, {"gather": 0, "message": 0}
        self.config = SimpleNamespace(stage=3)
        self.units = [SimpleNamespace(rank=self, name=name, is_here=False) for name in NAMES]
        self.order: Any = order.Order(self, self.units, NAMES, num_ahead=2 if waits else 0, waits=waits)  # type: ignore[arg-type]

    def _next(self, what: str) -> int:
        self._num[what] += 1
        return self._num[what]

    def send(self, message: Tensor, op: Any) -> Any:
        number, mine = self._next("message"), message.clone()

        def wait() -> None:
            message.copy_(torch.stack(self._group.join("message", number, mine)).amax(0))

        return SimpleNamespace(wait=wait)

    def gather(self, unit: Any) -> None:
        if not unit.is_here:
            found = self._group.join("gather", self._next("gather"), unit.name)
            assert len(set(found)) == 1, f"mixed up: {found}"
            unit.is_here = True

    def forward(self, indices: Sequence[int]) -> None:
        self.order.restart()
        for index in indices:
            self.order.runs(index)
            self.gather(self.units[index])
            self.units[index].is_here = False
        self.order.ends()


@pytest.fixture(autouse=True)
def _units_are_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "unshard", lambda unit, async_op=False: unit.rank.gather(unit))
    monkeypatch.setattr(private, "reshard", lambda unit: setattr(unit, "is_here", False))
    monkeypatch.setattr(private, "groups", lambda unit: [unit])
    monkeypatch.setattr(private, "is_gathered", lambda unit: unit.is_here)


def _on_ranks(run: Callable[[_Rank, int], Any], waits: bool = True) -> list[Any]:
    """What ``run`` returns or raises on each rank."""
    group = _Group()

    def outcome(rank: int) -> Any:
        try:
            return run(_Rank(group, waits), rank)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(outcome, range(NUM_RANKS)))


@pytest.mark.parametrize("known", [0, 2])
@pytest.mark.parametrize(
    ("other", "named"),
    [((0, 2, 1, 3), "'c'"), ((0, 1), "'c'"), ((0, 1, 2, 3, 3), "'d'"), ((), "'a'")],
)
def test_one_rank_leaves_the_order(known: int, other: tuple[int, ...], named: str) -> None:
    def run(rank: _Rank, number: int) -> None:
        for _ in range(known):
            rank.forward(range(4))
        rank.forward(other if number else range(4))

    for text in _on_ranks(run):
        assert "stage=3: the units" in text
        assert named in text.split(" ran on some ranks only, or in another order")[0]


def test_where_gathers_block_no_host_ranks_hear_of_it_with_the_next_message() -> None:
    def run(rank: _Rank, number: int) -> None:
        rank.forward(range(4))
        rank.order.recv()
        rank.forward((0, 2) if number else range(4))
        rank.order.recv()

    assert all("the units" in text for text in _on_ranks(run, waits=False))
