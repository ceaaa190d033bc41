"""Every way of starting gives the same run: the same losses, everything brought back, nothing left in the process."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_zero import ZeroStrategy
from tests.system.commands import ROOT, started


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class InOrder(Regression):
    """Rank r takes items r, r + 2, ..."""

    def train_dataloader(self):
        sampler = DistributedSampler(data(), self.trainer.world_size, self.global_rank, shuffle=False)
        return DataLoader(data(), batch_size=4, sampler=sampler)


def data(count: int = 24) -> TensorDataset:
    x = torch.arange(4.0 * count).view(count, 4) / 100
    return TensorDataset(x, x.sum(1, keepdim=True))


def trainer(strategy, **more) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(strategy=strategy, accelerator="cpu", **{"devices": 2, "max_epochs": 1, **quiet, **more})


PROGRAM = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.system.test_launch import *

if __name__ == "__main__":
    if "FIRST_ALONE" in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = InOrder()
    nodes = int(os.environ.get("NUM_NODES", 1))
    t = trainer(ZeroStrategy(stage=3, units=["Linear"]), devices=2 // nodes, num_nodes=nodes)
    t.fit(module)
    if t.is_global_zero:
        print("LOSSES", json.dumps(module.losses), t.world_size, flush=True)
"""


def losses_of(output: str) -> list[float]:
    (line,) = [line for line in output.splitlines() if line.startswith("LOSSES")]
    return json.loads(line.removeprefix("LOSSES").rsplit(" ", 1)[0])


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of two ranks, computed on one: mean of both halves of each global batch."""
    module = Regression()
    optimizer = module.configure_optimizers()
    x, y = data().tensors
    losses = []
    for start in range(0, len(x), 8):
        batch = x[start : start + 8], y[start : start + 8]
        loss = (module.net(batch[0]) - batch[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """The folder for temporary files of this process and its ranks; its path is short, as sockets in it need."""
    get_temp_dir()  # this process's own, which stays
    with tempfile.TemporaryDirectory(prefix="lz-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


@pytest.mark.parametrize(("method", "after_fit"), [("spawn", "whole"), ("fork", "sharded")])
def test_results_come_back_whole(method, after_fit, tmp_path, temporary):
    """Weights of all shards, and metrics."""

    class Local(Regression):
        """No other process can import it."""

    before = dict(os.environ)
    module = Local() if method == "fork" else Regression()
    strategy = ZeroStrategy(stage=3, units=["Linear"], start_method=method, after_fit=after_fit)
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    t = trainer(strategy)
    t.fit(module, DataLoader(data(), batch_size=4))
    for name, value in module.state_dict().items():
        assert type(value) is torch.Tensor
        assert value.shape == initial[name].shape
        assert (value != initial[name]).any()
    assert t.callback_metrics["loss"] > 0
    with pytest.warns(UserWarning, match="has the weights only, so training cannot continue from it"):
        t.save_checkpoint(tmp_path / "afterwards.ckpt")  # by a module that no run was attached to in this process
    saved = torch.load(tmp_path / "afterwards.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")] == []


class Killed(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        if (self.global_rank, batch_idx) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_rank_that_is_killed_ends_the_run_and_is_named():
    others = {*multiprocessing.active_children()}  # of other tests
    fit = trainer(ZeroStrategy(stage=3, start_method="fork", timeout_seconds=600.0)).fit
    with pytest.raises(Exception, match="process 1 terminated with signal SIGKILL"):
        fit(Killed(), DataLoader(data(), batch_size=4))
    assert {*multiprocessing.active_children()} == others


def _be_in_a_group_of_one() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    torch.zeros_like(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))  # its operators keep the mesh, until asked


def test_forks_inherit_no_process_group():
    """Its threads are this process's: a forked one that ended it would wait for them for ever, or crash."""
    fit = functools.partial(trainer(ZeroStrategy(stage=3, units=["Linear"], start_method="fork")).fit, Regression())
    _be_in_a_group_of_one()
    try:
        with pytest.raises(RuntimeError, match="start_method='fork': this process is in a process group of 1 ranks"):
            fit(DataLoader(data(), batch_size=4))
    finally:
        dist.destroy_process_group()
    _be_in_a_group_of_one()  # of which nothing but the operators knows
    dist.destroy_process_group()
    fit(DataLoader(data(), batch_size=4))


@pytest.mark.parametrize(
    ("command", "env"),
    [
        pytest.param([sys.executable], {"FIRST_ALONE": "1"}, id="popen"),  # the program is in a group of one before
        pytest.param(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], {}, id="torchrun"
        ),
    ],
)
def test_a_program_trains_as_one_rank_does(command, env, tmp_path, expected):
    (tmp_path / "train.py").write_text(PROGRAM)
    with started(*command, "train.py", cwd=tmp_path, **env) as program:
        assert program.wait() == 0
        assert losses_of(program.output) == pytest.approx(expected, rel=1e-5)
