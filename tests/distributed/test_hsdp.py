"""``shard_size``: shards inside groups, replicas between them. 4 ranks as 2 x 2 train as DDP on 4 ranks does.

A failure of ``accumulation_and_clip`` alone says that replicas were counted twice or that a group's gradients were not
averaged with the others', of ``adafactor`` that whole tensors were put together over the wrong axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import zoo
from tests.helpers.ranks import outcome, run_ranks
from tests.helpers.zoo import KINDS


@pytest.fixture
def ranks4() -> Callable[..., list[Any]]:
    """New processes for each job: in those of other tests a mesh of an earlier job, whose groups had ended, was once
    found in the place of this one's."""
    return lambda fn, *args: run_ranks(fn, 4, *args)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("accumulation_and_clip", 2), ("unused_on_some_ranks", 1), ("adafactor", 3)],
)
def test_two_by_two_equals_ddp(kind: str, stage: int, ranks4) -> None:
    """`make parity` trains every kind so."""
    reference = ranks4(zoo.train, kind, KINDS[kind].reference, True)
    results = ranks4(zoo.train, kind, {"stage": stage, "shard_size": 2, **zoo.BLOCKS}, True)
    difference = zoo.difference(results, reference)
    assert difference.largest <= KINDS[kind].tolerance, (difference, KINDS[kind].reason)


def test_unequal_groups_are_refused_on_all_ranks(ranks3) -> None:
    answers = ranks3(outcome, zoo.train, "adam", {"stage": 3, "shard_size": 2})
    assert all("shard_size=2 does not divide the 3 ranks" in text for _, text in answers), answers
