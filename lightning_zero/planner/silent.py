"""A Trainer that does nothing, for steps that are only traced."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_zero.twins import TWINS


class SilentTrainer(Trainer):
    """Enough of a Trainer for a traced step: logs nothing, knows how many steps there will be."""

    def __init__(self, max_steps: int) -> None:
        self._planned_steps = max_steps
        with quiet():
            super().__init__(
                barebones=True,
                accelerator="cpu",
                devices=1,
                max_steps=max_steps,
                max_epochs=-1,
                plugins=[LightningEnvironment()],  # whatever cluster this process belongs to
            )

    @property
    def estimated_stepping_batches(self) -> int | float:
        return self._planned_steps


class DefaultDtype:
    """``torch.set_default_dtype`` for the length of a block, as Lightning's ``*-true`` precisions do."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)

    def __exit__(self, *unused: object) -> None:
        torch.set_default_dtype(self.before)


@contextmanager
def quiet() -> Iterator[None]:
    """A second Trainer need not tell about the machine again."""
    loggers = [logging.getLogger(name) for name in TWINS]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)


def training_step(module: LightningModule, batch: Any) -> Tensor | None:
    module.train()
    output = module.training_step(batch, 0)
    if not module.automatic_optimization:
        return None
    return output["loss"] if isinstance(output, Mapping) else output  # type: ignore[return-value]


def no_step(*args: Any, **kwargs: Any) -> None:
    closure = kwargs.get("closure", args[0] if args else None)
    if closure is not None:
        closure()


def fake_loss(device: torch.device) -> Tensor:
    return torch.empty((), device=device)
