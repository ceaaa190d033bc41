"""torchrun starts a broken run again: it goes on from its newest checkpoint, also with fewer ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
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


ELASTIC = """
import os
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))

    def training_step(self, batch, index):
        time.sleep(0.05)
        if self.global_rank == 0 and index % self.trainer.accumulate_grad_batches == 0:
            with open("steps", "a") as file:
                print(self.global_step, self.trainer.world_size, self.trainer.accumulate_grad_batches, file=file)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


L.Trainer(
    accelerator="cpu", devices=1, num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy=ZeroStrategy(stage=3, keep_global_batch=True), max_steps=40, logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=5, save_top_k=-1)],
).fit(Net(), DataLoader(torch.randn(800, 16), batch_size=4, shuffle=True))
"""


def _node(folder: Path, port: int, number: int, nnodes: str) -> subprocess.Popen[bytes]:
    # On a busy machine agents start seconds apart, and the first ones of "2:4" are not to begin without the others.
    conf = f"last_call_timeout=12,keep_alive_interval=1,keep_alive_max_attempt=5,is_host={number == 0}".lower()
    words = [f"--nnodes={nnodes}", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    words += ["--rdzv-id=job9", "--max-restarts=3", f"--rdzv-conf={conf}", "train.py"]
    with open(folder / f"node-{number}.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=folder, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def _kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """As a node ends whose power fails: its agent gets to do nothing any more."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("node-*.log")))


def _wait_for(done: Callable[[], object], seconds: float, folder: Path) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, _logs(folder)
        time.sleep(0.1)


@pytest.mark.rest
@pytest.mark.timeout(420)  # two waits, each with what a node says when it is over
@pytest.mark.parametrize(("nnodes", "left"), [("1:2", 1), ("2:4", 2)])
def test_nodes_that_are_lost_leave_the_run_to_the_others(nnodes, left, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "train.py").write_text(ELASTIC)
    nodes = [_node(tmp_path, port, number, nnodes) for number in range(2 * left)]
    try:
        # Nodes that are lost before their ranks have met would be waited for until the store's half hour is over.
        _wait_for(lambda: list(tmp_path.glob("checkpoints/*step=5.ckpt")), 180, tmp_path)
        for node in nodes[left:]:
            _kill_with_children(node)
        _wait_for(lambda: all(node.poll() is not None for node in nodes[:left]), 180, tmp_path)
        assert [node.returncode for node in nodes[:left]] == [0] * left, _logs(tmp_path)
    finally:
        for node in nodes:
            if node.poll() is None:
                _kill_with_children(node)
    lives = [[int(word) for word in line.split()] for line in (tmp_path / "steps").read_text().splitlines()]
    before, after = [life for life in lives if life[1] == 2 * left], [life for life in lives if life[1] == left]
    assert before == [[step, 2 * left, 1] for step in range(len(before))]
    begun = after[0][0]
    assert begun % 5 == 0
    assert 5 <= begun <= len(before)  # the newest checkpoint
    assert after == [[step, left, 2] for step in range(begun, 40)]  # twice the micro-batches per step


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
