"""A job that SLURM interrupts goes on where it was. Against a real SLURM of one's own."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import requeued
from tests.helpers.slurm import running_slurm, why_not
from tests.system.commands import ROOT, run

STEPS = 30


@pytest.mark.skipif(why_not() is not None, reason=f"no SLURM here: {why_not()}")
@pytest.mark.timeout(240)  # SLURM holds a requeued job back until its credentials have expired
def test_a_submitted_job_that_is_requeued_continues(tmp_path):
    _, _, _, strategy, _, *words = requeued.command(STEPS, 0.2)  # the launcher sets the number of devices
    losses = tmp_path / "losses.jsonl"
    with running_slurm() as slurm:
        done = run(
            *("submit", "launcher=slurm", "launcher.tasks_per_node=2", "launcher.time_minutes=5"),
            *(strategy, *words, "hydra.run.dir=job"),
            fork="all",
            cwd=tmp_path,
            PYTHONPATH=str(ROOT),
            LOSSES=str(losses),
            **{name: slurm.env[name] for name in ("PATH", "SLURM_CONF")},
        )
        assert done.returncode == 0
        job = done.stdout.split("Submitted batch job ")[1].split()[0]
        try:
            requeued.wait_for_step(slurm, job, losses, 0, 8, 100.0)
            slurm.run("scontrol", "requeue", job)
            state = requeued.wait_until_done(slurm, job, 100.0)
        finally:
            for log in tmp_path.rglob("*.log"):
                print(f"--- {log.relative_to(tmp_path)}\n{log.read_text(errors='replace')}")
    assert state["JobState"] == "COMPLETED"
    assert state["Restarts"] == "1"
    seen = requeued.read_losses(losses)
    assert [entry["step"] for entry in seen] == list(range(STEPS))  # no step twice, none left out
    assert {entry["life"] for entry in seen} == {0, 1}
    assert [entry["loss"] for entry in seen] == pytest.approx(_uninterrupted(), rel=1e-4)
    assert sorted(path.name for path in (tmp_path / "job" / "ranks").iterdir()) == ["rank0.log", "rank1.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "losses.jsonl"]


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
