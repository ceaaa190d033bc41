"""Hands the config of the Hydra job that runs in this process to the other ranks.

A rank must not parse the command line again: under ``--multirun`` it contains a sweep, and resolvers that use clocks,
files or random numbers would return other values. So it gets the job's resolved config, through
``--experimental-rerun``, Hydra's option for running a pickled job again. Hydra tells a job its folder and its
overrides, but not its config, so ``private.hydra`` reads it from the frame of Hydra's own function.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_zero.private.hydra import running_job

_WORKERS = ("joblib", "submitit", "multiprocessing", "ray")
"""Packages whose worker processes run jobs of another program, which cannot be executed again there."""


def job_command(command: list[str], folder: Path, words: Sequence[str] = ()) -> list[str]:
    """Returns ``command`` with arguments that make it run the current job, and writes the job's config into ``folder``.

    ``words`` come before Hydra's own arguments.
    """
    if (job := running_job()) is None:
        raise RuntimeError(
            "the run was started in another thread of the Hydra job, where the job's config cannot be found: start it"
            " in the thread that Hydra called."
        )
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and (worker := spec.name.split(".")[0]) in _WORKERS:
        raise RuntimeError(
            f"this job runs in a worker of {worker}, which cannot start the job's other ranks: use"
            " hydra/launcher=basic, trainer.devices=1, or a launcher that starts all ranks (srun, torchrun)."
        )
    path = folder / "job.pickle"
    path.write_bytes(_pickled(_for_another_process(job.task, job.config.hydra)))
    return [*command, *words, "--experimental-rerun", str(path)]


def _for_another_process(task: Any, hydra: Any) -> Any:
    """Copies the config, with interpolations resolved in this process and logging to the console only."""
    from omegaconf import OmegaConf, open_dict, read_write
    from omegaconf.errors import OmegaConfBaseException

    with contextlib.suppress(OmegaConfBaseException):
        OmegaConf.to_container(task, resolve=True)  # fills resolvers' caches, so rank 0 gets these values later, too
    config = copy.deepcopy(task)
    with open_dict(config):
        config.hydra = copy.deepcopy(hydra)
    with read_write(config), open_dict(config), read_write(config.hydra), open_dict(config.hydra):
        for node in (config, config.hydra):
            for key in list(node):
                try:
                    value: Any = node[key] if not OmegaConf.is_missing(node, key) else None
                    if OmegaConf.is_config(value):
                        OmegaConf.resolve(value)
                    elif OmegaConf.is_interpolation(node, key):
                        node[key] = value
                except OmegaConfBaseException:  # the job does not use this value, or it would fail on rank 0 as well
                    continue
        for plugin in ("launcher", "sweeper"):  # not needed any more, and their classes may not be importable
            config.hydra[plugin] = OmegaConf.to_container(config.hydra[plugin])
        logging = config.hydra.job_logging
        files = [name for name, handler in (logging.get("handlers") or {}).items() if "filename" in handler]
        for name in files:
            del logging.handlers[name]
        for owner in (logging.get("root"), *(logging.get("loggers") or {}).values()):
            if owner and owner.get("handlers"):
                owner.handlers = [name for name in owner.handlers if name not in files]
    return config


def _pickled(config: Any) -> bytes:
    from omegaconf import OmegaConf

    try:
        return pickle.dumps(config)
    except Exception:  # the schema is a class that was made at run time, so no other process can import it
        hydra = config.hydra
        plain = OmegaConf.create(OmegaConf.to_container(OmegaConf.masked_copy(config, _task_keys(config))))
        plain.hydra = hydra  # Hydra requires its own type here
        return pickle.dumps(plain)


def _task_keys(config: Any) -> list[str]:
    return [key for key in config if key != "hydra"]
