"""Where a run that its batch system starts again finds its newest checkpoint.

A requeued SLURM job and a restarted group of torchrun are new processes whose Hydra folder carries a new date. What
stays the same is the job's name for itself and the folder it was started in, so that is where its newest checkpoints
are noted: ``.lightning_zero/<name>.json``, written by global rank 0, removed when the run is done.
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
"""What a run that is asked to end is stored as."""
_KEPT = 20
"""Checkpoints that are remembered; old ones may have been deleted by their callback."""


def run_name() -> str | None:
    """What the batch system calls this run, the same after each restart; ``None`` where nobody would restart it."""
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
    """The agent that started this rank, told apart from later processes with its number."""
    pid = os.getppid()
    try:
        with open(f"/proc/{pid}/stat") as line:
            return f"{pid}-{line.read().rsplit(')', 1)[1].split()[19]}"  # start time
    except (OSError, IndexError):
        return str(pid)


def _file() -> Path | None:
    name = run_name()
    return None if name is None else _start_folder() / FOLDER / f"{name}.json"


def _start_folder() -> Path:
    """Where the run was started: Hydra may have moved it elsewhere."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is not None and module.HydraConfig.initialized():
        return Path(module.HydraConfig.get().runtime.cwd)
    return Path.cwd()


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["checkpoints"]
    except (OSError, ValueError, KeyError):
        return []
    return found


def note(checkpoint: Mapping[str, Any], filepath: Any) -> None:
    """Remembers that ``checkpoint`` was stored at ``filepath``, if a fit can go on from it."""
    path = _file()
    if path is None or "optimizer_states" not in checkpoint:
        return
    absolute = str(filepath) if "://" in str(filepath) else os.path.abspath(filepath)
    others = [entry for entry in _read(path) if entry["path"] != absolute]
    entry = {"path": absolute, "step": int(checkpoint.get("global_step", 0))}
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"checkpoints": [*others, entry][-_KEPT:]}, indent=1), encoding="utf-8")
    os.replace(new, path)  # whole or not at all


def find() -> str | None:
    """The newest checkpoint of an earlier life of this run that is there and whole."""
    path = _file()
    if path is None:
        return None
    newest_first = reversed(_read(path))
    return next((entry["path"] for entry in newest_first if _is_whole(entry["path"])), None)


def _is_whole(path: str) -> bool:
    """A file appears all at once, a sharded folder with its marker."""
    fs, target = fsspec.core.url_to_fs(path)
    return bool(fs.isfile(target) or fs.isfile(f"{target}/{MARKER}"))


def forget() -> None:
    """The run is done: a later one has nothing to continue, and what an interruption stored has served."""
    path = _file()
    if path is not None:
        for entry in _read(path):
            if os.path.basename(entry["path"]) == PREEMPTED:
                with contextlib.suppress(OSError):
                    fs, target = fsspec.core.url_to_fs(entry["path"])
                    fs.rm(target, recursive=True)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # unless other runs have notes there
