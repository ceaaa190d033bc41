"""The logger of ``logger=csv``: one ``metrics.csv`` per run, even if the run is interrupted and requeued."""

from __future__ import annotations

import csv
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import Logger


class MetricsFile(Logger):
    """Writes ``metrics.csv`` (a row per logged step, a column per metric) and ``hparams.yaml``.

    Lightning's ``CSVLogger`` creates a folder ``version_N`` in each process, which spreads the metrics of a requeued
    run over several folders. This logger continues the existing file. It drops rows of steps after the checkpoint from
    which the run resumes, because those steps are trained again.

    Args:
        save_dir: Folder of both files.
        flush_every_n_rows: Rows per write; a kill loses at most as many.
    """

    FILE = "metrics.csv"

    def __init__(self, save_dir: str | os.PathLike[str], flush_every_n_rows: int = 50) -> None:
        super().__init__()
        self._folder = Path(save_dir)
        self._every = flush_every_n_rows
        self._rows: list[dict[str, Any]] = []  # not on disk yet
        self._columns: list[str] = []  # columns of the file; empty until this process has written
        self._hparams: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""  # one folder per run

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    @property
    def log_dir(self) -> str:
        return str(self._folder)

    @property
    def path(self) -> Path:
        return self._folder / self.FILE

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self._hparams.update(vars(params) if isinstance(params, Namespace) else params)
        if self._hparams:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_hparams_to_yaml(str(self._folder / "hparams.yaml"), self._hparams)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = len(self._rows) if step is None else step
        if self._rows and self._rows[-1]["step"] == step and not self._rows[-1].keys() & metrics.keys():
            self._rows[-1].update(metrics)  # the same step logged in a second call, as for learning rates
            return
        self._rows.append({"step": step, **metrics})
        if len(self._rows) >= self._every:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        new = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in self._columns]
        if not self._columns or new:
            self._write(self._kept(rows[0]["step"] if not self._columns else None), new, rows)
            return
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerows(rows)

    def _kept(self, before: int | None) -> list[dict[str, Any]]:
        """The rows of the file; those of an earlier process only up to ``before``, this process's first step."""
        try:
            with open(self.path, newline="", encoding="utf-8") as file:
                rows: list[dict[str, Any]] = list(csv.DictReader(file))
        except FileNotFoundError:
            return []
        # A row that a kill truncated lacks cells or has no valid step.
        complete = [row for row in rows if None not in row.values() and str(row.get("step", "")).isdigit()]
        kept = [row for row in complete if before is None or int(row["step"]) < before]
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in kept[:1] for name in row)]))
        return kept

    def _write(self, kept: list[dict[str, Any]], new: list[str], rows: list[dict[str, Any]]) -> None:
        self._columns += [name for name in new if name not in self._columns]
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".new")
        with open(aside, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows([*kept, *rows])
        os.replace(aside, self.path)  # atomic

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()
