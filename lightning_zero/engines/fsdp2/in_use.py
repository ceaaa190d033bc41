"""Whole values of parameters that are away, which a step has computed with and its backward may need.

Under DDP they would be the parameters themselves. A write between their use and the backward raises there; one through
``.data``, which no version counter tells of, is what the backward goes on with; and an assignment to it is what the
backward of those operators goes on with that kept the parameter itself, and no view of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_zero.comm.shards import gathered
from lightning_zero.engines.fsdp2 import private


class Write(Enum):
    """Kind of write to a parameter."""

    COUNTED = auto()
    """Its version counter tells."""
    THROUGH_DATA = auto()
    """In place, past the counter."""
    OTHER_MEMORY = auto()
    """``p.data = x``"""


class ValuesInUse:
    """Of one step; the graph holds them, not this."""

    def __init__(self) -> None:
        self._read: dict[int, _Read] = {}  # by id of the shard

    def add(self, original: Tensor, known: private.ShardedParam, value: Tensor) -> Tensor:
        """``value`` was read of the shard of ``original`` by all ranks, differentiably."""
        entry = self._read.setdefault(id(known.sharded_param), _Read(original, known, []))
        entry.values.append(weakref.ref(value))
        return value

    def forget(self) -> None:
        """Another step begins."""
        self._read.clear()

    @contextmanager
    def followed(
        self,
        writing: Callable[[Iterable[Any]], AbstractContextManager[object]],
        shards: Iterable[Any],
        how: Write = Write.COUNTED,
    ) -> Iterator[None]:
        """``writing(shards)``; what was read of them follows (collective)."""
        shards = list(shards)
        with writing(shards):
            yield
        for shard in shards if self._read else ():
            if (entry := self._read.get(id(shard))) is not None:  # alike on all ranks; values may live longer on some
                _follow(entry.alive(), how, partial(gathered, shard))

    def before_backward(self, data_taken: Container[Tensor]) -> None:
        """Looks at parameters that have been gathered since, where nothing is told of a write until they go again.
        ``data_taken``: of those."""
        for entry in self._read.values():
            if private.is_away(entry.known):
                continue
            original = entry.original
            changed = [value for value in entry.alive() if not _equal(value, original)]
            _follow(changed, Write.THROUGH_DATA if original in data_taken else Write.COUNTED, original.detach)


class _Read(NamedTuple):
    original: Tensor
    known: private.ShardedParam
    values: list[weakref.ref[Tensor]]

    def alive(self) -> list[Tensor]:
        return [value for reference in self.values if (value := reference()) is not None]


def _equal(value: Tensor, gathered_copy: Tensor) -> bool:
    return torch.equal(value.detach().to(gathered_copy.dtype), gathered_copy.detach())


@torch.no_grad()
def _follow(values: list[Tensor], how: Write, now: Callable[[], Tensor]) -> None:
    if how is Write.COUNTED:
        increment_version(values)
        return
    new = now()
    for value in values:
        if how is Write.THROUGH_DATA:
            value.data.copy_(new)
        else:
            value.data = new.to(value.dtype, copy=True)
