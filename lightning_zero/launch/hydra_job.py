"""Makes the command with which other ranks run the Hydra job of this process.

A rank must not parse the command line again: under ``--multirun`` it contains a sweep, and Hydra would choose another
folder. So a rank gets the overrides of this job, and its folder. It composes its config itself, as ranks that srun or
torchrun has started do: a resolver that reads a clock may return another value there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

_WORKERS = ("joblib", "submitit", "multiprocessing", "ray")
"""Packages whose worker processes run jobs of another program, which cannot be executed again there."""
_NOT_OF_A_JOB = ("hydra.mode=", "hydra.run.", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")
"""Beginnings of overrides that say how jobs are started."""


def job_command(command: Sequence[str]) -> list[str]:
    """Returns ``command`` with arguments that make it run the current job.

    Raises:
        RuntimeError: If this job runs in a worker of another program.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and (worker := spec.name.split(".")[0]) in _WORKERS:
        raise RuntimeError(
            f"this job runs in a worker of {worker}, which cannot start the job's other ranks: use"
            " hydra/launcher=basic, trainer.devices=1, or a launcher that starts all ranks (srun, torchrun)."
        )
    job = HydraConfig.get()
    of_hydra = [item for item in job.overrides.hydra if not item.lstrip("+~").startswith(_NOT_OF_A_JOB)]
    pinned = ["hydra.mode=RUN", f"hydra.run.dir='{job.runtime.output_dir}'"]
    if not OmegaConf.is_missing(job.job, "num"):
        pinned.append(f"hydra.job.num={job.job.num}")
    pinned += ["hydra.output_subdir=null", "hydra/job_logging=stdout"]  # rank 0 writes these files
    return [*command, *config_flags(sys.argv[1:]), *job.overrides.task, *of_hydra, *pinned]


def config_flags(arguments: Sequence[str]) -> list[str]:
    """Returns the flags of a command line that select the config, which another process needs too."""
    kept: list[str] = []
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag in ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp"):
            kept += [flag, os.path.abspath(value) if flag in ("--config-dir", "-cd") else value]
        elif flag.startswith(("--config-dir=", "--config-name=", "--config-path=")):
            kept.append(flag)
    return kept
