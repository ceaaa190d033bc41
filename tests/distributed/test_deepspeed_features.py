"""DeepSpeed's own features and config files, and averages of weights: they must not change what is learned."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_zero import OffloadConfig
from tests.distributed import test_loops as loops
from tests.helpers import zoo
from tests.helpers.ranks import outcome

pytest.importorskip("deepspeed")
FILE = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
    "zero_optimization": {"allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8, "round_robin_gradients": True},
}
HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2, "overlap_comm": True, "sub_group_size": 100}}
FEATURES: list[tuple[str, int, dict[str, Any]]] = [
    # kind, stage, settings
    ("parameter_groups", 2, {"deepspeed_config": FILE}),
    ("parameter_groups", 3, {"deepspeed_config": HPZ}),
    ("parameter_groups", 1, {"offload": "cpu"}),
    ("adam", 1, {"deepspeed_config": {"zero_optimization": {"contiguous_gradients": False}}}),
    ("backward_in_hooks", 1, {"deepspeed_config": {"zero_optimization": {"overlap_comm": True}}}),
    ("adam", 3, {"offload": OffloadConfig(target="cpu", ratio=0.5)}),
    ("losses_of_full_recomputed_blocks", 3, {}),
]


@pytest.mark.parametrize(("kind", "stage", "settings"), FEATURES)
def test_features_change_nothing(ranks2: Any, kind: str, stage: int, settings: dict[str, Any]) -> None:
    results = ranks2(zoo.train, kind, {"engine": "deepspeed", "stage": stage, **settings}, True)
    reference = ranks2(zoo.train, kind, zoo.KINDS[kind].reference, True)
    assert zoo.difference(results, reference).largest < 1e-5


def test_deepspeeds_errors_about_its_config_are_raised_on_every_rank(ranks2: Any) -> None:
    config = {"zero_optimization": {"reduce_bucket": 1}}
    for _, text in ranks2(outcome, zoo.train, "adam", {"engine": "deepspeed", "stage": 2, "deepspeed_config": config}):
        assert "reduce_bucket" in text
        assert "not permitted" in text


def _averaged(strategy: Any) -> dict[str, Tensor]:
    module = zoo.make_module("adam")
    average = WeightAveraging(avg_fn=get_ema_avg_fn(0.8))
    zoo.make_trainer(strategy, max_epochs=1, callbacks=[average], limit_val_batches=0).fit(module, loops._loader())
    return loops._weights(module)


def test_weights_are_averaged_as_under_ddp(ranks2: Any) -> None:
    reference = ranks2(_averaged, "ddp")
    for result, expected in zip(ranks2(_averaged, {"engine": "deepspeed", "stage": 3}), reference, strict=True):
        assert loops._close(result, expected)
