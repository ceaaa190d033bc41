"""Kinds that share a job: each run is trained once, and a failure is shown at the run it belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.batches import RUNS_PER_JOB, Batches, Run, reference
from tests.helpers.ranks import RankError

STAGE_3 = (("stage", 3),)


class _Jobs:
    """Stands in for the ranks: remembers which kinds shared a job; a job with the kind ``bad`` fails."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, fn: Any, batch: list[Run], world_size: int, timeout_seconds: float) -> list[Any]:
        assert {run.world_size for run in batch} == {world_size}
        self.seen.append([run.kind for run in batch])
        if "bad" in self.seen[-1]:
            raise RankError("rank 1 of 2 failed", [])
        return [[f"{run.kind} on {rank}" for run in batch] for rank in range(world_size)]


def test_runs_of_one_world_size_share_a_job_and_are_trained_once() -> None:
    jobs = _Jobs()
    runs = [Run(kind, STAGE_3, world_size) for world_size in (2, 3) for kind in "abc"]
    batches = Batches(jobs, [*runs, *runs])
    assert batches[runs[1]] == ["b on 0", "b on 1"]
    assert all(batches[run][-1] == f"{run.kind} on {run.world_size - 1}" for run in runs)
    assert jobs.seen == [["b", "a", "c"], ["a", "b", "c"]]


def test_jobs_are_limited_and_what_was_not_planned_is_trained_too() -> None:
    jobs = _Jobs()
    runs = [Run(str(index), STAGE_3, 2) for index in range(RUNS_PER_JOB + 1)]
    batches = Batches(jobs, runs)
    for run in [*runs, Run("later", STAGE_3, 2)]:
        assert batches[run][0] == f"{run.kind} on 0"
    assert [len(seen) for seen in jobs.seen] == [RUNS_PER_JOB, 1, 1]


def test_a_failed_job_fails_the_run_that_is_to_blame_and_no_other() -> None:
    jobs = _Jobs()
    good, bad, other = (Run(kind, STAGE_3, 2) for kind in ("good", "bad", "other"))
    batches = Batches(jobs, [good, bad, other])
    assert batches[good] == ["good on 0", "good on 1"]
    with pytest.raises(RankError):
        batches[bad]
    assert batches[other] == ["other on 0", "other on 1"]
    assert jobs.seen == [["good", "bad", "other"], ["good"], ["bad"], ["other"]]


def test_references_are_shared_where_seeds_make_no_difference() -> None:
    assert reference("adam", 2, False) == reference("adam", 2, True)
    assert reference("dropout", 2, False) != reference("dropout", 2, True)
