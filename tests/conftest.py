"""Shared fixtures: the ranks, and the guard that a test leaves the process as it found it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.helpers.ranks import RankPool

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _environment_is_left_as_found() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


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
