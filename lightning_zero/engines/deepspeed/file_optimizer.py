"""Builds PyTorch objects from a DeepSpeed file's ``optimizer`` and ``scheduler`` sections.

They are used if the module has no ``configure_optimizers``. Either way the engine receives an ordinary optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
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
_NEED_NUMBERS = ("lr", "warmup_num_steps")
"""Settings for which ``"auto"`` is refused, because no default suits every module."""


def make_optimizer(raw: RawConfig, parameters: Iterable[torch.Tensor]) -> Optimizer:
    """Makes the optimizer of the file's section over those of ``parameters`` that require a gradient.

    ``"auto"`` means PyTorch's default. As in DeepSpeed, ``"Adam"`` means AdamW unless ``adam_w_mode`` is false.

    Raises:
        ValueError: If a value cannot be used; the message names the value in the file and the one to write instead.
    """
    name = raw.section("optimizer").get("type")
    made = _OPTIMIZERS.get(str(name).lower())
    if made is None:
        raise ValueError(
            f"optimizer.type={name!r} in {raw.origin}: use 'AdamW', 'Adam' or 'SGD', or return your own optimizer from"
            " configure_optimizers()."
        )
    settings = _params(raw, "optimizer", made, "adam_w_mode", "torch_adam")
    settings.pop("torch_adam", None)
    if settings.pop("adam_w_mode", True) and made is torch.optim.Adam:
        made = torch.optim.AdamW
    return made([p for p in parameters if p.requires_grad], **settings)


def make_scheduler(raw: RawConfig, optimizer: Optimizer) -> LRScheduler | None:
    """Makes the file's ``WarmupLR``, to be stepped after each optimizer step; ``None`` without a section.

    Args:
        raw: The file.
        optimizer: From :func:`make_optimizer`. Its learning rate replaces ``warmup_max_lr: "auto"``.
    """
    section = raw.section("scheduler")
    if not section:
        return None
    if section.get("type") != "WarmupLR":
        raise ValueError(
            f"scheduler.type={section.get('type')!r} in {raw.origin}: use 'WarmupLR', or return your own schedule from"
            " configure_optimizers()."
        )
    from deepspeed.runtime.lr_schedules import WarmupLR  # only this engine needs it

    settings = _params(raw, "scheduler", WarmupLR)
    if (section.get("params") or {}).get("warmup_max_lr") == _AUTO:
        settings["warmup_max_lr"] = optimizer.defaults["lr"]
    return DeepSpeedSchedule(WarmupLR(optimizer, **settings))


class DeepSpeedSchedule(LRScheduler):
    """Wraps DeepSpeed's schedule in PyTorch's interface, which Lightning requires."""

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
        if value == _AUTO and key in _NEED_NUMBERS:
            raise ValueError(f'{section}.params.{key}="auto" in {raw.origin}: Lightning has no default; use a number.')
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if value != _AUTO}
