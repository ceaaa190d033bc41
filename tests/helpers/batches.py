"""Trains many kinds of the zoo in one job, one after the other in one process group.

A job costs a process group, threads and sockets, which take longer than the training of a kind. :class:`Batches` is
given all runs that the selected tests will ask for; asked for one, it trains that one together with the next of the
same world size and keeps their results. When a job fails, each of its runs gets a job of its own, so that the failure
is shown at the test it belongs to, with the failing rank's traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.helpers import zoo
from tests.helpers.ranks import RankError, outcome

RUNS_PER_JOB = 24
SECONDS_PER_JOB, SECONDS_PER_COMPILING_JOB = 50.0, 150.0
"""One run takes half a second, or ten; below the limit of a test, so that a job that hangs shows its ranks' stacks."""


@dataclass(frozen=True)
class Run:
    """One kind under one strategy."""

    kind: str
    strategy: str | tuple[tuple[str, Any], ...]
    """A registered name, or the settings of a ``ZeroStrategy`` as pairs."""
    world_size: int
    different_seeds: bool = True
    """Every rank initializes the module differently: rank 0's values are the ones that count."""
    refused: bool = False
    """All ranks are expected to raise: their errors are the result."""

    @property
    def shares(self) -> tuple[int, bool]:
        """Runs in which this is equal share jobs."""
        return self.world_size, not isinstance(self.strategy, str) and ("engine", "deepspeed") in self.strategy


def reference(kind: str, world_size: int, different_seeds: bool = True) -> Run:
    """The same training under DDP."""
    # Without random numbers in training, DDP ends in the same place from either seeding: rank 0 wins there too.
    return Run(kind, zoo.KINDS[kind].reference, world_size, different_seeds or not zoo.KINDS[kind].random)


class Batches:
    """Results of runs, each by rank: ``zoo.Result``, or ``(error, text)`` where the run is refused."""

    def __init__(self, ranks: Callable[..., list[Any]], planned: Iterable[Run]) -> None:
        self._ranks = ranks
        self._planned = dict.fromkeys(planned)
        self._known: dict[Run, list[Any]] = {}
        self._alone: set[Run] = set()
        """Runs of a job that failed."""

    def __getitem__(self, run: Run) -> list[Any]:
        if run not in self._known:
            batch = [run] if run in self._alone else self._batch_of(run)
            try:
                self._train(batch)
            except RankError:
                if len(batch) == 1:
                    raise
                self._alone.update(batch)
                self._train([run])
        return self._known[run]

    def _batch_of(self, run: Run) -> list[Run]:
        waiting = [
            other
            for other in self._planned
            if other not in self._known and other not in self._alone and other.shares == run.shares
        ]
        kind = zoo.KINDS.get(run.kind)
        number = 2 if kind is not None and kind.compiles else RUNS_PER_JOB  # each takes some ten seconds
        return [run, *(other for other in waiting if other != run)][:number]

    def _train(self, batch: list[Run]) -> None:
        world_size = batch[0].world_size
        compiles = any(run.kind in zoo.KINDS and zoo.KINDS[run.kind].compiles for run in batch)
        limit = SECONDS_PER_COMPILING_JOB if compiles else SECONDS_PER_JOB
        by_rank = self._ranks(_train, batch, world_size=world_size, timeout_seconds=limit)
        for run, *results in zip(batch, *by_rank, strict=True):
            self._known[run] = results


def _train(batch: list[Run]) -> list[Any]:
    return [_train_one(run) for run in batch]


def _train_one(run: Run) -> Any:
    strategy = run.strategy if isinstance(run.strategy, str) else dict(run.strategy)
    if run.refused:
        return outcome(zoo.train, run.kind, strategy, run.different_seeds)
    return zoo.train(run.kind, strategy, run.different_seeds)
