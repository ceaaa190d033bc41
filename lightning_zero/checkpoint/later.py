"""Stores values for parameters without memory, to be read when the parameters are materialized: those on the meta
device, and those that an earlier run has left sharded.

A value belongs to the parameter object, so it stays with the parameter if modules around it are replaced, and is freed
with it. It is not an attribute, because user code copies attributes to other parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.comm.shards import gathered
from lightning_zero.private.torch import DisableTorchFunctionSubclass, set_data

_values: Any = WeakIdKeyDictionary()


Value = Tensor | Callable[[], Tensor]
"""A full tensor, a shard, or a function that gathers a full tensor (collective)."""


def leave(parameter: Tensor, value: Value) -> None:
    """Stores ``value`` as the future value of ``parameter``, which has no memory and the same shape."""
    _values[parameter] = value


def left(parameter: Tensor) -> Value | None:
    """The value that :func:`leave` stored, or ``None``."""
    found: Value | None = _values.get(parameter)
    return found


def full_value(value: Value) -> Tensor:
    """The full tensor (collective, unless ``value`` is one)."""
    return gathered(value) if isinstance(value, Tensor) else value()


def has_no_memory(tensor: Tensor) -> bool:
    """Whether ``tensor`` is on the meta device, or an earlier run has left it sharded."""
    return tensor.is_meta or left(tensor) is not None


def memory_for(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Allocates the memory that ``tensor`` lacks."""
    with DisableTorchFunctionSubclass():  # user code that reads a sharded tensor would gather it
        return torch.empty_like(tensor, device=device)


def become(tensor: Any, value: Tensor) -> None:
    """Materializes ``tensor``, which has no memory, with that of ``value``. ``tensor`` stays the same object, with the
    same attributes, for all code that holds it."""
    _values.pop(tensor, None)
    if not tensor.is_meta:  # an earlier run has left it sharded
        set_data(tensor, value)
        tensor.__class__ = tensor.ordinary
        return
    attributes = dict(vars(tensor))
    requires_grad = tensor.requires_grad
    new: Any = nn.Parameter(value, requires_grad) if isinstance(tensor, nn.Parameter) else value
    if type(new) is not type(tensor):
        new = new.as_subclass(type(tensor)) if type(tensor) is not Tensor else new
    torch.utils.swap_tensors(tensor, new)
    vars(tensor).update(attributes)
    tensor.requires_grad_(requires_grad)


@contextmanager
def leaving_for_later() -> Iterator[None]:
    """Lets ``load_state_dict`` store values for tensors without memory. Without this it warns and drops them."""
    with warnings.catch_warnings(), _Leaving():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter in the checkpoint to a meta")
        yield


class _Leaving(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.copy_ or not has_no_memory(args[0]) or args[1].is_meta:
            return func(*args, **(kwargs or {}))
        target, value = args[0], args[1]
        if value.shape != target.shape:
            raise ValueError(f"a value of shape {tuple(value.shape)} for a tensor of shape {tuple(target.shape)}")
        if isinstance(target, nn.Parameter):
            leave(target, value)
        else:  # a buffer is small, and code that replaces it (to change its dtype) must find its values
            become(target, memory_for(target, "cpu").copy_(value))
        return target
