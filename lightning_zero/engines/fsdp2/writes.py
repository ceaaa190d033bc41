"""Writes of user code to gathered parameters, which must reach the shards before the copies go."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.comm.reads import Changes
from lightning_zero.comm.shards import local, rows_of
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.transport import Transport
from lightning_zero.private.torch import DisableTorchFunction


class Writes:
    """Watches the gathered parameters of ``groups``; each rank stores its own rows of what was written to them.

    A tensor's version tells of every in-place write, but not of one through ``.data``: whoever takes that must be
    reported to :meth:`data_is_taken`.

    Attributes:
        data_taken: Gathered parameters that may have been written through ``.data``.
    """

    def __init__(self, groups: Sequence[private.Group], transport: Transport, changes: Changes) -> None:
        self._groups, self._transport, self._changes = groups, transport, changes
        self._versions = [private.version(group) for group in groups]  # when they were last looked at
        self.data_taken: set[Tensor] = set()
        for index, group in enumerate(groups):
            private.before_reshard(group, partial(self._store, index))

    def data_is_taken(self, tensor: Tensor) -> None:
        """User code reads or assigns the ``data`` of a gathered parameter."""
        self.data_taken.add(tensor)

    def forget(self) -> None:
        """Disregards all writes since the versions were last looked at: none of them was to gathered parameters."""
        self._versions = [private.version(group) for group in self._groups]

    def _store(self, index: int, group: private.Group) -> None:
        version = private.version(group)
        if version == self._versions[index] and not self.data_taken:
            return
        self._versions[index] = version
        self._transport.shards_changed()  # other ranks' rows may differ from their shards now
        self._transport.await_readers()
        with self._changes.under_way(), torch.no_grad(), DisableTorchFunction():
            for copy, shard in private.copies(group):
                store_rows(copy, shard)
        self.data_taken.difference_update(copy for copy, _ in private.copies(group))


def store_rows(whole: Tensor, sharded: DTensor) -> None:
    """This rank's rows of ``whole``; of a gathered copy in low precision only those elements that have changed."""
    shard, (start, length) = local(sharded), rows_of(sharded)
    if not length:
        return
    rows = whole.detach().narrow(0, start, length).to(shard.device)
    if rows.dtype != shard.dtype:
        rows = torch.where(shard.to(rows.dtype) == rows, shard, rows.to(shard.dtype))
    shard.copy_(rows)
