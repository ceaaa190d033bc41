"""The engine ``deepspeed`` on CUDA with NCCL: DDP's losses, with offload and its defaults for an accelerator too.

Skipped where there is no GPU, so nothing here has run yet on the machines this was written on.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_cuda import _fit
from tests.helpers import zoo

pytest.importorskip("deepspeed")
NUM_RANKS = min(torch.cuda.device_count(), 4) or 1


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("kind", ["adam", "accumulation_and_clip"])
def test_trains_as_ddp(ranks, kind, precision, offload, stage):
    reference = ranks(_fit, kind, zoo.KINDS[kind].reference, precision, world_size=NUM_RANKS)
    strategy = {"engine": "deepspeed", "stage": stage, "offload": offload}
    results = ranks(_fit, kind, strategy, precision, world_size=NUM_RANKS, timeout_seconds=600)
    rel = 1e-4 if precision == "32-true" else 5e-2
    for (losses, _), (expected, _) in zip(results, reference, strict=True):
        assert losses == pytest.approx(expected, rel=rel, abs=1e-4)
