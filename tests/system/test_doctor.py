"""``lightning-zero doctor``: it finds what is here, says what is missing, and cannot hang."""

from __future__ import annotations

import json
from typing import Any

import torch

from lightning_zero.app import doctor
from tests.helpers.peer_memory import MAY_READ
from tests.system.commands import MODULE, run

FORBIDDEN = "no: the system forbids it (a container's seccomp profile, kernel.yama.ptrace_scope), so ranks use gloo"


def test_the_command(tmp_path: Any) -> None:
    done = run(*MODULE, "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["two processes"]["gloo"] == "works"
    assert found["two processes"]["each other's memory"] == ("works" if MAY_READ else FORBIDDEN)
    assert "GiB free in /dev/shm" in found["hardware"]["shared memory"]


def test_two_processes_that_do_not_meet(monkeypatch: Any) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    _, said = doctor.two_processes("gloo", timeout_seconds=50)
    assert said.startswith("no: ")
    assert "nowhere0" in said


def test_two_processes_that_may_not_read_each_other(monkeypatch: Any) -> None:
    forbidden = "from lightning_zero.comm import peer_memory\npeer_memory._read_memory = lambda *args: -1\n"
    monkeypatch.setattr(doctor, "_RANK", forbidden + doctor._RANK)
    found = doctor._collectives(50.0)
    assert (found["gloo"], found["each other's memory"]) == ("works", FORBIDDEN)
