"""The note in which a run that its batch system starts again finds its newest checkpoint."""

from __future__ import annotations

import json
import os

import pytest

from lightning_zero.launch import restart

FULL = {"optimizer_states": [], "global_step": 3}


@pytest.fixture(autouse=True)
def _in_no_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)


def test_notes_are_kept_per_run_and_name_the_newest_that_exists(tmp_path, monkeypatch):
    restart.note(FULL, "a.ckpt")
    assert list(tmp_path.iterdir()) == []  # nobody would start this run again
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("a.ckpt", "b.ckpt"):
        (tmp_path / name).touch()
        restart.note(FULL, name)
    restart.note({"state_dict": {}}, "weights_only.ckpt")
    assert restart.find() == str(tmp_path / "b.ckpt")
    (tmp_path / "b.ckpt").unlink()
    assert restart.find() == str(tmp_path / "a.ckpt")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert restart.find() is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert len(json.loads((tmp_path / ".lightning_zero" / "slurm-7.json").read_text())) == 2
    restart.forget()
    assert not (tmp_path / ".lightning_zero").exists()


def test_each_job_of_an_array_has_its_own_note(tmp_path, monkeypatch):
    for number in ("0", "1"):
        for name, value in {"JOB_ID": f"9{number}", "ARRAY_JOB_ID": "9", "ARRAY_TASK_ID": number}.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        restart.note(FULL, f"{number}.ckpt")
    notes = sorted(path.name for path in (tmp_path / ".lightning_zero").iterdir())
    assert notes == ["slurm-9_0.json", "slurm-9_1.json"]


def test_an_interrupted_runs_checkpoint_goes_when_the_run_is_done(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NAME", "mine")
    paths = [tmp_path / "checkpoints" / name for name in ("last.ckpt", restart.PREEMPTED)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        restart.note(FULL, path)
    restart.forget()
    assert [path.exists() for path in paths] == [True, False]
    assert not (tmp_path / restart.FOLDER).exists()
