"""``offload="cpu"`` on a CPU-only machine: the same names run, and give the same losses, weights and metrics.

Exactly the same where the same kernels run; an Adam whose user chose no kernel is fused
(``optimizer_step.fusible_groups``), so it may round differently. What a failure localises: one kind under every stage
to what the kind names; everything to ``fully_shard``'s policy. Where things lie on an accelerator is
``tests/unit/test_host_shards.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig
from tests.helpers import zoo
from tests.helpers.ranks import outcome

FUSED_TOLERANCE = 5e-6
"""Single precision's last digits over some twenty steps of Adam with eps=1e-4, relative to each tensor's largest."""


@pytest.mark.parametrize(
    ("kind", "stage", "tolerance"),
    [
        ("accumulation_and_clip", 2, FUSED_TOLERANCE),
        ("third_party_lamb", 1, 0.0),  # steps on whole tensors
        ("adam", 3, FUSED_TOLERANCE),
    ],
)
def test_trains_as_without(ranks2, kind, stage, tolerance):
    settings = {"stage": stage, **zoo.BLOCKS}
    reference = ranks2(zoo.train, kind, settings, True)
    result = ranks2(zoo.train, kind, {**settings, "offload": "cpu"}, True)
    difference = zoo.difference(result, reference)
    assert difference.largest <= tolerance, difference


def _fit(strategy: Any, precision: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = zoo.make_module("sgd_momentum")
    trainer = zoo.make_trainer(strategy, precision=precision, gradient_clip_val=0.1, **options)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    return module.losses, {name: value.double() for name, value in module.state_dict().items()}


def test_mixed_precision_as_without(ranks2):
    settings = {"stage": 3, **zoo.BLOCKS}
    for result, reference in zip(
        ranks2(_fit, {**settings, "offload": "cpu"}, "bf16-mixed"), ranks2(_fit, settings, "bf16-mixed"), strict=True
    ):
        assert result[0] == reference[0]
        assert all(torch.equal(result[1][name], reference[1][name]) for name in reference[1])


def _half(path: str, settings: dict[str, Any]) -> None:
    trainer = zoo.make_trainer(settings, max_epochs=1)
    trainer.fit(zoo.make_module("parameter_groups"), DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    trainer.save_checkpoint(path)


def _second_half(path: str, settings: dict[str, Any]) -> list[float]:
    module = zoo.make_module("parameter_groups")
    loader = DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH)
    zoo.make_trainer(settings).fit(module, loader, ckpt_path=path)
    return module.losses


def test_checkpoints_cross_over(ranks2, tmp_path):
    """Saved with offload and resumed without, and the other way; optimizer states land where the shards lie."""
    plain = {"stage": 2, **zoo.BLOCKS}
    host = {**plain, "stage": 3, "offload": "cpu", "checkpoint": "sharded"}
    for saved, name in ((host, "host.ckpt"), (plain, "plain.ckpt")):
        path = str(tmp_path / name)
        ranks2(_half, path, saved)
        for expected, losses in zip(ranks2(_second_half, path, plain), ranks2(_second_half, path, host), strict=True):
            assert len(losses) == len(expected) > 0
            assert losses == pytest.approx(expected, rel=FUSED_TOLERANCE)


def test_pinned_memory_needs_an_accelerator(ranks1):
    settings = {"stage": 3, "offload": OffloadConfig(target="cpu", pin_memory=True)}
    name, text = ranks1(outcome, zoo.train, "sgd_momentum", settings)[0]
    assert name == "ValueError"
    assert "offload.pin_memory=True on accelerator='cpu'" in text
