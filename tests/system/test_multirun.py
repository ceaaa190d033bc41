"""Sweeps of jobs with several ranks each. test_readme.py types one that runs its jobs in its own process."""

from __future__ import annotations

import sys

from tests.system.commands import ROOT, SMALL, run


def test_a_failing_job_does_not_stop_the_others_and_fails_the_sweep(tmp_path):
    words = "model.num_heads=3,2", "trainer.devices=2", *SMALL, "callbacks=none", "hydra.sweep.dir=sweep"
    done = run("fit", "-m", *words, "trainer.enable_progress_bar=false", fork="all", cwd=tmp_path)
    assert done.returncode != 0
    assert "run folder: " in done.stdout.partition("model.num_heads=2")[2]


ENUM_APP = """
import enum, os, subprocess, sys
from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore

import lightning_zero

class Mode(enum.Enum):
    A = 1
    B = 2

@dataclass
class Config:
    mode: Mode = Mode.A
    name: str = "${mode}-${hydra:job.num}"

ConfigStore.instance().store(name="config", node=Config)

@hydra.main(version_base="1.3", config_name="config")
def main(cfg):
    from hydra.core.hydra_config import HydraConfig
    from lightning_zero.launch.hydra_job import job_command

    said = f"{cfg.mode!r} {cfg.name} {HydraConfig.get().runtime.output_dir}"
    if "CHILD" in os.environ:
        print(said)
        return
    command = job_command([sys.executable, __file__])
    other = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CHILD": "1"})
    assert other.stdout.strip() == said, (other, said)
    print("same config", cfg.name)

main()
"""


def test_another_process_gets_the_jobs_own_answers(tmp_path):
    """The number within the sweep, its folder, enum members: what a second look at the command line would get wrong."""
    (tmp_path / "app.py").write_text(ENUM_APP)
    done = run(sys.executable, "app.py", "-m", "mode=B,A", "hydra.sweep.dir=sweep", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0
    assert "same config B-0" in done.stdout.replace("Mode.", "")
    assert "same config A-1" in done.stdout.replace("Mode.", "")
