"""A module that none of the processes may hold whole trains all the same."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import limits
from tests.helpers.ranks import RankPool, outcome

pytestmark = [pytest.mark.rest, pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")]

ROOM = int(0.9 * limits.WHOLE_BYTES)
"""A quarter of the module's bytes are a rank's shards, an eighth the layers that are whole at a time. The rest is for
address space that threads reserve, so that the limit strikes either no rank or all of them."""


def test_under_a_limit_that_the_whole_module_breaks(tmp_path):
    with RankPool() as pool:  # processes of its own: what others' memory was like does not matter
        for strategy in ("ddp", {"stage": 3, "build": "whole"}):
            # each rank fails by itself, in configure_model, before it would wait for another
            args = (limits.losses, strategy, "cpu", ROOM, 1)
            for kind, text in pool.run(outcome, *args, world_size=4, timeout_seconds=60):
                assert kind == "RuntimeError"
                assert "allocate memory" in text
        (wanted,) = pool.run(limits.losses, "ddp", "cpu", None, 4, world_size=1, timeout_seconds=60)
        path = str(tmp_path / "saved.ckpt")
        for kind, text in pool.run(outcome, limits.losses, "zero3", "cpu", ROOM, 1, path, world_size=4):
            assert kind == "CheckpointError"
            assert "use checkpoint='sharded'" in text
        for device, saved in (("cpu", None), ("meta", path)):
            # without `outcome`: a rank that fails alone ends the others at once
            args = (limits.losses, {"stage": 3, "checkpoint": "sharded"}, device, ROOM, 1, saved)
            found = pool.run(*args, world_size=4, timeout_seconds=90)
            means = [sum(each) / 4 for each in zip(*found, strict=True)]
            assert means == pytest.approx(wanted, rel=1e-5)
