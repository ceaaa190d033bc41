"""Detects user hooks, so that an engine knows at which moments user code runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

_BETWEEN_MICRO_BATCHES = ("on_after_backward", "on_train_batch_end", "on_train_batch_start", "on_before_zero_grad")
"""Hooks that can read the module after one micro-batch and before the next."""
_BEFORE_FORWARD = ("on_train_batch_start", "on_validation_batch_start", "optimizer_step")
"""Hooks after the message of the step synchronization and before a forward of a fit."""
_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad", "backward")
_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
"""Hooks that can read the gradients and parameters with which an optimizer is about to step."""
_OTHERS = ("lr_scheduler_step", "transfer_batch_to_device")
_NOT_THE_USERS = ("lightning.", "pytorch_lightning.", "lightning_zero.")


@dataclass(frozen=True)
class UserHooks:
    """Whether code from outside Lightning and this package runs at a moment, on any rank."""

    anywhere: bool = False
    between_micro_batches: bool = False
    before_forward: bool = False
    before_backward: bool = False
    before_step: bool = False

    @classmethod
    def of_any(cls, found: Iterable[UserHooks]) -> UserHooks:
        """Combines the hooks of all ranks: a field is true if it is true on any rank."""
        every = list(found)
        return cls(**{field.name: any(getattr(each, field.name) for each in every) for field in fields(cls)})


def user_hooks(trainer: Any, module: nn.Module) -> UserHooks:
    """The user hooks of this rank."""
    every = (vars(Callback) | vars(ModelHooks) | vars(CheckpointHooks) | vars(DataHooks)).items()
    names = {name for name, hook in every if name.startswith("on_") and callable(hook)}
    anywhere = _overrides(trainer, module, {*names, *_BEFORE_BACKWARD, *_BEFORE_STEP, *_OTHERS})
    fits = trainer.state.fn == TrainerFn.FITTING
    return UserHooks(
        anywhere,
        _overrides(trainer, module, _BETWEEN_MICRO_BATCHES),
        _overrides(trainer, module, _BEFORE_FORWARD) if fits else anywhere,
        _overrides(trainer, module, _BEFORE_BACKWARD),
        _overrides(trainer, module, _BEFORE_STEP),
    )


def _overrides(trainer: Any, module: nn.Module, hooks: Iterable[str]) -> bool:
    hooks = list(hooks)
    if any(hasattr(LightningModule, hook) and is_overridden(hook, module) for hook in hooks):
        return True
    for c in trainer.callbacks:
        if isinstance(c, LambdaCallback) or not type(c).__module__.startswith(_NOT_THE_USERS):
            if not vars(c).keys().isdisjoint(hooks):  # a LambdaCallback has its functions as attributes
                return True
            if any(hasattr(Callback, hook) and is_overridden(hook, c, parent=Callback) for hook in hooks):
                return True
    return False
