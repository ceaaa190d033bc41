"""``shard_size``: shards inside groups, replicas between them. 4 ranks as 2 x 2 train as DDP on 4 ranks does.

A failure of ``clip_by_norm`` alone says that replicas were counted twice, of ``accumulation`` that a group's gradients
were not averaged with the others', of ``adafactor`` that whole tensors were put together over the wrong axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.config import ZeroConfig
from lightning_zero.engines.fsdp2.engine import Fsdp2Engine
from lightning_zero.engines.precision import DtypePolicy
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
    [("clip_by_norm", 3), ("accumulation_and_clip", 2), ("unused_on_some_ranks_heads", 1), ("adafactor", 3)],
)
def test_two_by_two_equals_ddp(kind: str, stage: int, ranks4) -> None:
    """`make parity` trains every kind so."""
    reference = ranks4(zoo.train, kind, KINDS[kind].reference, True)
    results = ranks4(zoo.train, kind, {"stage": stage, "shard_size": 2, **zoo.BLOCKS}, True)
    difference = zoo.difference(results, reference)
    assert difference.largest <= KINDS[kind].tolerance, (difference, KINDS[kind].reason)


def _shard_two_by_two() -> tuple[list[int], float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 6, bias=False)
    engine = Fsdp2Engine(ZeroConfig(stage=3, shard_size=2), torch.device("cpu"), DtypePolicy())
    engine.shard(module)
    shard = engine.shards[module.weight].to_local()
    return list(shard.shape), shard.sum().item()


def test_shards_lie_in_groups_of_consecutive_ranks(ranks4) -> None:
    shapes, sums = zip(*ranks4(_shard_two_by_two), strict=True)
    assert list(shapes) == [[3, 8]] * 4  # half, not a quarter
    assert sums[0] == sums[2] != sums[1] == sums[3]


def test_unequal_groups_are_refused_on_all_ranks(ranks3) -> None:
    answers = ranks3(outcome, zoo.train, "adam", {"stage": 3, "shard_size": 2})
    assert all("shard_size=2 does not divide the 3 ranks" in text for _, text in answers), answers


def test_a_group_of_all_is_no_group(ranks2) -> None:
    reference = ranks2(zoo.train, "adam", {"stage": 3})
    assert zoo.difference(ranks2(zoo.train, "adam", {"stage": 3, "shard_size": 2}), reference).largest == 0.0
