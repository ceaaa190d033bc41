"""What ``lightning-zero doctor`` says of a probe that fails."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lightning_zero.app import doctor


@pytest.fixture
def quick(monkeypatch: Any) -> None:
    """Nothing that takes seconds is tried."""
    monkeypatch.setattr(doctor, "two_processes", lambda backend, seconds: ([], "no: nobody answers"))


def test_a_probe_that_fails_does_not_hide_the_others(quick: None, monkeypatch: Any, capsys: Any) -> None:
    def breaks(name: str) -> Any:
        raise OSError("broken")

    monkeypatch.setattr(os, "sysconf", breaks)
    assert doctor.run(1.0, as_json=False) == 1
    text = capsys.readouterr().out
    assert "no: OSError: broken" in text
    assert "no: nobody answers" in text


def test_two_processes_that_work_however_they_end(monkeypatch: Any) -> None:
    """And none that hangs is waited for."""
    monkeypatch.setattr(doctor, "_RANK", "import os; print('works', flush=True); os.abort()")
    assert doctor.two_processes("gloo", timeout_seconds=20)[1] == ""
    monkeypatch.setattr(doctor, "_RANK", "import os; os.abort()")
    assert doctor.two_processes("gloo", timeout_seconds=20)[1] == "no: exit code -6"
    monkeypatch.setattr(doctor, "_RANK", "import time; time.sleep(60)")
    assert doctor.two_processes("gloo", timeout_seconds=0.1)[1].startswith("no: not done after 0.1 s")
