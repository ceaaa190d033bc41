"""torchrun starts a broken run again: it goes on from its newest checkpoint, also with fewer ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.system.commands import ROOT, Program, started

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
        if self.global_rank == 0:
            with open("steps", "a") as file:
                print(self.global_step, self.trainer.world_size, len(batch), file=file)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


if os.environ["GROUP_WORLD_SIZE"] == "1" and not os.path.exists("checkpoints"):
    time.sleep(100)  # until the other node has come, and this process is started again
nodes = int(os.environ["GROUP_WORLD_SIZE"])
L.Trainer(
    accelerator="cpu", devices=1, num_nodes=nodes, strategy=ZeroStrategy(stage=3), max_steps=40, logger=False,
    enable_progress_bar=False, callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=5, save_top_k=-1)],
).fit(Net(), DataLoader(torch.randn(800, 16), batch_size=8 // nodes, shuffle=True))
"""


def _lose(node: Program) -> None:
    """As a node ends whose power fails: its agent gets to do nothing any more."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    os.kill(node.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.timeout(240)  # waits until torchrun has missed the lost node
def test_a_node_that_is_lost_leaves_the_run_to_the_other(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "train.py").write_text(ELASTIC)

    def node(number: int) -> contextlib.AbstractContextManager[Program]:
        # The first node waits for the second, which may start late on a busy machine: else it would begin alone.
        conf = f"last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=5,is_host={number == 0}".lower()
        words = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
        words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job9", "--max-restarts=3"]
        words += [f"--rdzv-conf={conf}", "train.py"]
        return started(sys.executable, *words, cwd=tmp_path, PYTHONPATH=str(ROOT))

    with node(0) as stays, node(1) as goes:
        # A node that is lost before the ranks have met would be waited for until the store's half hour is over.
        # Rank 0 may be on the node that is lost, so wait for its note, which follows the checkpoint.
        note = tmp_path / ".lightning_zero" / "torchrun-job9.json"
        stays.until(lambda: note.exists() and "step=5.ckpt" in note.read_text())
        _lose(goes)
        assert stays.wait() == 0
    lives = [[int(word) for word in line.split()] for line in (tmp_path / "steps").read_text().splitlines()]
    before, after = [life for life in lives if life[1] == 2], [life for life in lives if life[1] == 1]
    assert before == [[step, 2, 4] for step in range(len(before))]
    begun = after[0][0]
    assert begun % 5 == 0
    assert 5 <= begun <= len(before)  # the newest checkpoint
    assert after == [[step, 1, 8] for step in range(begun, 40)]
