"""A module that none of the processes may hold whole trains all the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.helpers import limits
from tests.helpers.ranks import RankPool, outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")

ROOM = int(0.9 * limits.WHOLE_BYTES)
"""A quarter of the module's bytes are a rank's shards, an eighth the layers that are whole at a time. The rest is for
address space that threads reserve, so that the limit strikes either no rank or all of them."""


@pytest.fixture
def fresh4() -> Iterator[Any]:
    """Four ranks in processes of their own: what others' memory was like does not matter."""
    with RankPool() as pool:
        yield partial(pool.run, world_size=4)


def test_ddp_cannot_hold_it(fresh4):
    # under ddp each rank fails by itself, in configure_model, before it would wait for another
    for kind, text in fresh4(outcome, limits.losses, "ddp", "cpu", ROOM, 1):
        assert kind == "RuntimeError"
        assert "allocate memory" in text


def test_it_trains_and_saves_under_the_limit(fresh4, ranks1, tmp_path):
    (wanted,) = ranks1(limits.losses, "ddp", "cpu", None, 4)
    # without `outcome`: a rank that fails alone ends the others at once
    strategy = {"stage": 3, "checkpoint": "sharded", "after_fit": "sharded"}
    found = fresh4(limits.losses, strategy, "meta", ROOM, 1, str(tmp_path / "x.ckpt"))
    means = [sum(each) / 4 for each in zip(*found, strict=True)]
    assert means == pytest.approx(wanted, rel=1e-5)
