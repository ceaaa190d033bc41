"""Shows where forked ranks hang: a launch that reaches the test's time limit takes them with it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

EARLIER_SECONDS = 5.0
"""Than the test's time limit."""


@pytest.fixture(autouse=True)
def _stacks_before_the_time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)  # forked processes inherit it
    limit = request.node.get_closest_marker("timeout")
    seconds = float(limit.args[0] if limit else request.config.getoption("timeout") or request.config.getini("timeout"))
    timer = threading.Timer(max(seconds - EARLIER_SECONDS, 0.1), _show_stacks)
    timer.start()
    yield
    timer.cancel()
    faulthandler.unregister(signal.SIGUSR1)


def _show_stacks() -> None:
    for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        if _answers(pid):
            os.kill(int(pid), signal.SIGUSR1)


def _answers(pid: str) -> bool:
    """Whether the process has a handler; another would be ended by the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)
