"""Stores user code's writes to gathered parameters in the shards, before the gathered copies are dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.residency import store_rows
from lightning_zero.private.torch import DisableTorchFunction


class Writes:
    """Watches the gathered parameters of ``groups``; each rank stores its own rows of the values written to them.

    A tensor's version counts every in-place write except writes through ``.data``: report each tensor whose ``.data``
    is taken to :meth:`data_is_taken`, or its writes are lost.

    Args:
        changing: Called before shards change.
        changed: Called after shards have changed.
    """

    def __init__(
        self, groups: Sequence[private.Group], changing: Callable[[], None], changed: Callable[[], None]
    ) -> None:
        self._groups, self._changing, self._changed = groups, changing, changed
        self._versions = [private.version(group) for group in groups]  # when they were last looked at
        self._data_taken: set[Tensor] = set()

    def data_is_taken(self, tensor: Tensor) -> None:
        """Record that user code may write to a gathered parameter without changing its version."""
        self._data_taken.add(tensor)

    def disregard(self, group: private.Group) -> None:
        """Ignore the writes to ``group`` so far, which have reached its shards."""
        self._versions[self._groups.index(group)] = private.version(group)

    def forget(self) -> None:
        """Ignore all writes since the versions were last read: none of them was to gathered parameters."""
        self._versions = [private.version(group) for group in self._groups]

    def store(self, index: int, group: private.Group) -> None:
        """Store the writes to ``group`` in its shards; the group with this index is about to be dropped."""
        version = private.version(group)
        if version == self._versions[index] and not self._data_taken:
            return
        self._versions[index] = version
        self._changing()
        with torch.no_grad(), DisableTorchFunction():
            for copy, shard in private.copies(group):
                store_rows(copy, shard)
        self._data_taken.difference_update(copy for copy, _ in private.copies(group))
        self._changed()
