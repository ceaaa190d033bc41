"""What user code does with gathered parameters inside a step: writes to them, and views that it may keep.

Writes are stored in the shards before the gathered copies are dropped. If anybody but the graph then holds a view, the
memory of the gathered parameter stays allocated, and each gather fills it. A unit's own forward takes views as well,
but only the graph holds those, so their memory may be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.residency import store_rows
from lightning_zero.engines.torch_functions import tensors_in
from lightning_zero.private.torch import DisableTorchFunction, is_in_graph_alone


class Writes:
    """Watches the gathered parameters of ``groups``; each rank stores its own rows of the values written to them.

    A tensor's version counts every in-place write except writes through ``.data``: report each tensor whose ``.data``
    is taken to :meth:`data_is_taken`, or its writes are lost.

    Args:
        changing: Called before shards change.
        changed: Called after shards have changed.

    Attributes:
        keep: Set by the engine. Called with the key and slot of a parameter whose memory must stay allocated.
    """

    keep: Callable[[int, int], None]

    def __init__(
        self, groups: Sequence[private.Group], changing: Callable[[], None], changed: Callable[[], None]
    ) -> None:
        self._groups, self._changing, self._changed = groups, changing, changed
        self._versions = [private.version(group) for group in groups]  # when they were last looked at
        self._data_taken: set[Tensor] = set()
        self._views: dict[int, list[weakref.ref[Tensor]]] = {}  # since the last drop, by id of the ShardedParam

    def data_is_taken(self, tensor: Tensor) -> None:
        """Record that user code may write to a gathered parameter without changing its version."""
        self._data_taken.add(tensor)

    def disregard(self, group: private.Group) -> None:
        """Ignore the writes to ``group`` so far, which have reached its shards."""
        self._versions[self._groups.index(group)] = private.version(group)

    def views_are_taken(self, params: Sequence[Tensor], result: Any, own: Mapping[int, private.ShardedParam]) -> None:
        """Record ``result``, which may alias the memory of the gathered ``params``."""
        for p in params:
            self._views.setdefault(id(own[id(p)]), []).extend(map(weakref.ref, tensors_in((result,))))

    def dropped(self, key: int, group: private.Group) -> None:
        """Keep the memory of parameters with held views, and store writes; ``group`` is about to be dropped."""
        on_host = group.device.type == "cpu"
        for slot, p in enumerate(group.fsdp_params):
            if self._is_held(group, p, on_host):
                self.keep(key, slot)
        self._store(key, group)

    def _is_held(self, group: private.Group, p: private.ShardedParam, on_host: bool) -> bool:
        taken = self._views.pop(id(p), None) if self._views else None
        if on_host and not private.is_resizable(p):  # NumPy shares the memory; its writes change no version
            self.data_is_taken(private.own_of(p))
            return not private.is_kept(p)
        if taken is None or private.is_kept(p):
            return False
        with DisableTorchFunction():
            in_graph = sum(is_in_graph_alone(reference) for reference in taken)
            return private.others_in(private.Home(group, p)) > in_graph

    def _store(self, index: int, group: private.Group) -> None:
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
