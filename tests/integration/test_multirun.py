"""Sweeps of jobs with several ranks each: one folder, one config, one log per rank, a table of them all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.commands import ROOT, SMALL, run
from tests.integration.test_cli import MODULE

FOUR = "strategy=ddp,zero1,zero2,zero3"


@pytest.mark.rest
@pytest.mark.parametrize("strategies", ["strategy=ddp,zero3", pytest.param(FOUR, marks=pytest.mark.full)])
def test_a_sweep_of_two_ranks_each_runs_every_job_once(strategies, tmp_path):
    done = run(
        *MODULE,
        *("fit", "-m", strategies, "trainer.devices=2", *SMALL, "callbacks.progress=null"),
        *("trainer.enable_progress_bar=false", "hydra.sweep.dir=sweep"),
        cwd=tmp_path,
        timeout_seconds=300,
    )
    assert done.returncode == 0, done.stdout
    names = strategies.removeprefix("strategy=").split(",")
    _assert_jobs(tmp_path / "sweep", len(names))
    assert [p.name for p in tmp_path.iterdir()] == ["sweep"]
    table = done.stdout.split("\njob ")[-1].splitlines()[2:]
    assert [re.split(r"\s{2,}", line)[1:3] for line in table] == [[f"strategy={name}", "2"] for name in names]
    losses = [json.loads((tmp_path / f"sweep/{i}/result.json").read_text())["metrics"]["loss"] for i in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # the order of fp32 sums differs


@pytest.mark.rest
@pytest.mark.parametrize("launcher", ["joblib", pytest.param("submitit_local", marks=pytest.mark.full)])
def test_jobs_in_workers_of_another_launcher(launcher, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher", reason="not installed")
    workers = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    done = run(
        *MODULE,
        *("fit", "-m", f"hydra/launcher={launcher}", *workers, "strategy=ddp,zero2", "trainer.devices=2", *SMALL),
        *("callbacks.progress=null", "trainer.enable_progress_bar=false", "hydra.sweep.dir=sweep"),
        cwd=tmp_path,
        timeout_seconds=280,
    )
    assert done.returncode == 0, done.stdout
    for job in range(2):
        folder = tmp_path / "sweep" / str(job)
        assert sorted(p.name for p in (folder / "ranks").iterdir()) == ["rank0.log", "rank1.log"]
    losses = [json.loads((tmp_path / f"sweep/{i}/result.json").read_text())["metrics"]["loss"] for i in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # the order of fp32 sums differs


@pytest.mark.full
def test_a_sweep_of_ones_own_app(tmp_path):
    app = ROOT / "examples" / "hydra_app" / "app.py"
    done = run(
        str(app),
        *("-m", "strategy=ddp,zero2", "trainer.devices=2", f"hydra.sweep.dir={tmp_path}/sweep"),
        cwd=tmp_path,
        timeout_seconds=200,
    )
    assert done.returncode == 0, done.stdout
    _assert_jobs(tmp_path / "sweep", 2)
    assert "strategy=zero2" in done.stdout.split("\njob ")[-1]


def _assert_jobs(sweep: Path, count: int) -> None:
    jobs = sorted(path.name for path in sweep.iterdir() if path.is_dir())
    assert jobs == [str(i) for i in range(count)]
    for job in jobs:
        assert sorted(p.name for p in (sweep / job / "ranks").iterdir()) == ["rank0.log", "rank1.log"]
        assert len(list((sweep / job).rglob(".hydra"))) == 1


@pytest.mark.rest
def test_a_failing_job_does_not_stop_the_others_and_fails_the_sweep(tmp_path):
    done = run(
        *MODULE,
        *("fit", "-m", "model.num_heads=3,2", "trainer.devices=2", *SMALL, "callbacks=none", "hydra.sweep.dir=sweep"),
        "trainer.enable_progress_bar=false",
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "did not finish" in done.stdout
    assert (tmp_path / "sweep" / "1" / "result.json").is_file()


ENUM_APP = """
import enum, os, subprocess, sys, tempfile, threading
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore

import lightning_zero

class Mode(enum.Enum):
    A = 1
    B = 2

@dataclass
class Config:
    mode: Mode = Mode.A
    when: str = "${now:%f}"
    name: str = "${mode}-${hydra:job.num}"

ConfigStore.instance().store(name="config", node=Config)

@hydra.main(version_base="1.3", config_name="config")
def main(cfg):
    from hydra.core.hydra_config import HydraConfig
    from lightning_zero.launch.hydra_job import job_command

    said = f"{cfg.mode!r} {cfg.when} {cfg.name} {HydraConfig.get().runtime.output_dir}"
    if "CHILD" in os.environ:
        print(said)
        return
    def check(exact):
        with tempfile.TemporaryDirectory() as folder:
            command = job_command([sys.executable, __file__], Path(folder))
            other = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CHILD": "1"})
            if exact:
                assert other.stdout.strip() == said, (other, said)
            else:
                assert "hydra.mode=RUN" in command and other.returncode == 0, (command, other)
                assert other.stdout.split()[0] == said.split()[0], (other, said)  # the same member
    check(True)
    if cfg.mode is Mode.A:
        return print("same config", cfg.name)
    thread = threading.Thread(target=check, args=(False,))  # out of sight of Hydra's frames
    thread.start()
    thread.join()
    print("same config", cfg.name)

main()
"""


@pytest.mark.rest
def test_another_process_gets_the_jobs_own_answers(tmp_path):
    """Clocks, the number within the sweep, enum members: what a second look at the command line would get wrong."""
    (tmp_path / "app.py").write_text(ENUM_APP)
    done = run(
        "app.py", "-m", "mode=B,A", "hydra.sweep.dir=sweep", cwd=tmp_path, timeout_seconds=250, PYTHONPATH=str(ROOT)
    )
    assert done.returncode == 0, done.stdout
    assert "same config B-0" in done.stdout.replace("Mode.", "")
    assert "same config A-1" in done.stdout.replace("Mode.", "")
