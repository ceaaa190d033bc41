"""The ranks that an outside launcher (torchrun, srun, mpirun) has started, checked against the Trainer."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

_MPI = (
    # rank, world size, local rank, local world size
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDRA_JOBID")


class MpiEnvironment(ClusterEnvironment):
    """Ranks started by ``mpirun`` (Open MPI, MPICH, Intel MPI), read from its variables; ``mpi4py`` is not needed."""

    def __init__(self) -> None:
        names = _mpi_names()
        assert names is not None
        self._rank, self._world_size, self._local_rank, self.local_size = (int(os.environ[name]) for name in names)

    @staticmethod
    def detect() -> bool:
        names = _mpi_names()
        return names is not None and int(os.environ[names[1]]) > 1

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        if "MASTER_ADDR" not in os.environ and self.local_size < self._world_size:
            raise ValueError(
                f"mpirun started {self._world_size} ranks, {self.local_size} of them on this host, but MASTER_ADDR is"
                " not set: name the first host, as mpirun -x MASTER_ADDR=<host> (Open MPI) or -genv MASTER_ADDR <host>."
            )
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        job = next((os.environ[name] for name in _MPI_JOB if name in os.environ), "")
        return 20_000 + zlib.crc32(job.encode()) % 10_000  # below the range that systems give out by themselves

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Is mpirun's to say."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Is mpirun's to say."""

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._rank // self.local_size


def _mpi_names() -> tuple[str, ...] | None:
    return next((names for names in _MPI if all(name in os.environ for name in names)), None)


def adapt_environment(environment: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """``environment`` as Lightning found it, or the one it cannot see."""
    if type(environment) is LightningEnvironment and "LOCAL_RANK" not in os.environ and MpiEnvironment.detect():
        return MpiEnvironment()
    return environment


@contextmanager
def without_requeueing(environment: ClusterEnvironment | None) -> Iterator[None]:
    """Inside, Lightning does not requeue by itself, which saves inside a signal handler: the step sync does. The object
    may be the user's, so it is as it was afterwards."""
    if not isinstance(environment, SLURMEnvironment):
        yield
        return
    before, environment.auto_requeue = environment.auto_requeue, False
    try:
        yield
    finally:
        environment.auto_requeue = before


def check_world(environment: Any, devices: int, num_nodes: int) -> None:
    """Raises unless as many ranks exist as the Trainer expects.

    Raises:
        ValueError: Naming the launcher, the number of ranks it has started, and the setting to change.
    """
    wanted = devices * num_nodes
    if not environment.creates_processes_externally:
        return
    if isinstance(environment, SLURMEnvironment):
        _check_slurm(devices, num_nodes)
        return
    if isinstance(environment, TorchElasticEnvironment):
        found, per_node = environment.world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", devices))
        who, options = "torchrun", f"--nproc-per-node={devices} --nnodes={num_nodes}"
    elif isinstance(environment, MpiEnvironment):
        found, per_node = environment.world_size(), environment.local_size
        who, options = "mpirun", f"-n {wanted} with {devices} on each host"
    elif type(environment) is LightningEnvironment:
        _check_variables(wanted, devices, environment)
        return
    elif isinstance(environment, LightningEnvironment):
        return  # it asks another program, as Ray's does, whose workers know neither devices nor num_nodes
    else:
        found = environment.world_size()
        per_node = devices if found % devices == 0 else found
        who, options = type(environment).__name__, f"of {wanted} ranks"
    if found != wanted or per_node != devices:
        raise ValueError(
            f"{who} started {found} ranks, {per_node} on this host, but the Trainer has devices={devices} and"
            f" num_nodes={num_nodes}: use devices={per_node} and num_nodes={max(found // per_node, 1)}, or {who}"
            f" {options}."
        )


def _check_variables(wanted: int, devices: int, environment: Any) -> None:
    """Ranks that were started by hand, by variables alone."""
    rank = environment.node_rank() * devices + environment.local_rank()
    for name, expected in (("WORLD_SIZE", wanted), ("RANK", rank)):
        found = os.environ.get(name)
        if found is not None and found != str(expected):
            here = f"LOCAL_RANK={environment.local_rank()} and NODE_RANK={environment.node_rank()}"
            raise ValueError(
                f"{name}={found} in the environment, but devices={devices} on {wanted // devices} nodes with {here}"
                f" make {name}={expected}: correct or unset it. With LOCAL_RANK unset as well, the ranks of this"
                " machine are started for you."
            )


def _check_slurm(devices: int, num_nodes: int) -> None:
    env = os.environ
    tasks = int(env.get("SLURM_NTASKS", "1"))
    nodes = int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1")))
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", tasks))
    if tasks > 1 and "SLURM_STEP_ID" not in env:
        raise ValueError(
            f"SLURM_NTASKS={tasks}, but this process was started by the batch script itself, once: put srun in front of"
            " the python line of the script."
        )
    if nodes != num_nodes:
        raise ValueError(
            f"SLURM runs this step on {nodes} nodes, but the Trainer has num_nodes={num_nodes}: change the script's"
            f" line to #SBATCH --nodes={num_nodes}, or use trainer.num_nodes={nodes}."
        )
    if tasks != devices * num_nodes:
        per_node = max(tasks // num_nodes, 1)
        raise ValueError(
            f"SLURM started {tasks} tasks on {nodes} nodes, but the Trainer has devices={devices}, which makes"
            f" {devices * num_nodes}: change the script's line to #SBATCH --ntasks-per-node={devices}, or use"
            f" trainer.devices={per_node}."
        )
