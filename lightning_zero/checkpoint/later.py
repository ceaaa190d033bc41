"""Values for parameters on the meta device, read when the parameters get memory.

The value lies on the parameter itself, as an attribute: it stays with the parameter wherever modules are replaced
around it, and goes with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_lightning_zero_value"


def leave(parameter: Tensor, value: Tensor) -> None:
    """``parameter`` is on the meta device; ``value``, of its shape, is to be its value."""
    setattr(parameter, _ATTRIBUTE, value)


def left(parameter: Tensor) -> Tensor | None:
    """What :func:`leave` has left, if anything."""
    return getattr(parameter, _ATTRIBUTE, None)


def become(tensor: Any, value: Tensor) -> None:
    """``tensor``, on the meta device, is from now on where ``value`` is and as it is: the same object with the same
    attributes, whoever holds it."""
    attributes = {k: v for k, v in vars(tensor).items() if k != _ATTRIBUTE}
    requires_grad = tensor.requires_grad
    new: Any = torch.nn.Parameter(value, requires_grad) if isinstance(tensor, torch.nn.Parameter) else value
    if type(new) is not type(tensor):
        new = new.as_subclass(type(tensor)) if type(tensor) is not Tensor else new
    torch.utils.swap_tensors(tensor, new)
    vars(tensor).update(attributes)
    tensor.requires_grad_(requires_grad)
