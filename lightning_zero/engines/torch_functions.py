"""What torch functions do to their arguments, as far as their names tell; both engines' views go by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import init

_SPECIAL_IN_PLACE = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"))


def is_in_place(name: str) -> bool:
    """Whether the torch function called ``name`` writes to its first argument."""
    return name in _SPECIAL_IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def by_position(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Sequence[Any], dict[str, Any]]:
    """The first argument, the others, and those by name: ``torch.nn.init`` passes its tensor by name."""
    if args:
        return args[:1], args[1:], kwargs
    return list(kwargs.values())[:1], (), dict(list(kwargs.items())[1:])


def initializes(func: Callable[..., Any]) -> bool:
    """Whether ``func`` is one of ``torch.nn.init``, which switch gradients off themselves."""
    return getattr(func, "__module__", "") == init.__name__


def needs_no_grad(name: str) -> RuntimeError:
    """What torch says of a write to a leaf that requires a gradient."""
    return RuntimeError(
        f"a leaf Variable that requires grad is being used in an in-place operation ({name}): write to a parameter"
        " under torch.no_grad() or through .data."
    )
