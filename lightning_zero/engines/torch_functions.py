"""What torch functions do to their arguments, as far as their names tell; both engines' views go by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn import init

_SPECIAL_IN_PLACE = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"))

IN_PLACE_COLLECTIVES: frozenset[Callable[..., Any]] = frozenset(
    (dist.all_reduce, dist.all_reduce_coalesced, dist.broadcast)
)
"""They leave the same values on every rank of their group. (Torch functions from 2.13 on; all_reduce, always.)"""
_OTHER_COLLECTIVES = {
    "recv": 0,
    "irecv": 0,
    "reduce": 0,
    "scatter": 0,
    "gather": 1,
    "all_gather": 0,
    "all_gather_coalesced": 0,
    "all_gather_single": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter": 0,
    "reduce_scatter_single": 0,
    "reduce_scatter_tensor": 0,
    "all_to_all": 0,
    "all_to_all_single": 0,
}


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


def written_by_collective(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The argument to which ``func`` of ``torch.distributed`` writes something else on each rank; ``None`` for all
    other functions."""
    if getattr(func, "__module__", "") != dist.distributed_c10d.__name__:
        return None
    at = _OTHER_COLLECTIVES.get(func.__name__)
    if at is None:
        return None
    return args[at] if at < len(args) else kwargs.get("gather_list")


def needs_own_tensor(name: str) -> ValueError:
    """A collective would write other values to a parameter on each rank."""
    return ValueError(
        f"torch.distributed.{name} into a sharded parameter or gradient leaves other values on each rank, which holds"
        f" only its share: {name} into a tensor of your own, then copy_ what all ranks have."
    )
