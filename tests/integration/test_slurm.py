"""A job that SLURM interrupts goes on exactly where it was. Against a real SLURM of one's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers import requeued
from tests.helpers.slurm import running_slurm, why_not
from tests.integration.commands import ROOT, SMALL, run, run_imported
from tests.integration.test_cli import MODULE

needs_slurm = pytest.mark.skipif(why_not() is not None, reason=f"no SLURM here: {why_not()}")
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def slurm():
    with running_slurm() as slurm:
        yield slurm


def uninterrupted(folder, steps):
    losses = folder / "losses.jsonl"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *requeued.command(steps, 0.0)],
        cwd=folder,
        env={**os.environ, **ENV, "LOSSES": str(losses)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {entry["step"]: entry["loss"] for entry in requeued.read_losses(losses)}


@pytest.mark.rest
@needs_slurm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by_signal", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_requeued_job_continues_exactly(by_signal, slurm, tmp_path):
    """`scontrol requeue`, and SLURM's signal before the time limit; the run folder carries a date."""
    steps = 600 if by_signal else 60
    job = requeued.run_interrupted(slurm, sys.executable, tmp_path / "job", ENV, steps, 0.2, by_signal)
    assert job.state["JobState"] == "COMPLETED", job.log
    assert job.state["Restarts"] == ("2" if by_signal else "1"), job.log
    reference = uninterrupted(tmp_path / "reference", steps)
    assert [entry["step"] for entry in job.losses] == list(range(steps)), job.log  # no step twice, none left out
    assert {entry["step"]: entry["loss"] for entry in job.losses} == reference  # exactly
    lives = [entry["life"] for entry in job.losses]
    assert lives.count(0) >= 8
    assert lives.count(1) > 0
    assert not (job.folder / ".lightning_zero").exists()
    assert ("SIGUSR1 received" in job.log) == by_signal


@pytest.mark.rest
@needs_slurm
def test_submit_writes_and_submits_a_script_that_trains(slurm, tmp_path):
    done = run(
        *MODULE,
        *("submit", "launcher=slurm", "launcher.tasks_per_node=2", "strategy=zero2", *SMALL, "callbacks=none"),
        *("launcher.time_minutes=5", "trainer.enable_progress_bar=false", "hydra.run.dir=job"),
        cwd=tmp_path,
        **ENV,
        PATH=slurm.env["PATH"],
        SLURM_CONF=slurm.env["SLURM_CONF"],
    )
    assert done.returncode == 0, done.stdout
    assert "Submitted batch job" in done.stdout
    state = requeued.wait_until_done(slurm, done.stdout.split()[-1], 120.0)
    logs = "".join(path.read_text() for path in (tmp_path / "job").rglob("*.log"))
    assert state["JobState"] == "COMPLETED", logs
    assert sorted(path.name for path in (tmp_path / "job" / "ranks").iterdir()) == ["rank0.log", "rank1.log"]
    assert "Initializing distributed: 2 ranks" in logs
    assert [p.name for p in tmp_path.iterdir()] == ["job"]


@pytest.mark.rest
def test_dry_run_only_writes(tmp_path):
    done = run_imported(
        *("submit", "--dry-run", "launcher=slurm", "launcher.nodes=4", "launcher.gpus_per_node=8"),
        *("launcher.time_minutes=240", "strategy=zero3", "data.batch_size=4", 'launcher.extra=["--constraint=h100"]'),
        *("launcher.setup=[module load cuda]", "hydra.run.dir=job"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    script = (tmp_path / "job" / "job.sbatch").read_text()
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=240",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --constraint=h100",
        "module load cuda",
        "  trainer.devices=8 \\",
        "  trainer.num_nodes=4 \\",
        "  data.batch_size=4 \\",
        "  trainer=gpu \\",
    ):
        assert line in script.splitlines()
    assert "launcher" not in script
    assert subprocess.run(["bash", "-n", str(tmp_path / "job" / "job.sbatch")], check=False).returncode == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launcher=slurm", "trainer.devices=3"), "trainer.devices=3: the job has trainer.devices=1"),
        (("launcher=slurm", "launcher.nodes=0"), "launcher.nodes=0: use a whole number, 1 or more"),
        (("launcher=slurm", "launcher.signal_seconds=7200"), "launcher.signal_seconds=7200 is no less"),
        (("launcher=local",), "use submit launcher=slurm"),
    ],
)
def test_submit_refuses_what_cannot_run(arguments, message, tmp_path):
    done = run_imported("submit", "--dry-run", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert message in done.stdout
