"""What a step or a forward writes to gathered parameters reaches the shards before the gathered buffers are dropped.

Momentum encoders and weights clipped in a forward do this. An in-place write shows in the parameter's version. A write
through ``p.data`` does not: whoever takes ``.data`` has the rows of that parameter stored again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.comm.shards import local, rows_of
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.transport import Transport
from lightning_zero.private.torch import DisableTorchFunction


class Writes:
    """Follows writes to the gathered parameters of ``groups``, for as long as these live."""

    def __init__(self, groups: Sequence[private.Group], transport: Transport) -> None:
        self._groups, self._transport = groups, transport
        self._versions: dict[int, int] = {}  # index of a group -> its version when it was last looked at
        self._data_taken: set[Tensor] = set()  # gathered parameters that may have been written through .data
        self._gathered: set[Tensor] = set()
        for index, group in enumerate(groups):
            private.before_reshard(group, partial(self._store, index))

    def take_data(self, tensor: Tensor) -> bool:
        """``tensor.data`` is read or assigned; whether ``tensor`` is a gathered parameter."""
        if len(self._gathered) < sum(len(group.fsdp_params) for group in self._groups):  # not all gathered yet
            self._gathered = {copy for group in self._groups for copy, _ in private.copies(group)}
        if tensor not in self._gathered:
            return False
        self._data_taken.add(tensor)
        return True

    def _store(self, index: int, group: private.Group) -> None:
        version = private.version(group)
        if version == self._versions.get(index, 0) and not self._data_taken:
            return
        self._versions[index] = version
        self._transport.copies_written()
        self._transport.await_readers()
        with torch.no_grad(), DisableTorchFunction():
            for copy, shard in private.copies(group):
                _store_rows(copy, shard)
        self._data_taken.difference_update(copy for copy, _ in private.copies(group))


def _store_rows(whole: Tensor, sharded: DTensor) -> None:
    """This rank's rows of ``whole``; of a gathered parameter in low precision only the elements that have changed."""
    shard, (start, length) = local(sharded), rows_of(sharded)
    if not length:
        return
    rows = whole.detach().narrow(0, start, length).to(shard.device)
    if rows.dtype != shard.dtype:
        rows = torch.where(shard.to(rows.dtype) == rows, shard, rows.to(shard.dtype))
    shard.copy_(rows)
