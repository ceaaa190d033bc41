"""Ctrl-C and SIGTERM end a run, at whatever moment they come. test_faults.py has Ctrl-C in mid-training."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.system.commands import ROOT, started
from tests.system.test_failing import FAULTS


def press(folder: Path, number: int, after: str, *words: str, then: str = "") -> tuple[int, str]:
    """Exit code and output of a run when its last process has ended. It gets ``number`` once ``after`` exists, and
    again once ``then`` exists. The runs have no end of their own, and ranks wait far longer for each other."""
    with started(FAULTS, *words, fork="first", cwd=folder, PYTHONPATH=str(ROOT)) as program:
        program.until(lambda: (folder / after).exists() or program.has_ended())
        if number == signal.SIGINT:
            os.killpg(program.pid, number)  # as a terminal does
        else:
            os.kill(program.pid, number)
        if then:
            program.until(lambda: (folder / then).exists() or program.has_ended())
            os.killpg(program.pid, number)
        code = program.wait()
        program.until(lambda: not program.processes())
        return code, program.output


def test_while_ranks_start(tmp_path):
    """Rank 1 imports, rank 0 waits for it."""
    code, _ = press(tmp_path, signal.SIGTERM, "script1", "interrupt")
    assert code == -signal.SIGTERM
    assert not (tmp_path / "fault").exists()


def test_python_code_that_catches_everything(tmp_path):
    code, _ = press(tmp_path, signal.SIGINT, "setup0", "swallow-0", then="swallowed")
    assert code == -signal.SIGKILL
