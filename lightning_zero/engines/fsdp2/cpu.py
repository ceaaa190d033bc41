"""Transport that only processes on CPUs have: direct exchange, and all that it makes possible or needs.

[Exchange] gloo's own collectives take longer and more memory than they must, so gathers and reductions go by
``comm.direct``, ranks of one host reading each other's memory. A reader may lag behind: nobody writes to a shard or
frees a copy before :meth:`Direct.await_readers`.

[Stages 1 and 2] Everything is gathered before a forward, so ranks may run different units: they agree before the
backward whether they did, and then reduce at its end. Where shard and copy have one dtype, *the shard aliases the
gathered buffer*, which stays allocated; as long as no rank has changed a shard (:class:`Copies`), nothing is sent.

[Stage 3] The units that have always followed are gathered ahead (see ``order``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from lightning_zero import host
from lightning_zero.comm import direct
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.base import outside_inference_mode
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.transport import Transport

LEAST_GROWTH_BYTES = 24 * 2**20
"""So much more than at its beginning, and a 48th of all, must be resident in a backward before gaps are returned."""


class Copies(Enum):
    """This rank's knowledge of whether the gathered copies that shards alias agree with the shards of all ranks. Each
    rank is in the same state: every change of it follows from a collective call."""

    UNKNOWN = auto()
    """Some rank may have changed a shard: before the next gather ranks ask each other, one message of 4 bytes."""
    OUTDATED = auto()
    """A step is due on all ranks, or done: the next gather sends everything, and nobody asks."""
    CURRENT = auto()
    """All have said that nothing has changed: this gather sends nothing. Holds for the length of one gather."""


class Direct(Transport):
    """Between CPU processes over gloo; see the module's text."""

    units_ahead = 1

    def __init__(self, config: ZeroConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh, advice=", or use stage=2")
        axis = mesh.get_group("shard")
        self.gathers_up_front = config.stage < 3
        self._pool = direct.Pool()
        self._peer_memory = PeerMemory(axis, config.timeout_seconds)  # along the shard axis
        direct.connect(axis, self._peer_memory)
        if axis.size() == mesh.size():  # one connection between two ranks carries messages of every kind
            self.peer_memory = self._peer_memory
        self._reduce = direct.ReduceScatter(self._pool, axis.size(), self._peer_memory, host.mapped_apart)
        self._resident = 0  # bytes, when this backward began or gaps were last returned
        self._unreduced: set[private.Group] = set()  # in this backward, so far
        self._has_stepped = False
        self._aliases_all = False  # every shard aliases its gathered buffer, on every rank
        self._aliases_some = False
        self._copies = Copies.UNKNOWN
        self._marks_then: Any = None  # of all shards when the copies were last current; None: not known
        self._accumulators: dict[Tensor, Any] = {}  # shards -> where autograd adds their gradients

    # -- set-up

    def install(self, units: Sequence[Any]) -> None:
        for unit in units:
            unit.set_custom_reduce_scatter(self._reduce)
            for group in private.groups(unit):
                private.gather_in_place(group, self._gather)

    def start(self, units: Sequence[Any], names: Sequence[str]) -> None:
        self._units = units
        self._groups = [group for unit in units for group in private.groups(unit)]
        self._root_groups = set(private.groups(units[-1]))
        self._alias_shards()
        super().start(units, names)
        if self._agreement is not None and self.peer_memory is None:
            assert self._agreement.group is not None
            self.peer_memory = PeerMemory(self._agreement.group, self.config.timeout_seconds)

    def _needs_agreements(self) -> bool:
        return super()._needs_agreements() or self.config.stage == 3 or self._aliases_all

    def _alias_shards(self) -> None:
        """Lets shards alias the gathered copies where those are whole for most of a step anyway. To be called before an
        optimizer takes the shards: it would go on with the memory that they lay in before."""
        alone = self.mesh["shard"].size() == 1
        if self.config.offload.target != "none" or (self.config.stage == 3 and not alone):
            return
        for group in self._groups:
            private.alias_shards(group)
        aliased = [private.is_aliased(p) for group in self._groups for p in group.fsdp_params]
        self._aliases_all, self._aliases_some = all(aliased), any(aliased)

    def close(self) -> None:
        host.map_from(host.MAPPED_FROM_BYTES)
        for peer_memory in (self._peer_memory, self.peer_memory):
            if peer_memory is not None:
                peer_memory.close()
        super().close()

    # -- exchange

    def _gather(self, outputs: list[direct.Parts], shards: list[Tensor], process_group: dist.ProcessGroup) -> dist.Work:
        """For :func:`private.gather_in_place`."""
        if self._copies is Copies.CURRENT:
            return direct.Begun(iter(()))
        work = direct.all_gather_each(outputs, shards, process_group, self._pool, self._peer_memory)
        # User code that writes to a copy in its forward writes to a shard that aliases it, which others may be reading.
        return direct.Begun((w.wait() for w in [work]), self.await_readers) if self._aliases_some else work

    def await_readers(self) -> None:
        self._peer_memory.await_readers()

    # -- forward

    def forward_begins(self, keeps_gathered: bool) -> None:
        """Stages 1 and 2: gathers every unit.

        Nothing travels where copies stay from one micro-batch or evaluated batch to the next (the shards alias them)
        and no rank has changed a shard since, which they ask each other unless they have just stepped.
        """
        if not self.gathers_up_front:
            return
        looks = not keeps_gathered and self._aliases_all and self.agrees
        known = self._copies is Copies.OUTDATED
        self._copies = Copies.CURRENT if looks and not known and self.copies_are_current() else Copies.UNKNOWN
        try:
            # Each unit travels while the one before it arrives; more at once would need room for their messages.
            begun = (private.unshard(unit, async_op=True) for unit in self._units)
            for unit, _ in pairwise(chain[Any](begun, [None])):  # the second of a pair has begun as well
                private.wait_for_unshard(unit)
        finally:
            self._copies = Copies.UNKNOWN
        if looks:
            self._marks_then = self._marks()

    def _marks(self) -> Any:
        return [private.shard_marks(group) for group in self._groups]

    def copies_are_current(self) -> bool:
        """Whether the copies are still what the shards are, on all ranks (collective)."""
        changed = torch.tensor([self._marks_then != self._marks()], dtype=torch.int32, device="cpu")
        self.agree(changed, dist.ReduceOp.MAX).wait()
        return changed.tolist() == [0]  # on the CPU: no device waits

    def shards_changed(self) -> None:
        self._marks_then = None

    def forward_uses(self, group: private.Group) -> None:
        """Ranks may use units in different orders: at the first one each gathers all, in the same order."""
        if self.gathers_up_front and not private.is_gathered(group):
            with private.outside_transforms(), outside_inference_mode():
                self.forward_begins(keeps_gathered=False)

    def forward_ends(self) -> None:
        host.map_from(host.MAPPED_IN_STEPS_FROM_BYTES)
        super().forward_ends()

    def user_writes(self) -> None:
        self.shards_changed()
        self.await_readers()

    # -- backward

    def backward_begins(self, ran: Sequence[int] | None) -> bool:
        self._resident = host.resident_bytes()
        self._unreduced = set(self._groups)
        self.close_forward()
        if not (ran and self.agrees and self.gathers_up_front):
            return False
        moments = torch.tensor(ran, dtype=torch.int32, device="cpu")
        ends = torch.cat([moments, -moments])
        self.agree(ends, dist.ReduceOp.MAX).wait()
        latest, negated_earliest = ends.chunk(2)
        return not torch.equal(latest, -negated_earliest)

    def reduction_begins(self, group: private.Group, params: Sequence[private.ShardedParam]) -> None:
        """The reduction may go on while autograd does, where nobody reads or adds to its output before it is whole."""
        self._unreduced.discard(group)
        self._return_gaps()
        self._reduce.may_wait = self.mesh.ndim == 1 and private.keeps_what_is_reduced(group)
        if self._reduce.may_wait:
            self._finish_before_adding(params)

    def _return_gaps(self) -> None:
        """Returns to the kernel the free memory that activations leave behind, where it would come on top of gradients:
        the most that this backward takes should be what is alive. Else that memory is kept for the next forward."""
        now = host.resident_bytes()
        if self._unreduced == self._root_groups:  # whose gradients come next, an embedding's among them: in one piece
            now += sum(p.sharded_param.nbytes for group in self._root_groups for p in private.trainable(group))
        if now > self._resident + max(LEAST_GROWTH_BYTES, now // 48):
            host.return_gaps()
            self._resident = max(self._resident, host.resident_bytes())

    def _finish_before_adding(self, params: Iterable[private.ShardedParam]) -> None:
        """A gradient that reaches the shards by itself (a penalty over parameters) is added to a complete one."""
        for p in params:
            if p.sharded_param not in self._accumulators:
                node = get_gradient_edge(p.sharded_param).node
                node.register_prehook(lambda grads: self._reduce.finish())
                self._accumulators[p.sharded_param] = node  # held: autograd would make another one, without the hook

    def backward_ends(self, step_is_due: bool) -> None:
        self._reduce.may_wait = False  # late gradients are read at once
        self._reduce.finish()
        if step_is_due and not self._has_stepped:
            host.map_from(host.MAPPED_APART_FROM_BYTES)  # the optimizer is about to make its states
            self._has_stepped = True
        self._copies = Copies.OUTDATED if step_is_due else Copies.UNKNOWN
