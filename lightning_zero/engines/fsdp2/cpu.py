"""The transport between CPU processes of one host: direct exchange, and everything that depends on it.

[Exchange] gloo's own collectives take more time and memory than necessary, so gathers and reductions use
``comm.direct``, in which ranks read each other's memory. A reader may lag behind: do not write to a shard
or free a copy before :meth:`Direct.await_readers` returns.

[Gathering ahead] A unit is gathered ahead if no other unit has ever run at that point (see ``order``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
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
        self._accumulators: dict[Tensor, Any] = {}  # shards -> autograd nodes that accumulate their gradients

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

    # -- backward

    def reduction_begins(self, group: private.Group, params: Sequence[private.ShardedParam]) -> None:
        """Let the reduction overlap with autograd if nobody reads or adds to its output before it is complete."""
        self._reduce.may_wait = self.mesh.ndim == 1 and private.keeps_what_is_reduced(group)
        if self._reduce.may_wait:
            self._finish_before_adding(params)

    def _finish_before_adding(self, params: Iterable[private.ShardedParam]) -> None:
        """Finish the reduction before autograd adds a gradient directly to a shard (a penalty over parameters)."""
        for p in params:
            if p.sharded_param not in self._accumulators:
                node = get_gradient_edge(p.sharded_param).node
                node.register_prehook(lambda grads: self._reduce.finish())
                self._accumulators[p.sharded_param] = node  # keep alive: autograd would recreate it without the hook

    def backward_ends(self) -> None:
        self._reduce.may_wait = False  # reductions of late gradients are read immediately
        self._reduce.finish()
