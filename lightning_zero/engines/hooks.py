"""Which hooks of the user's look at the module where an engine would rather leave it as it is."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

_BETWEEN_MICRO_BATCHES = ("on_after_backward", "on_train_batch_end", "on_train_batch_start", "on_before_zero_grad")
"""Hooks that can look at the module after one micro-batch and before the next."""
_NOT_THE_USERS = ("lightning.", "pytorch_lightning.", "lightning_zero.")


def user_looks_between_micro_batches(trainer: Any, module: nn.Module) -> bool:
    """Whether a hook outside Lightning itself runs after one micro-batch and before the next."""
    if any(is_overridden(hook, module) for hook in _BETWEEN_MICRO_BATCHES):
        return True
    foreign = [c for c in trainer.callbacks if not type(c).__module__.startswith(_NOT_THE_USERS)]
    return any(is_overridden(hook, c, parent=Callback) for c in foreign for hook in _BETWEEN_MICRO_BATCHES)
