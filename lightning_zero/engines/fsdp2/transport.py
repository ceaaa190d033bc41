"""Transport of shards and gradients between ranks: by default torch's own collectives, streams and schedule.

:class:`Transport` is the path of an accelerator: it leaves ``fully_shard`` unchanged and only sends the engine's own
small agreements, for example on the order of units. Its methods are the moments of a step; another transport
(``cpu.Direct``) overrides them to do more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_zero.comm.agree import IN_STEP, Agreement, run_agreement, shared_agreement
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.fsdp2.order import Order


class Transport:
    """The path of an accelerator.

    Attributes:
        peer_memory: Connects all ranks if they are on one host, for small messages of any kind; ``None`` if
            there are no messages.
    """

    units_ahead = 0
    """Number of units gathered ahead of the running one; 0 on an accelerator, where the host runs ahead."""

    def __init__(self, config: ZeroConfig, mesh: DeviceMesh) -> None:
        self.config, self.mesh = config, mesh
        self._agreement: Agreement | None = None
        self._order: Order | None = None
        self.peer_memory: PeerMemory | None = None

    # -- set-up

    def install(self, units: Sequence[Any]) -> None:
        """Called when the units (``FSDPModule``, the root last) are sharded but not initialized yet (collective)."""
        for unit in units:
            if self.config.comm_buffers == "process_group":
                unit.set_allocate_memory_from_process_group_for_comm(True)
            elif self.config.comm_buffers == "symmetric":
                unit.set_symm_mem_for_comm()

    def start(self, units: Sequence[Any], names: Sequence[str]) -> None:
        """Called when the units are initialized; ``names`` are those of the units (collective)."""
        if self.mesh.size() > 1 and self._needs_agreements():
            self._agreement = run_agreement() or shared_agreement(self.config.timeout_seconds)
            if self.peer_memory is None:  # no tensor is read there: its local sockets are faster than gloo's TCP
                assert self._agreement.group is not None
                self.peer_memory = PeerMemory(self._agreement.group, self.config.timeout_seconds)
            if len(units) > 1:  # the root alone has only one order
                waits = self.mesh.device_type == "cpu"
                self._order = Order(self, units, names, self.units_ahead, waits)

    def _needs_agreements(self) -> bool:
        return self.config.find_unused_parameters

    def close(self) -> None:
        """Release what :meth:`start` has created."""
        if self.peer_memory is not None:
            self.peer_memory.close()
        self._agreement = self._order = None

    # -- agreements

    @property
    def agrees(self) -> bool:
        """Whether there are other ranks, and something to agree on."""
        return self._agreement is not None

    def agree(self, message: Tensor, op: Any) -> dist.Work:
        """All-reduce ``message`` (a few numbers in host memory) in place; wait for the returned work before reading.

        Raises:
            ValueError: On all ranks, if they have run different units.
        """
        if self._order is not None:
            self._order.recv()
        return self.send(message, op)

    def send(self, message: Tensor, op: Any) -> dist.Work:
        """All-reduce as :meth:`agree` does, without its check; used by :class:`Order` itself."""
        assert self._agreement is not None
        return self._agreement.all_reduce(message, op, IN_STEP, self.peer_memory)

    # -- the moments of a step, in their order

    def run_begins(self) -> None:
        """Called before the module's step."""
        if self._order is not None:
            self._order.restart()

    def unit_begins(self, index: int) -> None:
        """Called before a unit runs in a forward."""
        if self._order is not None:
            self._order.runs(index)

    def touches(self, key: int, in_backward: bool) -> None:
        """Called before user code inside a step gathers the tensors with this ``key``, which is equal on all ranks."""
        if self._order is not None:
            self._order.touches(key, in_backward)

    def forward_ends(self) -> None:
        """Called after the last unit of a forward."""
        if self._order is not None:
            self._order.ends()

    def close_forward(self) -> None:
        """Called before a backward, which may begin inside the forward."""
        if self._order is not None:
            self._order.close()

    # -- writes

    def await_readers(self) -> None:
        """Wait until no other rank reads this rank's shards and copies: then they may be written to or freed."""
