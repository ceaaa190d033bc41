"""The harness itself: a failing rank is named and shown, a hang ends, nothing is left behind."""

from __future__ import annotations

import os
import time

import pytest

from tests.helpers.ranks import RankError, RankPool


@pytest.fixture(scope="module")
def pool():
    with RankPool() as pool:
        yield pool


def _rank() -> int:
    return int(os.environ["RANK"])


def _facts() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names} | {"pid": str(os.getpid())}


def _reduce_ranks() -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(_rank() + 1))
    dist.all_reduce(total)
    return total.item(), torch.rand(()).item()


def _raise_on_one(failing: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if _rank() == failing:
        raise LookupError("the very rank that failed")
    dist.barrier()  # the others wait for the one that never comes


def _hang_on_one(hanging: int) -> None:
    if _rank() == hanging:
        time.sleep(3600)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_failing_rank_is_named_with_its_traceback_and_the_pool_recovers(pool):
    with pytest.raises(RankError) as caught:  # at once, or it would be the time limit that is shown
        pool.run(_raise_on_one, 1, world_size=2, timeout_seconds=50)
    assert caught.value.failures[0].rank == 1
    assert caught.value.failures[0].kind == "LookupError"
    assert "rank 1 of 2 failed in _raise_on_one" in str(caught.value)
    assert 'raise LookupError("the very rank that failed")' in str(caught.value)
    assert [total for total, _ in pool.run(_reduce_ranks, world_size=2)] == [3.0, 3.0]


def test_hang_ends_within_its_limit_and_shows_the_stack(pool):
    pids = [int(f["pid"]) for f in pool.run(_facts, world_size=2)]  # starting workers is not part of the limit
    with pytest.raises(RankError, match="took longer than 1") as caught:
        pool.run(_hang_on_one, 1, world_size=2, timeout_seconds=1)
    hanging = {f.rank: f.text for f in caught.value.failures}[1]
    assert "_hang_on_one" in hanging  # faulthandler's stack
    assert all(map(_gone, pids))
