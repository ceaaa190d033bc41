"""The transport between CPU processes of one host: direct exchange, and everything that depends on it.

[Exchange] gloo's own collectives take more time and memory than necessary, so gathers and reductions use
``comm.direct``, in which ranks read each other's memory. A reader may lag behind: do not write to a shard
or free a copy before :meth:`Direct.await_readers` returns.

[Gathering ahead] A unit is gathered ahead if no other unit has ever run at that point (see ``order``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_zero.comm import direct
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.transport import Transport


class Direct(Transport):
    """Transport between CPU processes of one host; see the module docstring."""

    units_ahead = 1

    def __init__(self, config: ZeroConfig, mesh: DeviceMesh, peer_memory: PeerMemory) -> None:
        super().__init__(config, mesh)
        axis = mesh.get_group("shard")
        self._peer_memory = peer_memory  # along the shard axis
        direct.connect(axis, peer_memory)
        if axis.size() == mesh.size():  # the shard axis spans all ranks, so its connections serve small messages too
            self.peer_memory = self._peer_memory
        self._reduce = direct.ReduceScatter(peer_memory)

    # -- set-up

    def install(self, units: Sequence[Any]) -> None:
        for unit in units:
            unit.set_custom_reduce_scatter(self._reduce)
            for group in private.groups(unit):
                private.gather_in_place(group, self._gather)

    def _needs_agreements(self) -> bool:
        return True

    def close(self) -> None:
        self._peer_memory.close()
        super().close()

    # -- exchange

    def _gather(self, outputs: list[direct.Parts], shards: list[Tensor], process_group: dist.ProcessGroup) -> dist.Work:
        """Gather ``shards`` into ``outputs``; used by :func:`private.gather_in_place`."""
        return direct.all_gather_each(outputs, shards, process_group, self._peer_memory)

    def await_readers(self) -> None:
        self._peer_memory.await_readers()
