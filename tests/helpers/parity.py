"""Cases that compare a kind of module under one stage and engine with DDP.

What a failure localises: the kind names the feature, the stage the life-cycle (3: units come and go, 2: gradients are
reduced per micro-batch, 1: at the last one). Every rank starts from another seed: rank 0's values are everybody's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from tests.helpers import zoo
from tests.helpers.batches import Batches, Run, reference
from tests.helpers.held import HELD
from tests.helpers.zoo import KINDS

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
        return unsupported.get(self.stage) or kind.raises

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
