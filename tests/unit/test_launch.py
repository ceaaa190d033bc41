"""What a run makes of the ranks that it finds, and how it starts those that are not there."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import KubeflowEnvironment

from lightning_zero import ZeroStrategy
from lightning_zero.app.hydra_config import make_strategy
from lightning_zero.launch import failure
from lightning_zero.launch.environment import MpiEnvironment, check_world
from lightning_zero.launch.launcher import LaunchedDDP, choose_start_method, whole_predictions

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


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
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in {**variables, "SLURM_NTASKS_PER_NODE": "4"}.items():
        monkeypatch.setenv(name, value)
    if message is None:
        check_world(SLURMEnvironment(), devices, nodes)
        return
    with pytest.raises(ValueError, match=message):
        check_world(SLURMEnvironment(), devices, nodes)


def test_what_torchrun_and_kubeflow_started_is_checked(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for environment, who in ((TorchElasticEnvironment(), "torchrun"), (KubeflowEnvironment(), "KubeflowEnvironment")):
        check_world(environment, 1, 2)
        with pytest.raises(ValueError, match=f"{who} started 2 ranks, .*devices=1 and num_nodes=3: use devices=1 and "):
            check_world(environment, 1, 3)


def test_mpi_needs_the_first_hosts_name_only_across_hosts(monkeypatch):
    for name, value in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "2", "LOCAL_SIZE": "4"}.items():
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
    strategy = make_strategy(name="ddp_find_unused_parameters_true")
    assert isinstance(strategy, LaunchedDDP)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert make_strategy(name="ddp_spawn") == "ddp_spawn"


def test_auto_is_spawn_in_pytest():
    assert choose_start_method("auto") == "spawn"


def test_a_group_of_another_size_is_refused(monkeypatch):
    """Ranks that something else has started keep theirs: it may be what they were started for."""
    monkeypatch.setattr(failure, "WAIT_SECONDS", 0.1)
    monkeypatch.setenv("LOCAL_RANK", "0")  # as Lightning's DDP with devices=1 leaves it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="the run has 2 ranks, but this process is in a process group of 1 "):
            L.Trainer(strategy=ZeroStrategy(stage=3), devices=2, **QUIET).fit(BoringModel())
    finally:
        dist.destroy_process_group()


def test_a_class_that_cannot_be_sent_to_spawned_ranks_is_named(monkeypatch):
    class Local(BoringModel):
        pass

    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match=r"cannot send the run.*Local.*top of the file, or pip install cloudpickle"):
        L.Trainer(strategy=ZeroStrategy(stage=3), devices=2, **QUIET).fit(Local())
    assert not torch.distributed.is_initialized()
