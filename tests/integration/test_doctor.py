"""``lightning-zero doctor``: it finds what is here, says what is missing, and cannot hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero import host
from lightning_zero.app import doctor
from lightning_zero.engines.deepspeed import ops as deepspeed_ops
from tests.helpers.peer_memory import MAY_READ
from tests.integration.commands import ROOT

FORBIDDEN = "no: the system forbids it (a container's seccomp profile, kernel.yama.ptrace_scope), so ranks use sockets"


@pytest.mark.rest
@pytest.mark.timeout(400)
def test_the_command() -> None:
    command = [sys.executable, "-m", "lightning_zero", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])  # deepspeed may print before it
    assert found["versions"]["torch"] == torch.__version__
    assert found["two processes"]["gloo"] == "works"
    assert found["two processes"]["each other's memory"] == ("works" if MAY_READ else FORBIDDEN)
    assert "GiB free in /dev/shm" in found["hardware"]["shared memory"]
    assert found["backends"]["gloo"] == "available"
    pytest.importorskip("deepspeed")
    for op in ("cpu_adam", "async_io"):
        said = found["deepspeed ops"][op]
        missing = deepspeed_ops.why_not(op)
        assert said == f"no: {missing}" if missing else said in ("built", "can be built")


@pytest.mark.rest
def test_two_processes_that_do_not_meet(monkeypatch: Any) -> None:
    assert doctor.collective_works("gloo", timeout_seconds=0.01).startswith("no: not done after 0.01 s")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    said = doctor.collective_works("gloo", timeout_seconds=120)
    assert said.startswith("no: ")
    assert "nowhere0" in said


def test_what_succeeded_is_reported_as_such(monkeypatch: Any) -> None:
    """However the process ended afterwards; and none is left to end by chance: it takes its group down itself."""
    monkeypatch.setattr(doctor, "_RANK", "import os; print('works', flush=True); os.abort()")
    assert doctor.collective_works("gloo", timeout_seconds=60) == "works"
    monkeypatch.setattr(doctor, "_RANK", "import os; os.abort()")
    assert doctor.collective_works("gloo", timeout_seconds=60) == "no: exit code -6"
    for script in (doctor._READER,):
        assert script.rstrip().splitlines()[-2].startswith("dist.destroy_process_group()")


@pytest.mark.rest
def test_two_processes_that_may_not_read_each_other(monkeypatch: Any) -> None:
    forbidden = "from lightning_zero.comm import peer_memory\npeer_memory._read_memory = lambda *args: -1\n"
    monkeypatch.setattr(doctor, "_READER", forbidden + doctor._READER)
    assert doctor.examine(timeout_seconds=120)["two processes"]["each other's memory"] == FORBIDDEN


@pytest.fixture
def quick(monkeypatch: Any) -> None:
    """Nothing that takes seconds is tried."""
    monkeypatch.setattr(doctor, "collective_works", lambda backend, seconds: "no: nobody answers")
    monkeypatch.setattr(deepspeed_ops, "every_op", dict)


def test_a_probe_that_fails_does_not_hide_the_others(quick: None, monkeypatch: Any, capsys: Any) -> None:
    def breaks(name: str) -> Any:
        raise OSError("broken")

    monkeypatch.setattr(os, "sysconf", breaks)
    assert doctor.run(1.0, as_json=False) == 1
    text = capsys.readouterr().out
    assert "no: OSError: broken" in text
    assert "no: nobody answers" in text
    assert "deepspeed  no: not installed" in text


@pytest.mark.parametrize(
    ("total", "said"), [(None, "no: /dev/shm (missing)"), (64 * 2**20, "--shm-size"), (2**40, "GiB free in /dev/shm")]
)
def test_shared_memory_that_is_little_or_missing_is_said(
    quick: None, monkeypatch: Any, total: int | None, said: str
) -> None:
    def usage(folder: str) -> Any:
        if total is None:
            raise OSError(2, "missing")
        return SimpleNamespace(total=total, free=total)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    answer = doctor.examine(0.1)["hardware"]["shared memory"]
    assert said in answer
    assert answer.startswith("no: ") == (total != 2**40)


def test_without_deepspeed(monkeypatch: Any) -> None:
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    monkeypatch.setattr(deepspeed_ops, "find_spec", lambda name: None)
    found = doctor.examine(0.1)["deepspeed ops"]
    assert found == {"deepspeed": "no: not installed; pip install deepspeed"}
    with pytest.raises(ModuleNotFoundError, match=r"pip install deepspeed.*engine='fsdp2'"):
        host.require_deepspeed()
