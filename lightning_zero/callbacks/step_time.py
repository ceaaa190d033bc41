"""Logs the duration of an optimizer step."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class StepTime(Callback):
    """Logs ``step_seconds`` to the progress bar and the loggers: rank 0's wall-clock time of one optimizer step,
    including its micro-batches and the loading of their data."""

    def __init__(self) -> None:
        self._step = -1
        self._since = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = -1  # the time between epochs (validation, checkpoints) is part of no step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            return  # a micro-batch that only accumulated
        now = time.perf_counter()
        if self._step >= 0:
            seconds = (now - self._since) / (trainer.global_step - self._step)
            pl_module.log("step_seconds", seconds, prog_bar=True, rank_zero_only=True)
        self._step, self._since = trainer.global_step, now

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = -1
