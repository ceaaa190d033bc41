"""The first Ctrl-C or SIGTERM ends a run, at whatever moment it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.faults import hear_interrupts, marked_processes, wait_for
from tests.integration.commands import ROOT
from tests.integration.test_failing import FAILING

pytestmark = pytest.mark.rest

LIMIT_SECONDS = 100.0
"""For what follows a press. The runs have no end of their own, and ranks wait far longer for each other."""
MARK = "LIGHTNING_ZERO_INTERRUPT_TEST"


def press(folder: Path, number: int, after: str, *words: str) -> tuple[int, str]:
    """Exit code and output of a run that gets ``number`` once ``after`` exists, when its last process has ended."""
    with open(folder / "output.txt", "w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", FAILING, *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=hear_interrupts,
        )
        try:
            wait_for(lambda: (folder / after).exists() or process.poll() is not None, 120)
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does
            else:
                process.send_signal(number)
            code = process.wait(LIMIT_SECONDS)
            wait_for(lambda: not marked_processes(folder, MARK), LIMIT_SECONDS)
        finally:
            for pid in map(int, marked_processes(folder, MARK)):
                os.kill(pid, signal.SIGKILL)
    return code, (folder / "output.txt").read_text(errors="replace")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("after", ["script1", "setup0", "sanity0"])
def test_while_ranks_start(number, after, tmp_path):
    """script1: rank 1 imports, rank 0 waits for it; setup0: they meet; sanity0: before the first step."""
    code, output = press(tmp_path, number, after, "forever", "3", "sanity")
    assert code == (1 if number == signal.SIGINT else -15), output
    assert not (tmp_path / "step0").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("how", ["swallow", "blocks"])
def test_code_that_does_not_hear_it(how, number, tmp_path):
    """Python code that catches everything; C++ code that waits for a rank which does not come."""
    code, output = press(tmp_path, number, "setup0", how, "3")
    assert code in ((1,) if number == signal.SIGINT else (-15, 143)), output
    assert (tmp_path / "swallowed").exists() == (how == "swallow" and number == signal.SIGINT)


def test_in_mid_training(tmp_path):
    code, output = press(tmp_path, signal.SIGINT, "step0", "forever", "3")
    assert code == 1, output
    assert "Traceback" not in output


def test_with_a_save_all_ranks_end_after_the_same_step(tmp_path):
    code, output = press(tmp_path, signal.SIGINT, "step0", "forever", "3", "saves")
    assert code == 1, output
    saved = torch.load(tmp_path / "saved" / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] >= 3
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
