"""A few steps of a run as a Chrome trace, one file per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity


class ChromeTrace(Callback):
    """Writes ``trace-rank<r>.json`` (for chrome://tracing or Perfetto).

    Args:
        folder: Where to; ``None`` is the Trainer's ``default_root_dir``.
        skip_steps: Optimizer steps before the first one recorded, to leave out warm-up.
        num_steps: Optimizer steps recorded; a shorter run is written as far as it came.
    """

    def __init__(self, folder: str | None = None, skip_steps: int = 2, num_steps: int = 3) -> None:
        for name, value, least in (("skip_steps", skip_steps, 0), ("num_steps", num_steps, 1)):
            if value < least:
                raise ValueError(f"{name}={value!r}: use {least} or more.")
        self.folder, self.skip_steps, self.num_steps = folder, skip_steps, num_steps
        self.path: Path | None = None
        """The file, once it is written."""
        self._profiler: torch.profiler.profile | None = None
        self._first = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.path, self._first = None, trainer.global_step + self.skip_steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._profiler is None and self.path is None and trainer.global_step >= self._first:
            activities = [ProfilerActivity.CPU]
            if trainer.strategy.root_device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()

    def on_train_batch_end(self, trainer: Trainer, *unused: Any) -> None:
        if self._profiler is not None and trainer.global_step >= self._first + self.num_steps:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is not None:
            self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, trainer: Trainer) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        folder = Path(self.folder or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"trace-rank{trainer.global_rank}.json"
        self._profiler.export_chrome_trace(str(self.path))
        self._profiler = None
