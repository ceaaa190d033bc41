"""The logger behind ``logger=csv``: one ``metrics.csv`` for a run, however often the run is interrupted."""

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
    """Writes ``metrics.csv`` (a row for each logged step, a column for each metric) and ``hparams.yaml``.

    Lightning's own ``CSVLogger`` begins a folder ``version_N`` whenever a process starts, so that a requeued run's
    metrics lie in several. This one goes on with the file that is there; rows of steps that are trained again, because
    they lie behind the checkpoint the run continues from, are dropped.

    Args:
        save_dir: The folder.
        flush_every_n_rows: Rows that a kill may lose.
    """

    FILE = "metrics.csv"

    def __init__(self, save_dir: str | os.PathLike[str], flush_every_n_rows: int = 50) -> None:
        super().__init__()
        self._folder = Path(save_dir)
        self._every = flush_every_n_rows
        self._rows: list[dict[str, Any]] = []  # not on disk yet
        self._columns: list[str] = []  # of the file; empty until this process has written
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
            self._rows[-1].update(metrics)  # logged apart, as learning rates are
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
        """The file's rows; of an earlier process of this run those of steps ``before`` this one's first."""
        try:
            with open(self.path, newline="", encoding="utf-8") as file:
                rows: list[dict[str, Any]] = list(csv.DictReader(file))
        except FileNotFoundError:
            return []
        # a row that a kill has cut off has no number, or another column's
        whole = [row for row in rows if None not in row.values() and str(row.get("step", "")).isdigit()]
        kept = [row for row in whole if before is None or int(row["step"]) < before]
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
        os.replace(aside, self.path)  # whole or not at all

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()
