"""A DeepSpeed file's ``optimizer`` and ``scheduler`` sections as PyTorch objects.

They serve where the module has no ``configure_optimizers``, so that the engine meets an ordinary optimizer either way.
Names and defaults are those of DeepSpeed's ``_configure_basic_optimizer``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_zero.config import RawConfig

_ADAMS = ("adam", "adamw")
_FOREIGN = {
    "lamb": "LAMB",
    "lion": "Lion",
    "muon": "DeepSpeed's Muon",
    "muadam": "muP",
    "muadamw": "muP",
    "musgd": "muP",
    "onebitadam": "1-bit Adam, which DeepSpeed removed",
    "zerooneadam": "0/1 Adam, which DeepSpeed removed",
    "onebitlamb": "1-bit LAMB, which DeepSpeed removed",
}
_ONLY_DEEPSPEED = {"torch_adam": None, "bias_correction": True, "fp32_optimizer_states": True, "legacy_fusion": None}
"""Parameters that name an implementation, and the value PyTorch's classes stand for (``None``: any)."""


def make_optimizer(raw: RawConfig, parameters: Iterable[Any]) -> Optimizer:
    """The optimizer of the file's section, over ``parameters`` (tensors or groups).

    ``"auto"`` leaves a value to PyTorch's default, except ``lr``, which has none that would fit.

    Raises:
        ValueError: Naming the value in the file and the one to write instead.
    """
    made, settings = _optimizer_of(raw)
    parameters = [p for p in parameters if not isinstance(p, torch.Tensor) or p.requires_grad]
    try:
        return made(parameters, **settings)
    except TypeError as error:
        raise ValueError(f"optimizer.params={settings} in {raw.origin}: {made.__name__} says {error}.") from error


def make_scheduler(raw: RawConfig, optimizer: Optimizer, total_steps: Callable[[], float]) -> LRScheduler | None:
    """The schedule of the file's section, to be stepped after each optimizer step; ``None`` if there is none.

    Args:
        raw: The file.
        optimizer: From :func:`make_optimizer`.
        total_steps: Says how many optimizer steps the whole run takes, for ``total_num_steps: "auto"``.
    """
    section = raw.section("scheduler")
    name = section.get("type")
    if not section or name is None:
        return None
    settings = dict(section.get("params") or {})
    if settings.get("total_num_steps") == "auto":
        steps = total_steps()
        if not math.isfinite(steps):
            raise ValueError(f'scheduler.params.total_num_steps="auto" in {raw.origin}: set Trainer(max_steps=...).')
        settings["total_num_steps"] = int(steps)
    if settings.get("warmup_num_steps") == "auto":
        raise ValueError(f'scheduler.params.warmup_num_steps="auto" in {raw.origin}: use a number of steps.')
    settings = {key: value for key, value in settings.items() if value != "auto"}
    made = _scheduler_class(name, raw)
    known = [p for p in inspect.signature(made).parameters if p != "optimizer"]
    for key in settings:
        if key not in known:
            raise ValueError(f"scheduler.params.{key} in {raw.origin} is no setting of {name}: use {', '.join(known)}.")
    if issubclass(made, LRScheduler):
        return made(optimizer, **settings)
    return DeepSpeedSchedule(made(optimizer, **settings))


def check_optimizer(raw: RawConfig, optimizers: Iterable[Optimizer]) -> None:
    """Raises ``ValueError`` if the file's optimizer is another than the module's own, naming both values.

    Values that the file leaves out or calls ``"auto"`` are the module's.
    """
    section = raw.section("optimizer")
    if not section or section.get("type", "auto") == "auto":
        return
    made, settings = _optimizer_of(raw, auto_lr=True)
    repair = 'leave one of the two out, make them equal, or "auto" in the file.'
    for optimizer in optimizers:
        if type(optimizer) is not made:
            raise ValueError(
                f"optimizer.type={section['type']!r} in {raw.origin} means {made.__name__}, but configure_optimizers()"
                f" returned {type(optimizer).__name__}: {repair}"
            )
        for key, value in settings.items():
            mine = optimizer.defaults.get(key)
            if _plain(mine) != _plain(value):
                raise ValueError(
                    f"optimizer.params.{key}={value!r} in {raw.origin}, but configure_optimizers() set {mine!r}:"
                    f" {repair}"
                )


class DeepSpeedSchedule(LRScheduler):
    """One of DeepSpeed's schedules with PyTorch's interface, which Lightning asks for."""

    def __init__(self, schedule: Any) -> None:
        # Not LRScheduler's own, which would take a first step: DeepSpeed's have set the first rate when they are made.
        self.schedule, self.optimizer = schedule, schedule.optimizer

    def step(self, epoch: int | None = None) -> None:
        self.schedule.step() if epoch is None else self.schedule.step(epoch)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.schedule.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state_dict)


# -- meaning of a section -------------------------------------------------------------------------------------------


def _optimizer_of(raw: RawConfig, auto_lr: bool = False) -> tuple[type[Optimizer], dict[str, Any]]:
    section = raw.section("optimizer")
    name = section.get("type")
    if not isinstance(name, str):
        raise ValueError(f"optimizer.type={name!r} in {raw.origin}: use a name such as 'AdamW'.")
    given = dict(section.get("params") or {})
    if "max_grad_norm" in given:
        raise ValueError(
            f"optimizer.params.max_grad_norm={given['max_grad_norm']!r} in {raw.origin}: use"
            " Trainer(gradient_clip_val=...)."
        )
    if given.get("lr") == "auto" and not auto_lr:
        raise ValueError(f'optimizer.params.lr="auto" in {raw.origin}: Lightning has no learning rate; use a number.')
    lower = name.lower()
    if lower in _FOREIGN:
        raise ValueError(
            f"optimizer.type={name!r} in {raw.origin} is {_FOREIGN[lower]}, which PyTorch has not: return one from"
            " configure_optimizers(), or use AdamW."
        )
    settings = {key: value for key, value in given.items() if value != "auto"}
    for key, stands_for in _ONLY_DEEPSPEED.items():
        value = settings.pop(key, stands_for)
        if stands_for is not None and value != stands_for:
            raise ValueError(f"optimizer.params.{key}={value!r} in {raw.origin}: use {stands_for!r}, or leave it out.")
    if lower in _ADAMS:
        # As in DeepSpeed: "Adam" decays weights as AdamW does, unless it says otherwise.
        decoupled = settings.pop("adam_w_mode", True) or lower == "adamw"
        return (torch.optim.AdamW if decoupled else torch.optim.Adam), _lists_as_tuples(settings)
    known = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    if lower not in known or not issubclass(known[lower], Optimizer) or known[lower] is Optimizer:
        raise ValueError(
            f"optimizer.type={name!r} in {raw.origin} is no optimizer of torch.optim: use one, such as 'AdamW' or"
            " 'SGD', or return yours from configure_optimizers()."
        )
    return known[lower], _lists_as_tuples(settings)


def _scheduler_class(name: str, raw: RawConfig) -> Any:
    try:
        from deepspeed.runtime import lr_schedules  # only this engine needs it
    except ImportError:
        lr_schedules = None
    if lr_schedules is not None and name in lr_schedules.VALID_LR_SCHEDULES:
        return getattr(lr_schedules, name)
    made = getattr(torch.optim.lr_scheduler, name, None)
    if not (isinstance(made, type) and issubclass(made, LRScheduler)):
        raise ValueError(
            f"scheduler.type={name!r} in {raw.origin}: use WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle,"
            " LRRangeTest or a class of torch.optim.lr_scheduler."
        )
    return made


def _lists_as_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value
