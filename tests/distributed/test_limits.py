"""A module that none of the processes may hold whole trains all the same."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import limits
from tests.helpers.ranks import RankPool, outcome

# In full: where the limit strikes some ranks alone, the others wait for them until the job's time is over.
pytestmark = [pytest.mark.full, pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")]

ROOM = int(0.9 * limits.WHOLE_BYTES)
"""Shards and their gradients take half of the whole on 4 ranks; the rest is for gathered units, and for address space
that threads reserve."""


def test_under_a_limit_that_the_whole_module_breaks():
    with RankPool() as pool:  # processes of its own: what others' memory was like does not matter

        def run(*args, world_size=4):
            return pool.run(outcome, limits.losses, *args, world_size=world_size, timeout_seconds=200)

        for strategy in ("ddp", "zero3"):
            for kind, text in run(strategy, "cpu", ROOM, 1):
                assert kind == "RuntimeError"
                assert "allocate memory" in text
        ((kind, wanted),) = run("ddp", "cpu", None, 4, world_size=1)
        assert kind == "ok"
        found = []
        for kind, text in run("zero3", "meta", ROOM, 1):
            assert kind == "ok", text
            found.append(eval(text))
        means = [sum(each) / 4 for each in zip(*found, strict=True)]
        assert means == pytest.approx(eval(wanted), rel=1e-5)
