"""Writes the batch script of a training under SLURM."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_zero.config import check_types

REQUEUE_SIGNAL = "USR1"
"""Signal that SLURM sends before the time limit. The ranks then finish their step, save and requeue the job."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """The resources and options of a job (``launcher=slurm``).

    Raises:
        ValueError: A setting is invalid. The message names it, its value and the repair.
    """

    nodes: int = 1
    """Number of hosts; becomes ``trainer.num_nodes``."""
    gpus_per_node: int = 0
    """GPUs per host, one task each; becomes ``trainer.devices``. 0 trains on CPUs."""
    tasks_per_node: int | None = None
    """Processes per host on CPUs; with GPUs there is one process per GPU."""
    cpus_per_task: int = 1
    """Cores per process, including its data loader workers."""
    time_minutes: int = 60
    """Time limit of the job. When it is reached, the job is requeued with the same limit."""
    signal_seconds: int = 120
    """Seconds before the limit at which the ranks get the signal to save. SLURM may send it up to a minute early."""
    requeue: bool = True
    """Whether SLURM may start the job again, also after a node failure or a preemption."""
    job_name: str = "lightning_zero"
    partition: str | None = None
    account: str | None = None
    memory_gb_per_node: int | None = None
    """Host memory per host; ``None`` is the partition's default."""
    extra: Sequence[str] = field(default_factory=list)
    """Further options of sbatch, such as ``--constraint=h100``."""
    setup: Sequence[str] = field(default_factory=list)
    """Shell lines before the run, such as ``module load cuda`` or ``export NCCL_SOCKET_IFNAME=ib0``."""

    def __post_init__(self) -> None:
        check_types(self, "launcher.")
        if self.tasks_per_node is not None and self.gpus_per_node not in (0, self.tasks_per_node):
            raise ValueError(
                f"launcher.tasks_per_node={self.tasks_per_node} with launcher.gpus_per_node={self.gpus_per_node}: each"
                " GPU gets one process, so leave tasks_per_node out."
            )
        if self.signal_seconds >= 60 * self.time_minutes:
            raise ValueError(
                f"launcher.signal_seconds={self.signal_seconds} is not less than launcher.time_minutes="
                f"{self.time_minutes}: the job would get the signal before it starts. Use fewer seconds."
            )

    @property
    def devices(self) -> int:
        """Processes per host, which ``trainer.devices`` must equal."""
        return self.gpus_per_node or self.tasks_per_node or 1

    def script(self, command: Sequence[str], folder: Path, start_folder: Path) -> str:
        """Returns the text of the batch script.

        Args:
            command: The command of each task.
            folder: The run's folder, for the logs.
            start_folder: Working folder of the tasks.
        """
        options = {
            "job-name": self.job_name,
            "nodes": self.nodes,
            "ntasks-per-node": self.devices,
            "gpus-per-node": self.gpus_per_node or None,
            "cpus-per-task": self.cpus_per_task,
            "mem": f"{self.memory_gb_per_node}G" if self.memory_gb_per_node else None,
            "time": self.time_minutes,
            "partition": self.partition,
            "account": self.account,
            "signal": f"{REQUEUE_SIGNAL}@{self.signal_seconds}",
            "chdir": start_folder,
            "output": folder / "slurm-%j.out",
            "open-mode": "append",
        }
        lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)]
        lines.append("#SBATCH --requeue" if self.requeue else "#SBATCH --no-requeue")
        lines += [f"#SBATCH {line}" for line in self.extra]
        lines += ["", *self.setup, ""] if self.setup else [""]
        lines.append("# One task per device. If one fails, the others end; each has a log of its own.")
        srun = ["srun", "--kill-on-bad-exit=1", f"--output={folder}/ranks/rank%t.log", "--open-mode=append"]
        words = [shlex.quote(word) for word in command]
        head = 4 if words[1:3] == ["-m", "lightning_zero"] else 2
        lines.append(" \\\n  ".join([" ".join(srun), " ".join(words[:head]), *words[head:]]))
        return "\n".join(lines) + "\n"


def run_stamp(now: str) -> str:
    """Returns the stamp in the run folder's name. All ranks get the same one without communication.

    Args:
        now: Date and time, the stamp of a process that is not one of several.
    """
    env = os.environ
    if "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        return f"slurm-{env['SLURM_JOB_ID']}-{env['SLURM_STEP_ID']}"
    if env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"torchrun-{env['TORCHELASTIC_RUN_ID']}"
    if int(env.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 and "PMIX_NAMESPACE" in env:
        return "mpirun-" + "".join(c if c.isalnum() else "-" for c in env["PMIX_NAMESPACE"])
    return now
