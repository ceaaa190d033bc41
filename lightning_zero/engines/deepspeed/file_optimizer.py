"""Builds PyTorch objects from a DeepSpeed file's ``optimizer`` and ``scheduler`` sections.

They are used if the module has no ``configure_optimizers``. Either way the engine receives an ordinary optimizer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_zero.config import RawConfig

_AUTO = "auto"
_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
_SCHEDULERS = ("WarmupLR", "WarmupDecayLR")
"""Classes of ``deepspeed.runtime.lr_schedules``."""


def make_optimizer(raw: RawConfig, parameters: Iterable[torch.Tensor]) -> Optimizer:
    """Makes the optimizer of the file's section over those of ``parameters`` that require a gradient.

    ``"auto"`` means PyTorch's default. ``lr="auto"`` is refused, because no default learning rate suits every module.

    Raises:
        ValueError: If a value cannot be used; the message names the value in the file and the one to write instead.
    """
    made, settings = _optimizer_of(raw)
    if raw.section("optimizer").get("params", {}).get("lr") == _AUTO:
        raise ValueError(f'optimizer.params.lr="auto" in {raw.origin}: Lightning has no learning rate; use a number.')
    return made([p for p in parameters if p.requires_grad], **settings)


def make_scheduler(raw: RawConfig, optimizer: Optimizer, total_steps: Callable[[], float]) -> LRScheduler | None:
    """Makes the schedule of the file's section, to be stepped after each optimizer step; ``None`` without a section.

    Args:
        raw: The file.
        optimizer: From :func:`make_optimizer`.
        total_steps: Returns the number of optimizer steps in the entire run, for ``total_num_steps: "auto"``.
    """
    section = raw.section("scheduler")
    name, given = section.get("type"), section.get("params") or {}
    if name is None:
        return None
    if name not in _SCHEDULERS:
        raise ValueError(
            f"scheduler.type={name!r} in {raw.origin}: use {' or '.join(_SCHEDULERS)}, or return your own schedule from"
            " configure_optimizers()."
        )
    from deepspeed.runtime import lr_schedules  # only this engine needs it

    made = getattr(lr_schedules, name)
    settings = _params(raw, "scheduler", made)
    if given.get("warmup_num_steps") == _AUTO:
        raise ValueError(f'scheduler.params.warmup_num_steps="auto" in {raw.origin}: use a number of steps.')
    if given.get("warmup_max_lr") == _AUTO:
        settings["warmup_max_lr"] = optimizer.defaults["lr"]
    if given.get("total_num_steps") == _AUTO:
        steps = total_steps()
        if not math.isfinite(steps):
            raise ValueError(f'scheduler.params.total_num_steps="auto" in {raw.origin}: set Trainer(max_steps=...).')
        settings["total_num_steps"] = int(steps)
    return DeepSpeedSchedule(made(optimizer, **settings))


class DeepSpeedSchedule(LRScheduler):
    """Wraps one of DeepSpeed's schedules in PyTorch's interface, which Lightning requires."""

    def __init__(self, schedule: Any) -> None:
        # LRScheduler.__init__ is not called, because it takes a first step: DeepSpeed's schedule has set the first
        # learning rate already.
        self.schedule, self.optimizer = schedule, schedule.optimizer

    def step(self, epoch: int | None = None) -> None:
        self.schedule.step() if epoch is None else self.schedule.step(epoch)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Returns the current learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.schedule.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state_dict)


# -- meaning of a section -------------------------------------------------------------------------------------------


def _optimizer_of(raw: RawConfig) -> tuple[type[Optimizer], dict[str, Any]]:
    """Returns the class and its settings. As in DeepSpeed, ``"Adam"`` means AdamW unless ``adam_w_mode`` is false."""
    name = raw.section("optimizer").get("type")
    made = _OPTIMIZERS.get(str(name).lower())
    if made is None:
        raise ValueError(
            f"optimizer.type={name!r} in {raw.origin}: use 'AdamW', 'Adam' or 'SGD', or return your own optimizer from"
            " configure_optimizers()."
        )
    settings = _params(raw, "optimizer", made, "adam_w_mode", "torch_adam")
    settings.pop("torch_adam", None)
    decoupled = settings.pop("adam_w_mode", True)
    return (torch.optim.AdamW if made is torch.optim.Adam and decoupled else made), settings


def _params(raw: RawConfig, section: str, made: type, *more: str) -> dict[str, Any]:
    """Returns the section's arguments for ``made`` (or in ``more``) whose value is not ``"auto"``."""
    given = raw.section(section).get("params") or {}
    known = [*list(inspect.signature(made).parameters)[1:], *more]
    for key, value in given.items():
        if key not in known:
            raise ValueError(
                f"{section}.params.{key}={value!r} in {raw.origin} is not a setting of {made.__name__}: use"
                f" {', '.join(known)}."
            )
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if value != _AUTO}
