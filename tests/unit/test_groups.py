"""``shard_size="auto"``: the ranks of one host if the run fits there, and the plan of a run in groups."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from lightning_zero import ZeroConfig, plan
from lightning_zero.planner import GIB, Plan
from tests.helpers import account


@cache
def _plan(shard_size: Any, device_memory_gib: float | None = None, **more: Any) -> Plan:
    settings: dict[str, Any] = {"world_size": 8, "ranks_per_host": 2, "headroom": 0.0, **more}
    config = ZeroConfig(stage=3, min_unit_numel=1, shard_size=shard_size)
    batch = torch.zeros(4, 65, dtype=torch.long)
    return plan(account.Mlp(), batch, device_memory_gib=device_memory_gib, config=config, **settings)


def _peak(shard_size: int | None) -> float:
    return _plan(shard_size).row("zero3").peak / GIB


@pytest.mark.parametrize(("above", "size", "said"), [(1, 2, "takes 2, the ranks of one host"), (-1, None, "all ranks")])
def test_groups_are_those_of_hosts_where_they_fit(above, size, said):
    gib = _peak(2) + above * 1e-3
    made = _plan("auto", gib)
    assert made.shard_size == size
    assert said in made.notes[-1]
    assert made.rows == _plan(size, gib).rows


def test_without_several_equal_hosts_all_ranks_share():
    made = _plan("auto", 10.0, ranks_per_host=3)
    assert made.shard_size is None
    assert "several hosts" in made.notes[-1]


@pytest.mark.parametrize(("setting", "recomputes"), [(["Linear"], True), ("none", False)])
def test_recomputed_peaks_count_only_where_something_recomputes(setting, recomputes):
    config = ZeroConfig(stage=3, min_unit_numel=1, activation_checkpointing=setting)
    batch = torch.zeros(4, 65, dtype=torch.long)
    made = plan(account.Mlp(), batch, world_size=2, device_memory_gib=10.0, config=config)
    assert made.checkpointing == recomputes
    assert "Set activation_checkpointing" not in made.reason
