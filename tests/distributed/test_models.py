"""A sample of the second table of docs/parity.md; ``make models`` trains all of it."""

from __future__ import annotations

import pytest

from tests.helpers import models

pytestmark = pytest.mark.rest

SAMPLE = (
    *("transformers/llama", "transformers/bert", "transformers/t5", "peft/LoRA", "timm/test_vit"),
    *("diffusers/UNet2DModel", "lightly/BYOL", "torch-geometric/GCN", "monai/UNet", "segmentation-models-pytorch/Unet"),
    *("pytorch_optimizer/soap", "pytorch_optimizer/SAM with a closure", "torch-optimizer/Lookahead", "timm/Lookahead"),
    *("bitsandbytes/AdamW8bit", "schedulefree/AdamWScheduleFree", "galore-torch/GaLoreAdamW"),
    *("timm/create_optimizer_v2 lamb", "pytorch_optimizer/adagc", "pytorch_optimizer/adashift"),
)


@pytest.mark.parametrize("key", SAMPLE)
def test_public_models_and_optimizers_equal_ddp(ranks, key):
    row = models.ROWS[key]
    if not models.version_of(row.package):
        pytest.skip(f"{row.package} is not installed: make models")
    found = ranks(models.compare, key, (1, 3), world_size=2, timeout_seconds=120)
    assert max(max(each) for each in found) <= row.tolerance


def test_there_are_enough_rows():
    assert len(models.ROWS) >= 150
    assert len({row.package for row in models.ROWS.values()}) >= 10
