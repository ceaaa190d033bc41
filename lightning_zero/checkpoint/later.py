"""Values for parameters on the meta device, read when the parameters get memory.

The value lies on the parameter itself, as an attribute: it stays with the parameter wherever modules are replaced
around it, and goes with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_ATTRIBUTE = "_lightning_zero_value"


def leave(parameter: Tensor, value: Tensor) -> None:
    """``parameter`` is on the meta device; ``value``, of its shape, is to be its value."""
    setattr(parameter, _ATTRIBUTE, value)


def left(parameter: Tensor) -> Tensor | None:
    """The value that :func:`leave` has left, if any."""
    return getattr(parameter, _ATTRIBUTE, None)


def become(tensor: Any, value: Tensor) -> None:
    """``tensor``, on the meta device, is from now on where ``value`` is and as it is: the same object with the same
    attributes, whoever holds it."""
    attributes = {k: v for k, v in vars(tensor).items() if k != _ATTRIBUTE}
    requires_grad = tensor.requires_grad
    new: Any = nn.Parameter(value, requires_grad) if isinstance(tensor, nn.Parameter) else value
    if type(new) is not type(tensor):
        new = new.as_subclass(type(tensor)) if type(tensor) is not Tensor else new
    torch.utils.swap_tensors(tensor, new)
    vars(tensor).update(attributes)
    tensor.requires_grad_(requires_grad)


@contextmanager
def leaving_for_later() -> Iterator[None]:
    """Inside, ``load_state_dict`` leaves values for what is on the meta device; without, it warns and drops them."""
    with warnings.catch_warnings(), _Leaving():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter in the checkpoint to a meta")
        yield


class _Leaving(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.copy_ or not args[0].is_meta or args[1].is_meta:
            return func(*args, **(kwargs or {}))
        target, value = args[0], args[1]
        if value.shape != target.shape:
            raise ValueError(f"a value of shape {tuple(value.shape)} for a tensor of shape {tuple(target.shape)}")
        if isinstance(target, nn.Parameter):
            leave(target, value)
        else:  # small; and whoever replaces buffers, as a change of their dtype does, keeps the values
            become(target, torch.empty_like(target, device="cpu").copy_(value))
        return target
