"""Shared fixtures: the ranks, and the guard that a test leaves the process as it found it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.helpers.ranks import RankPool

os.environ.setdefault("OMP_NUM_THREADS", "1")
BUILD_SECONDS = 1100.0
"""For each of DeepSpeed's ops; under three minutes on two quiet cores."""
BUILD_BESIDE = f"""
import os
from lightning_zero.engines.deepspeed import ops
os.nice(19)
os.environ["MAX_JOBS"] = "1"  # Linux gives each session an equal share, whatever its processes' niceness
for name in (ops.CPU_ADAM, ops.ASYNC_IO):
    ops.build(name, str, {BUILD_SECONDS})
"""
building: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _environment_is_left_as_found() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def deepspeed_ops() -> None:
    """What offload through DeepSpeed compiles, as far as it can be compiled: minutes on a fresh machine, once. Other
    tests run meanwhile."""
    from lightning_zero.engines.deepspeed import ops

    for process in building:
        process.wait()
    for name in (ops.CPU_ADAM, ops.ASYNC_IO):
        ops.build(name, print, BUILD_SECONDS)


@pytest.fixture(scope="session")
def nvme(deepspeed_ops: None) -> None:
    """Offload to files works here, or the test is skipped with the reason."""
    from lightning_zero.engines.deepspeed import ops

    if (why := ops.why_not(ops.ASYNC_IO)) is not None:
        pytest.skip(why)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins to compile what selected tests need, which come last; the first worker of pytest-xdist for all."""
    if session.config.option.collectonly or not any(map(_needs_ops, session.items)):
        return
    session.items.sort(key=_needs_ops)  # stable; in each worker alike
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        command = [sys.executable, "-c", BUILD_BESIDE]
        building.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        )


def pytest_sessionfinish() -> None:
    """A build that nobody waits for any more ends."""
    for process in building:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)


def _needs_ops(item: pytest.Item) -> bool:
    return "deepspeed_ops" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _needs_ops(item):
            item.add_marker(pytest.mark.timeout(2 * BUILD_SECONDS))  # the first one waits for their building
            item.add_marker(pytest.mark.rest)
        if "integration" in item.path.parts:  # what starts programs
            item.add_marker(pytest.mark.programs)
    _leave_one_case(items)


def _leave_one_case(items: list[pytest.Item]) -> None:
    """Of each function marked ``sampled`` one case stays in ``make test``, the others move to ``make test-rest``.

    The function's name says which one, so that stages and world sizes take turns from function to function, and a run
    of one file selects the same cases as a run of all.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not any(map(item.get_closest_marker, ("rest", "full"))):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in functions.items():
        stays = zlib.crc32(name.encode()) % len(cases)
        for case in cases[:stays] + cases[stays + 1 :]:
            case.add_marker(pytest.mark.rest)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """``ranks(fn, *args, world_size=n)``: one list of results, by rank; the processes live as long as the session."""
    with RankPool() as pool:
        yield pool.run


@pytest.fixture(scope="session")
def ranks1(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``ranks1(fn, *args)``: ``fn(*args)`` on one rank."""
    return partial(ranks, world_size=1)


@pytest.fixture(scope="session")
def ranks2(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``ranks2(fn, *args)``: ``fn(*args)`` on two ranks."""
    return partial(ranks, world_size=2)


@pytest.fixture(scope="session")
def ranks3(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``ranks3(fn, *args)``: ``fn(*args)`` on three ranks."""
    return partial(ranks, world_size=3)


@pytest.fixture(scope="session")
def ranks4(ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``ranks4(fn, *args)``: ``fn(*args)`` on four ranks."""
    return partial(ranks, world_size=4)
