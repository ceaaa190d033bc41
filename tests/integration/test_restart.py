"""torchrun starts a broken run again: it goes on from its newest checkpoint, also with fewer ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_zero.launch import restart
from tests.helpers import requeued
from tests.integration.commands import ROOT

STEPS = 30


def _torchrun(folder: Path, ranks: int, dies: str) -> tuple[int, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word for word in requeued.command(STEPS, 0.0) if not word.startswith(("callbacks=", "trainer.enable_ch"))]
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}",
            ),
            *("--rdzv-id=job7", f"--nproc-per-node={ranks}", "--max-restarts=1", *words, f"trainer.devices={ranks}"),
            *("~callbacks.progress", "~callbacks.step_time", "~callbacks.model_state"),
            *("+callbacks.checkpoint.every_n_train_steps=5", "+callbacks.checkpoint.save_top_k=-1"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DIES": dies, "LOSSES": "losses.jsonl"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.rest
def test_restarts_go_on_from_the_newest_checkpoint(tmp_path):
    code, output = _torchrun(tmp_path, 2, "0:12 1:17")
    assert code != 0, output
    seen = [(entry["life"], entry["step"]) for entry in requeued.read_losses(tmp_path / "losses.jsonl")]
    first = [step for life, step in seen if life == 0]
    second = [step for life, step in seen if life == 1]
    assert first[0] == 0
    assert 11 <= first[-1] <= 12, output
    assert second[0] == 10, output  # the checkpoint after ten steps
    assert 16 <= second[-1] <= 17
    (tmp_path / "losses.jsonl").unlink()

    code, output = _torchrun(tmp_path, 1, "")
    assert code == 0, output
    steps = [entry["step"] for entry in requeued.read_losses(tmp_path / "losses.jsonl")]
    assert steps == list(range(15, STEPS)), output
    assert not (tmp_path / ".lightning_zero").exists()


def test_notes_are_kept_per_run_and_name_the_newest_that_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    full = {"optimizer_states": [], "global_step": 3}
    restart.note(full, "a.ckpt")
    assert list(tmp_path.iterdir()) == []  # nobody would start this run again
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("a.ckpt", "b.ckpt"):
        (tmp_path / name).touch()
        restart.note(full, name)
    restart.note({"state_dict": {}}, "weights_only.ckpt")
    assert restart.find() == str(tmp_path / "b.ckpt")
    (tmp_path / "b.ckpt").unlink()
    assert restart.find() == str(tmp_path / "a.ckpt")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert restart.find() is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert len(json.loads((tmp_path / ".lightning_zero" / "slurm-7.json").read_text())["checkpoints"]) == 2
    restart.forget()
    assert not (tmp_path / ".lightning_zero").exists()
