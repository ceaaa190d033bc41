"""Reads of parameters that not all ranks make: as under DDP, or one line that names them, soon.

That values are DDP's in every hook, at every stage, is the parity test's: kinds ``read_on_one_rank`` and
``histograms_on_one_rank``.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.helpers import reading, zoo
from tests.helpers.ranks import outcome

LIMIT = 600.0
"""Longer than a job may take: a rank that waited for it would fail the test."""
FSDP2 = {"stage": 3, "timeout_seconds": LIMIT, **zoo.BLOCKS}
DEEPSPEED = {"stage": 3, "timeout_seconds": LIMIT, "engine": "deepspeed"}


BEFORE_STEP, AT_THE_END = ("on_before_optimizer_step", 0), ("on_train_epoch_end", 1)
"""The hook, and the rank that reads in it."""


@pytest.mark.parametrize(
    ("what", "hook", "rank"),
    [
        ("norm", *BEFORE_STEP),
        ("gradient", *BEFORE_STEP),
        ("state", *AT_THE_END),
        ("forward", *AT_THE_END),
        ("written before", *BEFORE_STEP),
        ("state_dict", *AT_THE_END),
    ],
)
def test_one_rank_reads_what_it_would_under_ddp(ranks2: Any, what: str, hook: str, rank: int) -> None:
    results = ranks2(reading.look, FSDP2, hook, what, rank)
    expected = ranks2(reading.look, "ddp", hook, what, rank)
    assert results[rank]["found"] == pytest.approx(expected[rank]["found"], rel=1e-6)  # a norm of rows put together
    assert len(results[rank]["found"]) == 1
    assert results[1 - rank]["found"] == []
    for result, of_ddp in zip(results, expected, strict=True):
        assert result["losses"] == pytest.approx(of_ddp["losses"], rel=1e-6)


def test_one_rank_reads_before_a_collective_of_lightnings(ranks2: Any) -> None:
    """The others wait in ``self.log(sync_dist=True)``."""
    results = ranks2(reading.look, FSDP2, "on_train_epoch_end", "norm", 0, True)
    expected = ranks2(reading.look, "ddp", "on_train_epoch_end", "norm", 0, True)
    assert results[0]["found"] == pytest.approx(expected[0]["found"], rel=1e-6)
    assert [result["logged"] for result in results] == [result["logged"] for result in expected] == [1.5, 1.5]


def test_a_backward_of_one_rank_alone_is_refused(ranks2: Any) -> None:
    results = ranks2(reading.look, FSDP2, "on_train_epoch_end", "backward", 0)
    (text,) = results[0]["found"]
    assert "backward through a parameter that not all ranks have read" in text
    assert all(len(result["losses"]) == 4 for result in results)  # it can be caught, and ranks go on as one


def test_a_rank_that_waits_for_another_by_itself_is_told_of_its_read(ranks2: Any) -> None:
    """The other one waits in a collective of user code, until the first one's read has run out of time."""
    first, second = ranks2(_wait_for_each_other)
    assert re.search(r"a read of parameter 'net\.stem\.weight' and .* on rank 0: not all", first)
    assert "timeout_seconds=2" in first
    assert second


def _wait_for_each_other() -> str:
    class Waits(zoo.Zoo):
        def on_train_epoch_end(self) -> None:
            if self.global_rank:
                dist.barrier()
            self.net.stem.weight.norm()
            dist.barrier()

    strategy = {**FSDP2, "timeout_seconds": 2.0}
    return outcome(_fit, Waits, strategy)[1]


def _fit(kind: type[zoo.Zoo], strategy: dict[str, Any]) -> None:
    zoo.make_trainer(strategy, max_steps=1).fit(kind(), DataLoader(zoo.RandomDataset(), batch_size=4))


@pytest.mark.parametrize(("what", "hook", "rank"), [("gradient", *BEFORE_STEP), ("forward", *AT_THE_END)])
def test_one_rank_reads_through_deepspeed(ranks2: Any, what: str, hook: str, rank: int) -> None:
    results = ranks2(reading.look, DEEPSPEED, hook, what, rank)
    expected = ranks2(reading.look, "ddp", hook, what, rank)
    assert results[rank]["found"] == pytest.approx(expected[rank]["found"], rel=1e-6)
    assert results[1 - rank]["found"] == []


@pytest.mark.parametrize("settings", [FSDP2, DEEPSPEED], ids=["fsdp2", "deepspeed"])
def test_processes_that_a_rank_starts_do_not_read_parameters(ranks2: Any, settings: dict[str, Any]) -> None:
    for text in ranks2(reading.in_a_fork, settings):
        assert re.search(r"RuntimeError.*in a process that this rank has started.*num_workers=0", text, re.S), text


def test_a_rank_of_one_replica_reads_alone(ranks: Any) -> None:
    """HSDP: only ranks 2 and 3 have the rows that rank 3 reads."""
    settings = {**FSDP2, "shard_size": 2}
    results = ranks(reading.look, settings, "on_train_epoch_end", "norm", 3, world_size=4)
    expected = ranks(reading.look, "ddp", "on_train_epoch_end", "norm", 3, world_size=4)
    # Four ranks' gradients are summed in another order than by DDP's all-reduce
    assert results[3]["found"] == pytest.approx(expected[3]["found"], rel=1e-6)


def test_one_rank_reads_what_was_there_before_all_write(ranks2: Any) -> None:
    expected = ranks2(reading.shrink, "ddp")
    for strategy in (FSDP2, DEEPSPEED):
        reads = ranks2(reading.shrink, strategy)
        for found, of_ddp in zip(reads, expected, strict=True):
            assert found["found"] == pytest.approx(of_ddp["found"], rel=1e-6)  # a norm of rows put together
            assert found["losses"] == pytest.approx(of_ddp["losses"], rel=1e-6)
        assert reads[0]["found"]
