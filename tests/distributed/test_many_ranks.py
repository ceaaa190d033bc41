"""Sixteen ranks with a limit of 256 open files: with one that is slow losses are right, one that ends or stops ends the
run and is named, and saves open no connections beyond the budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import many_ranks

SAVES = [f"{form}-{name}" for form in many_ranks.FORMS for name in ("zero3", "halves")]
CASES = ["slow-zero1", "slow-zero3", "slow-groups", "kill-zero1", "kill-groups", "stop-zero3"]
BUDGET = 2 * (2 * many_ranks.RANKS + 2) + 16
"""Of sockets: twice what DDP has, and 16."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each save in a process of its own, the others in one: each launch leaves two open files per rank, as DDP's."""
    each = [_run(tmp_path_factory.mktemp("many"), cases) for cases in (CASES, *([case] for case in SAVES))]
    return {line.pop("case"): many_ranks.Seen(**line) for lines in each for line in lines}


def _run(folder: Path, cases: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.helpers.many_ranks", str(folder), *cases]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=many_ranks.ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert [line["case"] for line in lines] == cases, done.stdout + done.stderr
    return lines


pytestmark = [
    pytest.mark.rest,
    pytest.mark.programs,
    pytest.mark.timeout(500),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc; ranks are forked"),
]


@pytest.mark.parametrize("name", ["zero1", "zero3", "groups"])
def test_with_a_slow_rank_losses_are_those_of_one_process(name, seen):
    found = seen[f"slow-{name}"]
    assert found.losses == pytest.approx(many_ranks.expected_losses(), rel=1e-5)  # the order of summation
    assert len(found.sockets) == many_ranks.RANKS
    assert max(found.sockets) <= BUDGET
    # What makes the module whole goes over the engine's connections, one to each other rank, which are closed then
    assert all(
        ended <= inside - (many_ranks.RANKS - 1) for inside, ended in zip(found.sockets, found.ended, strict=True)
    )
    assert not found.left


@pytest.mark.parametrize("case", SAVES)
def test_a_save_opens_no_connections_beyond_the_budget(case, seen):
    """``torch.distributed.checkpoint``'s own collectives connect rank 0 to each other rank for good: 87 in groups."""
    found = seen[case]
    assert len(found.sockets) == many_ranks.RANKS
    assert max(found.sockets) <= BUDGET
    if case.endswith("zero3"):  # no new one at all
        assert max(found.sockets) <= max(seen["slow-zero3"].sockets)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("kill")])
def test_a_killed_rank_ends_the_run_before_the_time_limit_and_is_named(case, seen):
    found = seen[case]
    assert f"process {many_ranks.ODD} terminated with signal SIGKILL" in found.error
    assert "timeout_seconds" not in found.error  # longer than all cases may take together
    assert not found.left


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("stop")])
def test_a_stopped_rank_ends_the_run_after_the_time_limit_and_is_named(case, seen):
    found = seen[case]
    assert f"rank {many_ranks.ODD} has not come within timeout_seconds={many_ranks.LIMIT_SECONDS:g}: " in found.error
    assert not found.left
