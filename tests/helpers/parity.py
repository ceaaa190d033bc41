"""Cases that compare a kind of module under one stage and engine with DDP, and the jobs that train them.

What a failure localises: the kind names the feature, the stage the life-cycle (3: units come and go, 2: gradients are
reduced per micro-batch, 1: at the last one). Every rank starts from another seed: rank 0's values are everybody's.

A job costs a process group, threads and sockets, which take longer than the training of a kind. :class:`Batches` is
given all runs that the selected tests will ask for; asked for one, it trains that one together with the next of the
same world size and keeps their results. When a job fails, each of its runs gets a job of its own, so that the failure
is shown at the test it belongs to, with the failing rank's traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers import zoo
from tests.helpers.held import HELD
from tests.helpers.ranks import RankError, outcome
from tests.helpers.zoo import KINDS

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
    refused: bool = False
    """All ranks are expected to raise: their errors are the result."""

    @property
    def shares(self) -> tuple[int, bool]:
        """Runs in which this is equal share jobs."""
        return self.world_size, not isinstance(self.strategy, str) and ("engine", "deepspeed") in self.strategy


def reference(kind: str, world_size: int) -> Run:
    """The same training under DDP."""
    return Run(kind, zoo.KINDS[kind].reference, world_size)


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
        return outcome(zoo.train, run.kind, strategy, True)
    return zoo.train(run.kind, strategy, True)


COMPILED = [name for name, kind in KINDS.items() if kind.compiles]
_OTHERS = [name for name, kind in KINDS.items() if not kind.compiles]
_FIRST_HELD = _OTHERS.index(next(iter(HELD)))
FEATURES, USES = _OTHERS[:_FIRST_HELD], _OTHERS[_FIRST_HELD:]
"""Kinds by what a module is made of, and by what user code does with its parameters: a file of cases each, which two
processes take."""


@dataclass(frozen=True)
class Case:
    kind: str
    engine: str
    stage: int
    world_size: int = 2

    def __str__(self) -> str:
        return f"{self.kind}-{self.engine}-{self.stage}-{self.world_size}ranks"

    @property
    def refusal(self) -> str | None:
        """The pattern of the error that every rank owes."""
        kind = KINDS[self.kind]
        if refusal := kind.refusal(self.engine, self.stage):
            return refusal
        if self.world_size == 1:
            return None
        unsupported = kind.unsupported_units if self.engine == "fsdp2" else kind.unsupported_deepspeed
        return unsupported.get(self.stage)

    @property
    def run(self) -> Run:
        settings = {"engine": self.engine, "stage": self.stage, **(zoo.BLOCKS if self.engine == "fsdp2" else {})}
        return Run(self.kind, tuple(settings.items()), self.world_size, refused=self.refusal is not None)

    @property
    def reference(self) -> Run:
        return reference(self.kind, self.world_size)


def cases(kinds: Iterable[str]) -> Iterator[Case]:
    """Each kind at stage 3 on ``fsdp2``, and at one other stage or engine. `make parity` compares all of them."""
    for index, name in enumerate(kinds):
        turn, through_deepspeed = divmod(index, 6)
        yield Case(name, "fsdp2", 3)
        if through_deepspeed == 5:
            yield Case(name, "deepspeed", 1 + turn % 3)
        else:
            yield Case(name, "fsdp2", 1 + index % 2)


@pytest.fixture(scope="module")
def batches(ranks, request) -> Batches:
    """Trains what the selected cases need, and ``RUNS`` of their file, many kinds per job."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.module is request.module]
    cases = [call.params["case"] for call in calls if call is not None and "case" in call.params]
    of_cases = [run for case in cases for run in (case.run, *([] if case.refusal else [case.reference]))]
    return Batches(ranks, [*of_cases, *getattr(request.module, "RUNS", ())])


def compare(case: Case, batches: Batches) -> None:
    """The case's losses, metrics and weights with those of DDP, or its error with the one that it owes."""
    kind = KINDS[case.kind]
    if case.refusal is not None:
        for name, text in batches[case.run]:
            assert name != "ok"
            assert re.search(case.refusal, text), text
        return
    difference = zoo.difference(batches[case.run], batches[case.reference])
    assert difference.largest <= kind.tolerance, (difference, kind.reason)
