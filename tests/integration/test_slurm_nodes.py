"""What SLURM does to jobs beside requeueing them: a node fails, a user cancels, an array has several at once.

Two nodes, each a ``slurmd`` on this machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.slurm import Slurm, running_slurm, why_not
from tests.integration.commands import ROOT

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_not() is not None, reason=f"no SLURM here: {why_not()}"),
]

PROGRAM = """
import os, time, torch
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from lightning_zero import ZeroStrategy

name = os.environ.get("SLURM_ARRAY_TASK_ID", "")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 16)

    def training_step(self, batch, index):
        time.sleep(float(os.environ["STEP_SECONDS"]))
        if self.global_rank == 0 and index % self.trainer.accumulate_grad_batches == 0:
            life = os.environ.get("SLURM_RESTART_COUNT", "0")
            with open(f"steps{name}", "a") as file:
                print(life, self.global_step, self.trainer.world_size, self.trainer.accumulate_grad_batches, file=file)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


L.Trainer(
    accelerator="cpu", devices=1, num_nodes=int(os.environ["SLURM_NNODES"]), max_steps=int(os.environ["STEPS"]),
    strategy=ZeroStrategy(stage=3, min_unit_numel=1, keep_global_batch=True), logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint(f"checkpoints{name}", every_n_train_steps=5, save_top_k=-1)],
).fit(Net(), DataLoader(torch.randn(400, 16), batch_size=4, shuffle=True))
"""


@pytest.fixture
def slurm():
    with running_slurm(num_nodes=2) as slurm:
        yield slurm


def _submitted(slurm: Slurm, folder: Path, options: str, steps: int = 40, step_seconds: float = 0.1) -> str:
    (folder / "train.py").write_text(PROGRAM)
    (folder / "job.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH --ntasks-per-node=1 --time=5 --requeue --open-mode=append --output=%x-%a.log {options}\n"
        f"srun --ntasks=$SLURM_NNODES --kill-on-bad-exit=1 {sys.executable} train.py\n"
    )
    env = {**slurm.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"STEPS": str(steps), "STEP_SECONDS": str(step_seconds)}
    return replace(slurm, env=env).run("sbatch", "--parsable", "--job-name=job", "job.sbatch", cwd=folder).strip()


def _until(condition: Callable[[], bool], folder: Path, limit_seconds: float = 90.0) -> None:
    deadline = time.monotonic() + limit_seconds
    while not condition():
        logs = "".join(path.read_text(errors="replace") for path in folder.glob("*.log"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.1)


def _steps(path: Path) -> list[list[int]]:
    """Life, step, ranks and micro-batches per step, of each step that rank 0 has begun."""
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()]


@pytest.mark.rest
def test_a_job_whose_node_fails_goes_on_with_the_nodes_that_are_left(slurm, tmp_path):
    job = _submitted(slurm, tmp_path, "--nodes=2")
    _until(lambda: bool(list(tmp_path.glob("checkpoints/*step=5.ckpt"))), tmp_path)
    slurm.fail("n1")
    slurm.wait_for(job, ("PENDING",))  # requeued, for two nodes
    slurm.run("scontrol", "update", f"jobid={job}", "numnodes=1", "numtasks=1", "numcpus=1")
    state = slurm.wait_for(job, ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), 120)
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.glob("*.log"))
    assert (state["JobState"], state["Restarts"], state["NumNodes"]) == ("COMPLETED", "1", "1"), logs
    steps = _steps(tmp_path / "steps")
    before, after = [each for each in steps if each[0] == 0], [each for each in steps if each[0] == 1]
    assert before == [[0, step, 2, 1] for step in range(len(before))]
    begun = after[0][1]
    assert begun % 5 == 0
    assert 5 <= begun <= len(before)  # the newest checkpoint
    assert after == [[1, step, 1, 2] for step in range(begun, 40)]  # twice the micro-batches per step
    assert not (tmp_path / ".lightning_zero").exists()


@pytest.mark.rest
def test_a_cancelled_job_stores_its_last_step_and_is_not_started_again(slurm, tmp_path):
    job = _submitted(slurm, tmp_path, "--nodes=2", steps=10_000, step_seconds=0.2)
    _until(lambda: (tmp_path / "steps").exists() and len(_steps(tmp_path / "steps")) > 3, tmp_path)
    slurm.run("scancel", job)
    state = slurm.wait_for(job, ("CANCELLED", "COMPLETED", "FAILED"))
    assert state["JobState"] == "CANCELLED"
    assert state["Restarts"] == "0"
    stored = tmp_path / "checkpoints" / "preempted.ckpt"
    _until(stored.exists, tmp_path, 30.0)
    steps = _steps(tmp_path / "steps")
    assert torch.load(stored, weights_only=True)["global_step"] == len(steps)  # after the step that was under way
    assert "could not be requeued" not in (log := "".join(path.read_text() for path in tmp_path.glob("*.log")))
    assert "SIGTERM received" in log


def test_each_job_of_an_array_finds_its_own_checkpoint(slurm, tmp_path):
    job = _submitted(slurm, tmp_path, "--nodes=1 --array=0-1", steps=30)
    _until(lambda: all(list(tmp_path.glob(f"checkpoints{i}/*step=5.ckpt")) for i in range(2)), tmp_path)
    notes = sorted(path.name for path in (tmp_path / ".lightning_zero").iterdir())
    assert notes == [f"slurm-{job}_{i}.json" for i in range(2)]
    slurm.run("scontrol", "requeue", f"{job}_1")
    for i in range(2):
        slurm.wait_for(f"{job}_{i}", ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), 120)
    first, second = (_steps(tmp_path / f"steps{i}") for i in range(2))
    assert [step for _, step, _, _ in first] == list(range(30))
    assert [step for _, step, _, _ in second] == list(range(30))  # no step twice, none left out
    assert {life for life, _, _, _ in first} == {0}
    assert {life for life, _, _, _ in second} == {0, 1}
    assert not (tmp_path / ".lightning_zero").exists()
