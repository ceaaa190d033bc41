"""The plan against ``torch.cuda.max_memory_allocated``.

Skipped where there is no GPU, so nothing here has run yet on the machines this was written on. One rank per GPU that is
there, at most four.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zero.callbacks import ZeroMonitor
from tests.helpers import account, zoo

NUM_RANKS = min(torch.cuda.device_count(), 4) or 1
SLACK_BYTES = 48 * 2**20
"""cuBLAS keeps workspaces (32 MiB on Hopper), and the allocator rounds each block up to 512 bytes."""


def _observe(name: str, stage: int, precision: str) -> tuple[float, dict[str, float], Any, tuple[str, ...]]:
    make, dataset = account.SIZEABLE[name]
    monitor = ZeroMonitor(every_n_steps=1)
    torch.manual_seed(0)
    trainer = zoo.make_trainer(
        account.settings_of(stage),
        accelerator="cuda",
        precision=precision,
        max_epochs=1,
        limit_train_batches=6,
        limit_val_batches=0,
        callbacks=[monitor],
    )
    trainer.fit(make(), DataLoader(dataset(), batch_size=64))
    assert monitor.plan is not None
    row = monitor.plan.row(f"zero{stage}" if stage else "ddp")
    measured = monitor.rows[trainer.global_rank]
    return measured["memory peak bytes"], measured, row, tuple(monitor.plan.notes)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", list(account.SIZEABLE))
def test_plan_against_the_allocator(ranks, name, precision, stage):
    for peak, measured, row, notes in ranks(_observe, name, stage, precision, world_size=NUM_RANKS):
        assert not notes
        for kind in ("parameters", "gradients", "optimizer"):
            assert getattr(row, kind) == pytest.approx(measured[f"{kind} bytes"], rel=0.01, abs=8)
        assert row.peak == pytest.approx(peak, rel=0.1, abs=SLACK_BYTES)
