"""Sixteen ranks with a limit of 256 open files: with a slow one losses are right and a save opens no connections beyond
the budget; one that is killed ends the run and is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers import many_ranks

BUDGET = 2 * (2 * many_ranks.RANKS + 2) + 16
"""Of sockets: twice what DDP has, and 16."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc; ranks are forked")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of both cases, the one that counts first: a launch leaves two open files per rank, as DDP's."""
    command = [sys.executable, "-m", "tests.helpers.many_ranks", str(tmp_path_factory.mktemp("many"))]
    done = subprocess.run(
        [*command, *many_ranks.CASES],
        cwd=many_ranks.ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert [line["case"] for line in lines] == [*many_ranks.CASES], done.stdout + done.stderr
    return {line.pop("case"): many_ranks.Seen(**line) for line in lines}


def test_with_a_slow_rank_and_a_save_losses_are_those_of_one_process(seen):
    """``torch.distributed.checkpoint``'s own collectives connect rank 0 to each other rank for good: 87 in groups."""
    found = seen["save"]
    assert found.losses == pytest.approx(many_ranks.expected_losses(), rel=1e-5)  # the order of summation
    assert len(found.sockets) == many_ranks.RANKS
    assert max(found.sockets) <= BUDGET
    # What makes the module whole goes over the engine's connections, one to each other rank, which are closed then
    assert all(
        ended <= inside - (many_ranks.RANKS - 1) for inside, ended in zip(found.sockets, found.ended, strict=True)
    )
    assert not found.left


def test_a_killed_rank_ends_the_run_before_the_time_limit_and_is_named(seen):
    found = seen["kill"]
    assert f"process {many_ranks.ODD} terminated with signal SIGKILL" in found.error
    assert "timeout_seconds" not in found.error  # longer than all cases may take together
    assert not found.left
