"""Transport of shards and gradients between ranks: by default torch's own collectives, streams and schedule.

:class:`Transport` is the path of an accelerator: it leaves ``fully_shard`` as it is, and carries the engine's own small
agreements, that on the order of units among them. Its methods are the moments of a step at which another transport
(``cpu.Direct``) does more.
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
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.order import Order


class Transport:
    """The path of an accelerator.

    Attributes:
        gathers_up_front: Whether a forward at stages 1 and 2 begins with a gather of every unit, so that ranks may run
            different units.
        peer_memory: Among all ranks, for small messages of any kind; its connections exist anyway.
        advice: What beside keeping modules out of the units helps where ranks run different ones.
    """

    gathers_up_front = False
    units_ahead = 0
    """So many units are gathered ahead of the one that runs; on an accelerator the host itself is ahead."""

    def __init__(self, config: ZeroConfig, mesh: DeviceMesh, advice: str = "") -> None:
        self.config, self.mesh, self.advice = config, mesh, advice
        self._agreement: Agreement | None = None
        self._order: Order | None = None
        self.peer_memory: PeerMemory | None = None

    # -- set-up

    def install(self, units: Sequence[Any]) -> None:
        """The units (``FSDPModule``, the root last) have parameters on the ranks, and no schedule yet."""

    def start(self, units: Sequence[Any], names: Sequence[str]) -> None:
        """The units have a root and a schedule; ``names`` are theirs (collective)."""
        if self.mesh.size() > 1 and self._needs_agreements():
            self._agreement = run_agreement() or shared_agreement(self.config.timeout_seconds)
            if not self.gathers_up_front and len(units) > 1:  # the root alone has nothing to be mixed up with
                waits = self.mesh.device_type == "cpu"
                self._order = Order(self, units, names, self.units_ahead, waits)

    def _needs_agreements(self) -> bool:
        return self.config.find_unused_parameters

    def close(self) -> None:
        """Gives back what :meth:`start` has made."""
        self._agreement = self._order = None

    # -- agreements

    @property
    def agrees(self) -> bool:
        """Whether there are other ranks to agree with, and a reason to."""
        return self._agreement is not None

    def agree(self, message: Tensor, op: Any) -> dist.Work:
        """``message`` (a few numbers, in host memory) becomes their sum or maximum, when this has been waited for.

        Raises:
            ValueError: On all ranks, if they have run different units.
        """
        if self._order is not None:
            self._order.hear()
        return self.send(message, op)

    def send(self, message: Tensor, op: Any) -> dist.Work:
        """As :meth:`agree`, for :class:`Order` itself."""
        assert self._agreement is not None
        return self._agreement.all_reduce(message, op, IN_STEP, self.peer_memory)

    # -- the moments of a step, in their order

    def run_begins(self) -> None:
        """This rank is about to call the module's step."""
        if self._order is not None:
            self._order.start_anew()

    def forward_begins(self, keeps_gathered: bool) -> None:
        """With ``keeps_gathered`` the parameters of the micro-batch before may still be full."""

    def forward_uses(self, group: private.Group) -> None:
        """This rank is about to run what ``group`` belongs to, in a forward that has not begun here: one of manual
        optimization, or outside of a step."""

    def unit_begins(self, index: int) -> None:
        """This rank is about to run a unit in a forward."""
        if self._order is not None:
            self._order.runs(index)

    def touches(self, key: int, in_backward: bool) -> None:
        """User code inside a step is about to gather what has this ``key``, a number that all ranks have for it."""
        if self._order is not None:
            self._order.touches(key, in_backward)

    def forward_ends(self) -> None:
        """After the last unit of a forward."""
        if self._order is not None:
            self._order.ends()

    def backward_begins(self, ran: Sequence[int] | None) -> bool:
        """Whether this backward's gradients are reduced at its end, in fixed order.

        ``ran`` tells when this rank's units ran (``usage.Moments``), ``None`` where nobody asks.
        """
        self.close_forward()
        return False

    def close_forward(self) -> None:
        """A backward is about to begin, maybe inside the forward."""
        if self._order is not None:
            self._order.close()

    def reduction_begins(self, group: private.Group, params: Sequence[private.ShardedParam]) -> None:
        """The gradients of ``params`` are complete, and ``group`` is about to reduce them."""

    def backward_ends(self, step_is_due: bool) -> None:
        """All reductions that autograd has scheduled have begun; afterwards they are complete.

        ``step_is_due``: all ranks step before they gather again.
        """

    # -- writes

    def user_writes(self) -> None:
        """User code is about to write to a sharded parameter."""

    def await_readers(self) -> None:
        """Afterwards shards and copies may be written to or freed: no other rank reads them any more."""

    def shards_changed(self) -> None:
        """Shards or copies may have changed in a way that no tensor's version tells."""
