"""Sets of torch functions: getters, and collectives that write to their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

IN_PLACE_COLLECTIVES: frozenset[Callable[..., Any]] = frozenset(
    (dist.all_reduce, dist.all_reduce_coalesced, dist.broadcast)
)
"""Collectives that leave the same values in their argument on every rank of their group. Before torch 2.13,
``broadcast`` is not a torch function, and raises for a sharded parameter."""


def getters(names: str) -> frozenset[Any]:
    """Returns the functions that read the attributes ``names`` of a tensor."""
    found = (getattr(Tensor, name, None) for name in names.split())
    return frozenset(each.__get__ for each in found if each is not None)


AS_THEY_ARE = getters(
    "shape requires_grad is_leaf grad_fn ndim layout is_cuda is_cpu is_meta is_sparse _version names _backward_hooks"
    " _post_accumulate_grad_hooks"
)
"""Functions that read attributes that a tensor without memory has, too."""


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors in a call's arguments or results, including nested lists and tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, Tensor):
            yield value
