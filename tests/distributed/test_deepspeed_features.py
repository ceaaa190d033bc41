"""DeepSpeed's own features, each trained against DDP: what a setting says must not change what is learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader

from lightning_zero import DeepSpeedConfig
from tests.helpers import zoo

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.sampled
SLOW = 180.0
"""Seconds; a run takes about two on a quiet machine."""
FEATURES: list[tuple[int, dict[str, Any]]] = [
    (1, {"round_robin_gradients": True}),
    (2, {"round_robin_gradients": True}),
    (3, {"sub_group_numel": 100}),
    (3, {"hpz_partition_size": 1}),
    (3, {"hpz_partition_size": 2}),
    (3, {"overlap_comm": True}),
    (3, {"communication_dtype": "fp32"}),
    (1, {"communication_dtype": "bf16"}),
]


def _named(stage: int, settings: dict[str, Any]) -> str:
    return f"zero{stage}-{'-'.join(f'{key}={value}' for key, value in settings.items())}"


@pytest.mark.parametrize(("stage", "settings"), FEATURES, ids=[_named(*case) for case in FEATURES])
def test_a_feature_changes_nothing(stage: int, settings: dict[str, Any], ranks2: Any) -> None:
    strategy = {"engine": "deepspeed", "stage": stage, "deepspeed": DeepSpeedConfig(**settings)}
    reference = ranks2(zoo.train, "parameter_groups", zoo.KINDS["parameter_groups"].reference)
    results = ranks2(zoo.train, "parameter_groups", strategy, timeout_seconds=SLOW)
    tolerance = 2**-7 if settings.get("communication_dtype") == "bf16" else 1e-5
    assert zoo.difference(results, reference).largest < tolerance


def _averaged(strategy: Any, which: str) -> dict[str, torch.Tensor]:
    module = zoo.make_module("adam")
    averages: Any = (
        StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
        if which == "swa"
        else WeightAveraging(avg_fn=get_ema_avg_fn(0.8))
    )
    trainer = zoo.make_trainer(strategy, max_epochs=4, callbacks=[averages], limit_val_batches=0)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    return {name: p.detach().clone() for name, p in module.state_dict().items()}


@pytest.mark.parametrize(("stage", "which"), [(2, "swa"), (3, "swa"), (1, "ema"), (3, "ema")])
def test_weights_are_averaged_as_under_ddp(stage: int, which: str, ranks2: Any) -> None:
    reference = ranks2(_averaged, "ddp", which)
    results = ranks2(_averaged, {"engine": "deepspeed", "stage": stage}, which, timeout_seconds=SLOW)
    for result, expected in zip(results, reference, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-6)
