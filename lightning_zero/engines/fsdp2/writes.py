"""Writes of user code to gathered parameters, which must reach the shards before the copies go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.residency import store_rows
from lightning_zero.private.torch import DisableTorchFunction


class Writes:
    """Watches the gathered parameters of ``groups``; each rank stores its own rows of what was written to them.

    A tensor's version tells of every in-place write, but not of one through ``.data``: whoever takes that must be
    reported to :meth:`data_is_taken`.

    Args:
        changing: Called before shards change.
        changed: Called when they have changed.
    """

    def __init__(
        self, groups: Sequence[private.Group], changing: Callable[[], None], changed: Callable[[], None]
    ) -> None:
        self._groups, self._changing, self._changed = groups, changing, changed
        self._versions = [private.version(group) for group in groups]  # when they were last looked at
        self._data_taken: set[Tensor] = set()

    def data_is_taken(self, tensor: Tensor) -> None:
        """User code may write to a gathered parameter past its version."""
        self._data_taken.add(tensor)

    def disregard(self, group: private.Group) -> None:
        """What was written to ``group`` so far has reached its shards."""
        self._versions[self._groups.index(group)] = private.version(group)

    def forget(self) -> None:
        """Disregards all writes since the versions were last looked at: none of them was to gathered parameters."""
        self._versions = [private.version(group) for group in self._groups]

    def store(self, index: int, group: private.Group) -> None:
        """``group``, the one with this index, is about to be dropped."""
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
