"""The user's hooks that look at the module where an engine would rather leave it as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

_BETWEEN_MICRO_BATCHES = ("on_after_backward", "on_train_batch_end", "on_train_batch_start", "on_before_zero_grad")
"""Hooks that can look at the module after one micro-batch and before the next."""
_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")
"""Hooks that can look at the gradients and parameters with which an optimizer is about to step."""
_IN_STEP = ("configure_gradient_clipping", "optimizer_step")
"""The same, of the module alone."""
_NOT_THE_USERS = ("lightning.", "pytorch_lightning.", "lightning_zero.")


def user_looks_between_micro_batches(trainer: Any, module: nn.Module) -> bool:
    """Whether a hook outside Lightning itself runs after one micro-batch and before the next."""
    return _overrides(trainer, module, _BETWEEN_MICRO_BATCHES)


def user_looks_before_step(trainer: Any, module: nn.Module) -> bool:
    """Whether code outside Lightning itself runs after a backward and before its optimizer's step."""
    return _overrides(trainer, module, _BEFORE_STEP) or any(is_overridden(hook, module) for hook in _IN_STEP)


def _overrides(trainer: Any, module: nn.Module, hooks: Iterable[str]) -> bool:
    if any(is_overridden(hook, module) for hook in hooks):
        return True
    foreign = [c for c in trainer.callbacks if not type(c).__module__.startswith(_NOT_THE_USERS)]
    return any(is_overridden(hook, c, parent=Callback) for c in foreign for hook in hooks)
