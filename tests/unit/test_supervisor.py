"""The supervisor's table: which rank is named as the first that failed, and which state follows."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.launch import supervisor
from lightning_zero.launch.supervisor import State, Supervisor


class _Rank0:
    """Sends the lines that it is given, one at a time, after the ranks have ended."""

    def __init__(self, ranks: dict[int, Any], events: list[str]) -> None:
        self._ranks, self._events = ranks, events

    def read(self) -> list[str]:
        for process in self._ranks.values():
            process.wait()
        return [json.dumps({"do": self._events.pop(0)})] if self._events else [""]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Any:
    """Runs ranks that end as ``codes`` says, and have raised what ``errors`` says, to the end of the run."""
    monkeypatch.setattr(supervisor.os, "getppid", os.getpid)

    def run(codes: dict[int, str], errors: dict[int, dict[str, Any]], events: list[str]) -> tuple[Supervisor, str]:
        specs = []
        for rank, code in codes.items():
            paths = {name: str(tmp_path / f"{name}{rank}") for name in ("error", "scratch")}
            if rank in errors:
                said = {"summary": f"error of {rank}", "traceback": "", "alike": False, **errors[rank]}
                Path(paths["error"]).write_text(json.dumps(said))
            command = [sys.executable, "-S", "-c", f"import os, signal; {code}"]
            specs.append({"rank": rank, "command": command, "env": {}, "log": None, **paths})
        plan = {"ranks": specs, "rank0": 0, "cwd": "/", "folder": str(tmp_path / "x"), "scratch": "", "stdout": 1}
        watching = Supervisor(plan, None)  # type: ignore[arg-type]
        watching.start()
        watching.lines = _Rank0(watching.ranks, events)  # type: ignore[assignment]
        watching.watch()
        return watching, capfd.readouterr().err

    return run


def test_the_rank_that_raised_first_is_named(watch):
    """Others raised because of it, and may have ended before."""
    effect, first = {"first": False}, {"first": True}
    watched, said = watch({1: "os._exit(1)", 2: "os._exit(1)"}, {1: effect, 2: first}, ["rank 0 failed"])
    assert watched.failure["rank"] == 2
    assert "failed: error of 2" in said


def test_a_rank_that_was_killed_comes_before_those_that_raised(watch):
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    watched, said = watch({1: "os._exit(1)", 2: killed}, {1: {"first": True}}, ["nothing", "rank 0 failed"])
    assert watched.failure["rank"] == 2
    assert "probably out of memory" in said


def test_an_error_of_all_ranks_is_rank_0s_to_show(watch):
    watched, said = watch({1: "os._exit(1)"}, {1: {"first": True, "alike": True}}, ["rank 0 failed"])
    assert watched.failure is None
    assert said == ""


def test_what_rank_0_knows_of_all_ranks_counts_before_they_have_noted_it(watch):
    watched, said = watch({1: "os._exit(0)"}, {1: {"first": True}}, ["all raised", "rank 0 failed"])
    assert watched.failure is None
    assert said == ""


def test_a_rank_that_ended_does_not_take_part_in_the_next_run(watch):
    """Rank 0 has caught the error of all ranks, and this rank has not."""
    watched, said = watch({1: "os._exit(1)"}, {1: {"first": True, "alike": True}}, ["run begins", "rank 0 failed"])
    assert watched.failure["rank"] == 1
    assert "failed with exit code 1" in said


def test_ranks_that_end_well_are_waited_for(watch):
    watched, said = watch({1: "pass"}, {}, ["rank 0 done"])
    assert (watched.failure, watched.codes, said) == (None, {1: 0}, "")


@pytest.mark.parametrize("state", [state for state in State if state is not State.OVER])
def test_a_run_ends_from_every_state_when_rank_0_is_gone(state):
    assert any(state in states for states, event, following, _ in supervisor.TABLE
               if event == "rank 0 gone" and following is State.OVER)  # fmt: skip
