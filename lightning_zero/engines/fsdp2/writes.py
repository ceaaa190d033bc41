"""Writes of user code to gathered parameters inside a step, and views that it holds when these are dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.residency import Views, store_rows
from lightning_zero.private.torch import DisableTorchFunction


class Writes:
    """Watches the gathered parameters of ``groups``; each rank stores its own rows of the values written to them.

    A tensor's version counts every in-place write except writes through ``.data``: report each tensor whose ``.data``
    is taken to :meth:`data_is_taken`, or its writes are lost.

    Args:
        views: Views that user code takes of gathered parameters.
        changing: Called before shards change.
        changed: Called after shards have changed.
    """

    def __init__(
        self,
        groups: Sequence[private.Group],
        views: Views,
        changing: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._groups, self._views, self._changing, self._changed = groups, views, changing, changed
        self._versions = [private.version(group) for group in groups]  # when they were last looked at
        self._data_taken: set[Tensor] = set()

    def data_is_taken(self, tensor: Tensor) -> None:
        """Record that user code may write to a gathered parameter without changing its version."""
        self._data_taken.add(tensor)

    def disregard(self, key: int | None = None) -> None:
        """Ignore the writes so far to the group with this ``key``, or to all: they have reached the shards."""
        for index in range(len(self._groups)) if key is None else [key]:
            self._versions[index] = private.version(self._groups[index])

    def dropped(self, key: int, group: private.Group) -> None:
        """Store writes to ``group``, which is about to be dropped, and leave memory to views that user code holds."""
        on_host = group.device.type == "cpu"
        left = []
        with DisableTorchFunction():
            for p in group.fsdp_params:
                home, full = private.Home(group, p), private.own_of(p)
                is_numpys = on_host and not private.is_resizable(p)  # NumPy's writes change no version
                if is_numpys:
                    self.data_is_taken(full)
                if self._views.leave_in_step(full, home.users) or is_numpys:
                    left.append(home)
            self._store(key, group)
            for home in left:
                home.leave()

    def _store(self, index: int, group: private.Group) -> None:
        """Store the writes to ``group`` in its shards; the group with this index is about to be dropped."""
        version = private.version(group)
        if version == self._versions[index] and not self._data_taken:
            return
        self._versions[index] = version
        self._changing()
        with torch.no_grad():
            for copy, shard in private.copies(group):
                store_rows(copy, shard)
        self._data_taken.difference_update(copy for copy, _ in private.copies(group))
        self._changed()
