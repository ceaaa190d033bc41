"""Compares the ranks that another launcher (torchrun, srun, mpirun) has started with the Trainer's settings."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""The number of ranks, as set by mpirun: the first by Open MPI, the second by MPICH and Intel MPI."""


def check_world(environment: Any, devices: int, num_nodes: int) -> None:
    """Checks that the number of ranks is the one that the Trainer expects.

    Raises:
        ValueError: It is not. The message names the launcher, the number found, and the setting to change.
    """
    wanted = devices * num_nodes
    if not environment.creates_processes_externally:
        if (by_mpirun := max(int(os.environ.get(name, "1")) for name in _MPI_SIZES)) > 1:
            raise ValueError(
                f"mpirun started {by_mpirun} ranks, which Lightning cannot see without mpi4py: pip install mpi4py, or"
                " start the ranks with torchrun."
            )
        return
    if isinstance(environment, LightningEnvironment):
        return  # started with variables, or by a program such as Ray, whose workers know neither devices nor num_nodes
    found, per_node = ranks_started(environment, devices)
    if found != wanted or per_node != devices:
        names = ((SLURMEnvironment, "srun"), (TorchElasticEnvironment, "torchrun"))
        who = next((name for kind, name in names if isinstance(environment, kind)), type(environment).__name__)
        raise ValueError(
            f"{who} started {found} ranks, {per_node} on this host, but the Trainer has devices={devices} and"
            f" num_nodes={num_nodes}: use devices={per_node} and num_nodes={max(found // per_node, 1)}, or have"
            f" {who} start {wanted} ranks, {devices} on each host."
        )


def ranks_started(environment: Any, devices: int = 0) -> tuple[int, int]:
    """Returns the number of ranks that another launcher has started, and of those on this host.

    Args:
        environment: Lightning's environment for that launcher.
        devices: Ranks on each host, for a launcher that does not say how many are on this one.
    """
    env = os.environ
    if not isinstance(environment, SLURMEnvironment):
        found = environment.world_size()
        return found, int(env.get("LOCAL_WORLD_SIZE", devices if devices and found % devices == 0 else found))
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
    if tasks > 1 and "SLURM_STEP_ID" not in env:
        raise ValueError(
            f"SLURM_NTASKS={tasks}, but the batch script itself has started a single process: put srun in front of the"
            " script's python line."
        )
    nodes = int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1")))
    return tasks, max(tasks // nodes, 1)
