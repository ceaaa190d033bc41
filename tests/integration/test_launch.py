"""Every way of starting gives the same run: the same losses, everything brought back, nothing left in the process."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_zero import ZeroStrategy
from lightning_zero.launch.environment import MpiEnvironment, check_world
from lightning_zero.launch.launcher import LaunchedDDP, choose_start_method, whole_predictions
from tests.integration.commands import ROOT

HERE = Path(__file__).resolve().parent


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

    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0]

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
from tests.integration.test_launch import *

if __name__ == "__main__":
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


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("method", "after_fit"),
    [
        ("spawn", "whole"),
        pytest.param("spawn", "sharded", marks=pytest.mark.full),
        ("fork", "whole"),
        ("fork", "sharded"),
    ],
)
def test_results_come_back_whole(method, after_fit, tmp_path, monkeypatch):
    """Weights of all shards, metrics, and the predictions of both ranks in the order of the data."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = dict(os.environ)
    module, strategy = Regression(), ZeroStrategy(stage=3, units=["Linear"], start_method=method, after_fit=after_fit)
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    t = trainer(strategy)
    t.fit(module, DataLoader(data(), batch_size=4))
    for name, value in module.state_dict().items():
        assert type(value) is torch.Tensor
        assert value.shape == initial[name].shape
        assert (value != initial[name]).any()
    assert t.callback_metrics["loss"] > 0
    with pytest.warns(UserWarning, match="has the weights, and training cannot continue from it"):
        t.save_checkpoint(tmp_path / "afterwards.ckpt")  # by a module that no run was attached to in this process
    saved = torch.load(tmp_path / "afterwards.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
    (tmp_path / "afterwards.ckpt").unlink()
    predictions = trainer(ZeroStrategy(stage=3, units=["Linear"], start_method=method)).predict(
        module, DataLoader(data(), batch_size=4)
    )
    assert torch.equal(torch.cat(predictions).sort().values, data().tensors[0][:, 0])
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("torchinductor")] == []


FORKS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.integration.test_launch import *

class Sees(L.Callback):
    def setup(self, trainer, module, stage):
        seen = "lightning_zero.engines.fsdp2.engine" in sys.modules
        sys.stdout.write(f"SEES {{seen}}\\n")  # at once: unbuffered ranks mix the parts of a print
        sys.stdout.flush()

strategy = ZeroStrategy(stage=3, units=["Linear"], start_method="fork")
trainer(strategy, callbacks=[Sees()]).fit(Regression(), DataLoader(data(), batch_size=4))
"""


@pytest.mark.rest
def test_forked_ranks_share_the_engines_imports(tmp_path):
    """Each by itself took as long as the rest of its start, which shows where ranks outnumber cores."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout.count("SEES True") == 2, done.stdout + done.stderr
    assert done.returncode == 0


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


AFTER_ONE_RANK = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.integration.test_launch import *

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = Regression()
    module.on_train_start = lambda: Path(f"{{dist.get_rank()}} of {{dist.get_world_size()}}").touch()
    trainer(ZeroStrategy(stage=3, units=["Linear"])).fit(module, DataLoader(data(), batch_size=4))
"""


@pytest.mark.rest
def test_a_script_that_was_in_a_group_of_one_is_in_the_runs_own(tmp_path):
    (tmp_path / "train.py").write_text(AFTER_ONE_RANK)
    command = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.glob("* of *")) == ["0 of 2", "1 of 2"]


def test_a_group_of_another_size_is_refused(monkeypatch):
    """Ranks that something else has started keep theirs: it may be what they were started for."""
    monkeypatch.setenv("LOCAL_RANK", "0")  # as Lightning's DDP with devices=1 leaves it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="the run has 2 ranks, but this process is in a process group of 1 "):
            trainer(ZeroStrategy(stage=3)).fit(Regression(), DataLoader(data(), batch_size=4))
    finally:
        dist.destroy_process_group()


@pytest.mark.rest
@pytest.mark.parametrize("has_cloudpickle", [True, False])
def test_a_class_inside_a_test_can_be_spawned(has_cloudpickle, monkeypatch):
    """No other process can import it."""

    class Local(Regression):
        def training_step(self, batch, batch_idx):
            return 2 * super().training_step(batch, batch_idx)

    module = Local()
    before = module.net[0].weight.detach().clone()
    t = trainer(ZeroStrategy(stage=3, units=["Linear"]))
    if has_cloudpickle:
        pytest.importorskip("cloudpickle")
        t.fit(module, DataLoader(data(), batch_size=4))
        assert (module.net[0].weight != before).any()
        return
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match=r"cannot send the run.*Local.*top of the file, or pip install cloudpickle"):
        t.fit(module, DataLoader(data(), batch_size=4))


@pytest.mark.rest
def test_auto_is_spawn_in_pytest_and_popen_in_a_program(tmp_path, expected):
    assert choose_start_method("auto") == "spawn"
    (tmp_path / "train.py").write_text(PROGRAM)
    done = _run([sys.executable, "train.py"], tmp_path)
    assert losses_of(done) == pytest.approx(expected, rel=1e-5)


STREAMS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.integration.test_launch import *

class Telling(InOrder):
    def on_train_start(self):
        print("inside rank", self.global_rank, flush=True)
        if self.fails:
            raise LookupError("not well")

if __name__ == "__main__":
    before = sys.stdout, sys.stderr
    for fails in (True, False):
        module = Telling()
        module.fails = fails
        try:
            trainer(ZeroStrategy(stage=3, units=["Linear"], rank_logs="logs")).fit(module)
        except LookupError:
            pass
        print("SAME", sys.stdout is before[0] and sys.stderr is before[1], flush=True)
"""


@pytest.mark.rest
def test_streams_are_the_programs_own_between_runs(tmp_path):
    """Also after one that failed; logs have the output of each run."""
    (tmp_path / "train.py").write_text(STREAMS)
    done = _run([sys.executable, "train.py"], tmp_path)
    assert [line for line in done.splitlines() if line.startswith("SAME")] == ["SAME True"] * 2, done
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    for rank, log in enumerate(logs):
        assert log.count(f"inside rank {rank}") == 2, log
    assert "SAME" not in logs[0]


@pytest.mark.rest
def test_torchrun(tmp_path, expected):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    assert losses_of(_run(command, tmp_path)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.rest
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin)")
def test_mpirun(tmp_path, expected):
    (tmp_path / "train.py").write_text(PROGRAM)
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, "train.py"]
    assert losses_of(_run(command, tmp_path)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.rest
def test_too_many_devices_for_torchrun_is_said(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "train.py"]
    done = _run(command, tmp_path, fails=True)
    assert "torchrun started 1 ranks, 1 on this host, but the Trainer has devices=2" in done
    assert "use devices=1" in done


def _run(command: list[str], folder: Path, fails: bool = False) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("variables", "devices", "nodes", "message"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}, 4, 2, None),
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}, 8, 2, "#SBATCH --ntasks-per-node=8"),
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}, 4, 1, "#SBATCH --nodes=1"),
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "2"}, 4, 2, "put srun in front"),
    ],
)
def test_what_slurm_started_is_checked(variables, devices, nodes, message, monkeypatch):
    from lightning.fabric.plugins.environments import SLURMEnvironment

    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in {**variables, "SLURM_NTASKS_PER_NODE": "4"}.items():
        monkeypatch.setenv(name, value)
    if message is None:
        check_world(SLURMEnvironment(), devices, nodes)
        return
    with pytest.raises(ValueError, match=message):
        check_world(SLURMEnvironment(), devices, nodes)


def test_mpi_needs_the_first_hosts_name_only_across_hosts(monkeypatch):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    for name, value in zip(names, "3424"[:4], strict=True):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "job@1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    environment = MpiEnvironment()
    assert (environment.global_rank(), environment.world_size(), environment.local_rank()) == (3, 4, 2)
    assert environment.main_address == "127.0.0.1"
    assert environment.main_port == MpiEnvironment().main_port
    with pytest.raises(ValueError, match=r"mpirun started 4 ranks, 4 on this host.*devices=4 and num_nodes=1"):
        check_world(environment, 2, 2)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        _ = MpiEnvironment().main_address


def test_predictions_keep_the_order_of_the_data():
    assert whole_predictions([["a", "c", "e"], ["b", "d"]]) == ["a", "b", "c", "d", "e"]
    assert whole_predictions([[["a", "c"], ["x"]], [["b"], ["y"]]], 2) == [["a", "b", "c"], ["x", "y"]]
    assert whole_predictions([None, None]) is None


def test_ddp_of_the_hydra_groups_is_launched_the_same_way():
    from lightning_zero.app.hydra_config import make_strategy

    strategy = make_strategy(name="ddp_find_unused_parameters_true")
    assert isinstance(strategy, LaunchedDDP)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert make_strategy(name="ddp_spawn") == "ddp_spawn"
