"""``lightning-zero doctor``: it finds what is here, says what is missing, and cannot hang."""

from __future__ import annotations

import json
from typing import Any

import torch

from lightning_zero.app import doctor
from tests.system.commands import MODULE, run


def test_the_command(tmp_path: Any) -> None:
    done = run(*MODULE, "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["two processes"]["gloo"] == "works"
    assert "GiB free in /dev/shm" in found["hardware"]["shared memory"]


def test_two_processes_that_work_however_they_end(monkeypatch: Any) -> None:
    """And none that hangs is waited for."""
    monkeypatch.setattr(doctor, "_RANK", "import os; print('works', flush=True); os.abort()")
    assert doctor.two_processes("gloo", timeout_seconds=20) == "works"
    monkeypatch.setattr(doctor, "_RANK", "import os; os.abort()")
    assert doctor.two_processes("gloo", timeout_seconds=20) == "no: exit code -6"
    monkeypatch.setattr(doctor, "_RANK", "import time; time.sleep(60)")
    assert doctor.two_processes("gloo", timeout_seconds=0.1).startswith("no: not done after 0.1 s")
