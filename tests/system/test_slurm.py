"""A job that SLURM interrupts goes on where it was. Against a real SLURM of one's own."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import requeued
from tests.helpers.slurm import running_slurm, why_not
from tests.system.commands import ROOT

STEPS = 30


@pytest.mark.skipif(why_not() is not None, reason=f"no SLURM here: {why_not()}")
@pytest.mark.timeout(240)  # SLURM holds a requeued job back until its credentials have expired
def test_a_submitted_job_that_is_requeued_continues(tmp_path):
    with running_slurm() as slurm:
        job = requeued.run_interrupted(slurm, tmp_path, {"PYTHONPATH": str(ROOT)}, STEPS)
    assert job.state["JobState"] == "COMPLETED"
    assert job.state["Restarts"] == "1"
    assert [entry["step"] for entry in job.losses] == list(range(STEPS))  # no step twice, none left out
    assert {entry["life"] for entry in job.losses} == {0, 1}
    assert [entry["loss"] for entry in job.losses] == pytest.approx(_uninterrupted(), rel=1e-4)
    assert sorted(path.name for path in tmp_path.rglob("rank*.log")) == ["rank0.log", "rank1.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["losses.jsonl", "outputs"]


def _uninterrupted() -> list[float]:
    """The losses of two ranks, computed on one."""
    torch.manual_seed(1)  # conf/config.yaml's
    module = requeued.Numbered(STEPS)
    optimizer = module.configure_optimizers()["optimizer"]  # its schedule changes nothing so early
    losses = []
    for batches in zip(*(requeued.NumberedBatches(STEPS, rank) for rank in (0, 1)), strict=True):
        loss = torch.stack([(module.net(b) - b.roll(1, dims=1)).square().mean() for b in batches]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
