"""What a run makes of the ranks that it finds, and how it starts those that are not there."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zero import ZeroStrategy
from lightning_zero.app.hydra_config import make_strategy
from lightning_zero.launch.launcher import LaunchedDDP, check_started

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


def test_a_number_of_ranks_that_torchrun_did_not_start_is_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    check_started(TorchElasticEnvironment(), 1, 2)
    with pytest.raises(ValueError, match=r"does not match the world size"):
        check_started(TorchElasticEnvironment(), 1, 3)


def test_ranks_of_mpirun_that_lightning_cannot_see_are_refused(monkeypatch):
    """Each of them would start all ranks of a run of its own."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"mpirun started 4 ranks.*pip install mpi4py"):
        check_started(LightningEnvironment(), 2, 2)


def test_a_batch_script_without_srun_is_refused(monkeypatch):
    """Its one process would wait for ranks that nobody starts."""
    for name, value in {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    with pytest.raises(ValueError, match=r"SLURM_NTASKS=8.*put srun in front"):
        check_started(SLURMEnvironment(auto_requeue=False), 4, 2)


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
