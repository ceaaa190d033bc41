"""What a run makes of the ranks that it finds, and how it starts those that are not there."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import KubeflowEnvironment

from lightning_zero import ZeroStrategy
from lightning_zero.app.hydra_config import make_strategy
from lightning_zero.launch.environment import check_world
from lightning_zero.launch.launcher import LaunchedDDP

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


@pytest.mark.parametrize(
    ("variables", "devices", "nodes", "message"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"}, 4, 2, None),
        (
            {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"},
            8,
            2,
            "start 16 ranks, 8 on each host",
        ),
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


def test_ranks_of_mpirun_that_lightning_cannot_see_are_refused(monkeypatch):
    """Each of them would start all ranks of a run of its own."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"mpirun started 4 ranks.*pip install mpi4py"):
        check_world(LightningEnvironment(), 2, 2)


def test_ddp_of_the_hydra_groups_is_launched_the_same_way():
    strategy = make_strategy(name="ddp_find_unused_parameters_true")
    assert isinstance(strategy, LaunchedDDP)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert make_strategy(name="ddp_spawn") == "ddp_spawn"


def test_a_group_of_another_size_is_refused(monkeypatch):
    """Ranks that something else has started keep theirs: it may be what they were started for."""
    monkeypatch.setenv("LOCAL_RANK", "0")  # as Lightning's DDP with devices=1 leaves it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="the run has 2 ranks, but this process is in a process group of 1 "):
            L.Trainer(strategy=ZeroStrategy(stage=3), devices=2, **QUIET).fit(BoringModel())
    finally:
        dist.destroy_process_group()


def test_a_class_that_cannot_be_sent_to_spawned_ranks_is_named():
    class Local(BoringModel):
        pass

    with pytest.raises(TypeError, match=r"cannot send the run.*Local.*top of the file, or use ZeroStrategy"):
        L.Trainer(strategy=ZeroStrategy(stage=3), devices=2, **QUIET).fit(Local())
    assert not torch.distributed.is_initialized()
