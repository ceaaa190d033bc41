"""Effects of torch functions on their arguments, as far as their names tell; both engines' views go by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import init
from torch.torch_version import TorchVersion

_SPECIAL_IN_PLACE = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"))

IN_PLACE_COLLECTIVES: frozenset[Callable[..., Any]] = frozenset(
    (dist.all_reduce, dist.all_reduce_coalesced, dist.broadcast)
)
"""They leave the same values on every rank of their group."""
BROADCAST_IS_SEEN: bool = TorchVersion(torch.__version__) >= "2.13"
"""Whether ``torch.distributed.broadcast`` is a torch function, which views see; ``all_reduce`` always was."""
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
    """The error, in torch's words, for a write to a leaf that requires a gradient."""
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


VIEWS = frozenset(
    "view view_as reshape reshape_as flatten unflatten ravel t transpose swapaxes swapdims permute movedim moveaxis"
    " adjoint narrow select unbind split chunk tensor_split hsplit vsplit dsplit squeeze unsqueeze expand expand_as"
    " diagonal unfold __getitem__ as_strided alias positive real imag contiguous".split()
)
"""Names of functions whose result may share the memory of their argument."""
VIEW_PROPERTIES = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Of a call's arguments or results, and of lists and tuples among them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, Tensor):
            yield value
