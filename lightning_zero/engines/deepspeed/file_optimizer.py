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
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

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
    settings = _params(raw, "scheduler", _warmed_up)
    if (section.get("params") or {}).get("warmup_max_lr") == _AUTO:
        settings["warmup_max_lr"] = optimizer.defaults["lr"]
    for group in optimizer.param_groups:
        group["lr"] = 1.0  # which LambdaLR multiplies
    return LambdaLR(optimizer, lambda num_steps: _warmed_up(num_steps, **settings))


def _warmed_up(
    num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> float:
    """The learning rate of DeepSpeed's ``WarmupLR`` after ``num_steps`` steps, whose first two rates are equal."""
    num, done = max(2, warmup_num_steps), max(0, num_steps - 1)
    part = done / num if warmup_type == "linear" else math.log(done + 1) / math.log(num)
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * min(1.0, part)


def _params(raw: RawConfig, section: str, made: Callable[..., Any], *more: str) -> dict[str, Any]:
    """Returns the section's arguments for ``made``, after its first one, or in ``more``, whose value is not
    ``"auto"``."""
    given = raw.section(section).get("params") or {}
    known = [*list(inspect.signature(made).parameters)[1:], *more]
    for key, value in given.items():
        if key not in known:
            raise ValueError(
                f"{section}.params.{key}={value!r} in {raw.origin} is not a setting of"
                f" {raw.section(section)['type']}: use {', '.join(known)}."
            )
        if value == _AUTO and key in _NEED_NUMBERS:
            raise ValueError(f'{section}.params.{key}="auto" in {raw.origin}: Lightning has no default; use a number.')
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if value != _AUTO}
