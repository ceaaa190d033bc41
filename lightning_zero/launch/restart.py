"""The restart note: names the newest checkpoint of a run that a batch system may start again.

A requeued SLURM job and a restarted torchrun group are new processes, and their Hydra folder has a new date. The job's
name and its start folder do not change, so the note is ``.lightning_zero/<name>.json`` in that folder. Only global rank
0 writes it, and removes it when the run is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec

from lightning_zero.checkpoint.layout import MARKER

FOLDER = ".lightning_zero"
PREEMPTED = "preempted.ckpt"
"""File name of the checkpoint that a run saves when it is asked to end."""
_KEPT = 20
"""Number of checkpoints in a note. A callback may delete the newest ones, so one is not enough."""


def run_name() -> str | None:
    """Returns the batch system's name of this run, which restarts do not change. ``None`` if nothing restarts it."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        if int(env.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0 and ":" not in env.get("PET_NNODES", ""):
            return None
        name = env["TORCHELASTIC_RUN_ID"]
        return f"torchrun-{name if name != 'none' else _parent()}"
    if "SLURM_JOB_ID" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        if "SLURM_ARRAY_JOB_ID" in env:
            return f"slurm-{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
        return f"slurm-{env['SLURM_JOB_ID']}"
    return None


def _parent() -> str:
    """Returns the id and start time of the process that started this rank. Ids alone are reused."""
    pid = os.getppid()
    try:
        with open(f"/proc/{pid}/stat") as line:
            return f"{pid}-{line.read().rsplit(')', 1)[1].split()[19]}"  # start time
    except (OSError, IndexError):
        return str(pid)


def _file() -> Path | None:
    name, job = run_name(), hydra_folders()
    start = Path.cwd() if job is None else Path(job.cwd)  # Hydra may have changed the working folder since
    return None if name is None else start / FOLDER / f"{name}.json"


def hydra_folders() -> Any:
    """Returns the folders of the running Hydra job, or ``None``. Does not import Hydra."""
    module = sys.modules.get("hydra.core.hydra_config")
    return module.HydraConfig.get().runtime if module is not None and module.HydraConfig.initialized() else None


def _read(path: Path) -> list[str]:
    try:
        found: list[str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found


def note(checkpoint: Mapping[str, Any], filepath: Any) -> None:
    """Adds ``filepath`` to the note if a fit can resume from ``checkpoint``, which then has optimizer states."""
    path = _file()
    if path is None or "optimizer_states" not in checkpoint:
        return
    absolute = str(filepath) if "://" in str(filepath) else os.path.abspath(filepath)
    others = [other for other in _read(path) if other != absolute]
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps([*others, absolute][-_KEPT:], indent=1), encoding="utf-8")
    os.replace(new, path)  # atomic: a kill leaves the old note or the new one


def find() -> str | None:
    """Returns the newest checkpoint of the note that still exists and is complete."""
    path = _file()
    if path is None:
        return None
    return next(filter(_is_complete, reversed(_read(path))), None)


def _is_complete(path: str) -> bool:
    """Returns whether a checkpoint is complete. A file is if it exists, a sharded folder if it has its marker."""
    fs, target = fsspec.core.url_to_fs(path)
    return bool(fs.isfile(target) or fs.isfile(f"{target}/{MARKER}"))


def forget() -> None:
    """Removes the note of a complete run, and the checkpoints that were saved at interruptions."""
    path = _file()
    if path is not None:
        for checkpoint in _read(path):
            if os.path.basename(checkpoint) == PREEMPTED:
                with contextlib.suppress(OSError):
                    fs, target = fsspec.core.url_to_fs(checkpoint)
                    fs.rm(target, recursive=True)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # fails if other runs have notes there
