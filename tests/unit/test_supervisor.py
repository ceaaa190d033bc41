"""The supervisor's table: which rank is named as the first that failed, and which state follows."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.launch import supervisor
from lightning_zero.launch.supervisor import State, Supervisor

KILLED, RAISED = "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)"


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Any:
    """Runs ranks that end as ``codes`` says to the end of the run, while rank 0 sends ``event``.

    Before, each rank in ``errors`` has raised the error that is named, so many seconds ago.
    """
    monkeypatch.setattr(supervisor.os, "getppid", os.getpid)

    def run(codes: dict[int, str], errors: dict[int, tuple[float, str]], event: str) -> tuple[str, str]:
        for rank, (seconds, error) in errors.items():
            text = json.dumps({"at": time.time() - seconds, "summary": f"error {error}", "traceback": ""})
            Path(supervisor.error_file(str(tmp_path), rank)).write_text(text)
        plan: dict[str, Any] = {"rank0": 0, "pid": os.getpid(), "logs": ["" for _ in codes]}
        plan |= {"cwd": "/", "folder": str(tmp_path), "stdout": 1, "env": {}}
        program = f"import os, signal; exec({list(codes.values())!r}[int(os.environ['LOCAL_RANK']) - 1])"
        watching = Supervisor({**plan, "command": ["python3", "-S", "-c", program]})
        watching.start()
        for process in watching.ranks.values():
            process.wait()
        requests = iter([event])
        monkeypatch.setattr(supervisor, "_request", lambda: next(requests, ""))
        watching.watch()
        return watching.cause, capfd.readouterr().err

    return run


def test_the_rank_that_raised_first_is_named(watch):
    """Others raised because of it, and may have ended before."""
    cause, said = watch({1: RAISED, 2: RAISED}, {0: (1.0, "a"), 1: (2.0, "b"), 2: (3.0, "c")}, "rank 0 failed")
    assert cause == "rank 2 failed: error c"
    assert cause.removeprefix("rank 2 ") in said


def test_a_rank_that_was_killed_comes_before_those_that_raised_because_of_that(watch):
    cause, said = watch({1: RAISED, 2: KILLED}, {0: (0.0, "a"), 1: (0.0, "b")}, "rank 0 failed")
    assert cause.startswith("rank 2 was killed")
    assert "probably out of memory" in said


def test_a_rank_that_raised_comes_before_those_that_crashed_because_of_that(watch):
    cause, _ = watch({1: RAISED, 2: "os.abort()"}, {0: (3.0, "a"), 1: (5.0, "b")}, "rank 0 failed")
    assert cause == "rank 1 failed: error b"


@pytest.mark.parametrize("errors", [{0: (1.0, "a"), 1: (2.0, "a")}, {0: (2.0, "a"), 1: (1.0, "b")}])
def test_an_error_that_rank_0_has_raised_too_or_first_is_its_to_show(watch, errors):
    assert watch({1: RAISED}, errors, "rank 0 failed") == ("", "")


def test_a_rank_that_fails_when_rank_0_has_finished_fails_the_run(watch):
    assert watch({1: "os._exit(3)"}, {}, "rank 0 done")[0] == "rank 1 failed with exit code 3"


def test_ranks_that_are_done_or_have_saved_and_ended_as_asked_have_not_failed(watch):
    assert watch({1: "pass", 2: "os._exit(143)"}, {}, "rank 0 done") == ("", "")


@pytest.mark.parametrize("state", [state for state in State if state is not State.OVER])
def test_a_run_ends_from_every_state_when_rank_0_is_gone(state):
    assert any(state in states for states, event, following in supervisor.TABLE
               if event == "rank 0 gone" and following is State.OVER)  # fmt: skip
