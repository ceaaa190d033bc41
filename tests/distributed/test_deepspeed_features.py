"""DeepSpeed's own features, and averages of weights: they must not change what is learned."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_zero import OffloadConfig
from tests.distributed import test_loops as loops
from tests.helpers import zoo

pytest.importorskip("deepspeed")
FEATURES: list[tuple[int, dict[str, Any]]] = [
    (2, {"round_robin_gradients": True}),
    (3, {"zero_hpz_partition_size": 2, "overlap_comm": True, "sub_group_size": 100}),
]


def test_features_change_nothing(ranks2: Any) -> None:
    reference = ranks2(zoo.train, "parameter_groups", zoo.KINDS["parameter_groups"].reference)
    for stage, settings in FEATURES:
        strategy = {"engine": "deepspeed", "stage": stage, "deepspeed_config": {"zero_optimization": settings}}
        results = ranks2(zoo.train, "parameter_groups", strategy)
        assert zoo.difference(results, reference).largest < 1e-5, settings


@pytest.mark.parametrize(
    ("kind", "stage", "offload"),
    [("parameter_groups", 1, "cpu"), ("adam", 3, OffloadConfig(target="cpu", ratio=0.5))],
)
def test_offload_to_host_memory_equals_ddp(ranks2: Any, kind: str, stage: int, offload: Any) -> None:
    """By PyTorch's fused Adam, which rounds the last digit differently."""
    results = ranks2(zoo.train, kind, {"engine": "deepspeed", "stage": stage, "offload": offload}, True)
    reference = ranks2(zoo.train, kind, zoo.KINDS[kind].reference, True)
    assert zoo.difference(results, reference).largest < 1e-5


def _averaged(strategy: Any) -> dict[str, Tensor]:
    module = zoo.make_module("adam")
    average = WeightAveraging(avg_fn=get_ema_avg_fn(0.8))
    zoo.make_trainer(strategy, max_epochs=1, callbacks=[average], limit_val_batches=0).fit(module, loops._loader())
    return loops._weights(module)


def test_weights_are_averaged_as_under_ddp(ranks2: Any) -> None:
    reference = ranks2(_averaged, "ddp")
    for result, expected in zip(ranks2(_averaged, {"engine": "deepspeed", "stage": 3}), reference, strict=True):
        assert loops._close(result, expected)
