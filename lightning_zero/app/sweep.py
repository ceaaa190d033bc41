"""Compares the jobs of a Hydra sweep in one table.

The Trainer of each job writes ``result.json`` to its folder when a fit ends, under any Hydra launcher. When the sweep
ends, the process that started it reads all of them. The command uses :class:`CompareRuns` by default; another app adds
``override hydra/callbacks: compare_runs`` to its defaults.
"""

from __future__ import annotations

import atexit
import json
import time
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback as HydraCallback
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from lightning_zero.planner import aligned

RESULT = "result.json"
COMPARISON = "comparison.txt"


class RunRecord(Callback):
    """Writes the final metrics, the steps and the seconds of a fit into the folder of its Hydra job.

    The metrics are the Trainer's ``callback_metrics``, so no logger is needed.
    """

    def __init__(self) -> None:
        self._folder = Path(HydraConfig.get().runtime.output_dir)  # read it now: a spawned rank has no HydraConfig
        self._since = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        record = {
            "seconds": time.perf_counter() - self._since,
            "steps": trainer.global_step,
            "ranks": trainer.world_size,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }
        (self._folder / RESULT).write_text(json.dumps(record, indent=1), encoding="utf-8")


class CompareRuns(HydraCallback):
    """Prints a table of a sweep's jobs when the sweep ends, and stores it in the sweep's folder."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._folder = Path(str(config.hydra.sweep.dir)).resolve()
        atexit.register(self._report)  # after a failed job Hydra does not call on_multirun_end

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self._report)
        self._report()

    def _report(self) -> None:
        if table := compare(self._folder):
            (self._folder / COMPARISON).write_text(table + "\n", encoding="utf-8")
            print(f"\n{table}", flush=True)


def compare(folder: Path) -> str:
    """A table with one line per job under ``folder``: the overrides in which it differs from the others, and its
    result."""
    found = (path.parent.parent for path in folder.glob("**/.hydra/overrides.yaml"))
    jobs = sorted(found, key=lambda job: (len(job.name), job.name))
    overrides = [yaml.safe_load((job / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")) for job in jobs]
    if not jobs:
        return ""
    common = set.intersection(*map(set, overrides))
    records = [_read(job / RESULT) for job in jobs]
    names = list(dict.fromkeys(name for record in records if record for name in record["metrics"]))
    rows = [["job", "overrides", "ranks", "steps", "seconds", *names]]
    for job, given, record in zip(jobs, overrides, records, strict=True):
        own = " ".join(item for item in given if item not in common) or "-"
        if record is None:
            rows.append([job.name, own, "did not finish a fit", *[""] * (2 + len(names))])
            continue
        facts = [str(record["ranks"]), str(record["steps"]), f"{record['seconds']:.1f}"]
        values = [record["metrics"].get(name) for name in names]
        rows.append([job.name, own, *facts, *("" if value is None else f"{value:.6g}" for value in values)])
    return "\n".join(aligned(rows))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record
