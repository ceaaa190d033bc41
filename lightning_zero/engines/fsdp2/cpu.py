"""Between CPU processes over gloo: direct exchange, and what becomes possible because the host may wait.

``fully_shard`` runs as ever; this object takes the place of its collectives and adds agreements around them.

[Parts]
- *Direct exchange* (``comm.direct``): shards arrive where the gathered parameter lies, without a buffer to copy from.
- *Aliased shards*, stages 1 and 2, one dtype, no offload; a process alone at any stage: the shard is the rank's part of
  the gathered buffer, which stays allocated. A gather fills in the other ranks' rows. Nothing travels if no rank has
  written to its shards since (:class:`AliasedShards`).
- *Gathering up front*, stages 1 and 2: each unit travels while the one before it arrives. So ranks may run different
  units; they agree before a backward whether they did, and then reduce at its end in fixed order.
- *Order*, stage 3: ranks announce each unit before they gather it (:class:`UnitOrder`), which finds different paths
  before parameters are mixed up, and lets the next unit travel ahead.

[Who may write when]
A rank reads the shards and gradients of its host's other ranks in their memory. So nobody writes to a shard, or to a
gathered buffer that shards alias, before its readers are done: :meth:`DirectTransport.await_readers` stands before each
such write.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from lightning_zero.comm import direct
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.transport import Transport
from lightning_zero.engines.fsdp2.usage import Usage
from lightning_zero.private.torch import DisableTorchFunction


class DirectTransport(Transport):
    """See the module's text; the methods' contract is :class:`~.transport.Transport`'s."""

    def __init__(self, config: ZeroConfig, mesh: DeviceMesh, may_alias: bool) -> None:
        self._config, self._mesh = config, mesh
        self._may_alias = may_alias and (config.stage != 3 or mesh["shard"].size() == 1)
        self._pool = direct.Pool()
        self._peer_memory = PeerMemory(mesh.get_group("shard"), config.timeout_seconds)
        self._reduce = direct.ReduceScatter(self._pool, self._peer_memory)
        self._accumulators: dict[Tensor, object] = {}  # shards -> where autograd adds their gradients
        self._aliased = AliasedShards()
        self._order: UnitOrder | None = None
        self.gathers_up_front = config.stage != 3

    def attach(self, units: Sequence[nn.Module]) -> None:
        self._units = list(units)
        for unit in units:
            private.set_custom_reduce_scatter(unit, self._reduce)
            for group in private.groups(unit):
                private.gather_in_place(group, self._gather)

    def alias_shards(self, groups: Sequence[private.Group]) -> None:
        if self._may_alias:
            self._aliased.attach(groups)

    @property
    def agrees(self) -> bool:  # type: ignore[override]
        return self._config.stage == 3 or self._aliased.everywhere

    def connect(self, usage: Usage) -> None:
        self._usage = usage
        usage.speak_through_memory(self._config.timeout_seconds)
        if self._config.stage == 3 and usage.can_agree:
            self._order = UnitOrder(self._units, usage)

    # -- gathering -----------------------------------------------------------------------------------------------

    def _gather(self, outputs: list[Tensor], shards: list[Tensor], process_group: dist.ProcessGroup) -> dist.Work:
        if self._aliased.current:
            return direct.Begun(iter(()))
        work = direct.all_gather_each(outputs, shards, process_group, self._pool, self._peer_memory)
        if not self._aliased.somewhere:
            return work
        # Peers read the buffer itself, and user code may write to gathered parameters
        return direct.Begun((w.wait() for w in [work]), self.await_readers)

    def gather_up_front(self, recurs: bool) -> None:
        if not self.gathers_up_front:
            return
        with DisableTorchFunction(), self._aliased.gathering(recurs, self._usage):
            begun = (private.unshard(unit, async_op=True) for unit in self._units)
            for arriving, _ in pairwise(chain(begun, [None])):  # the second of a pair has begun as well
                arriving.wait()

    def unit_begins(self, index: int, recomputes: bool) -> None:
        if self._order is not None:
            self._order.announce(index, recomputes)

    def forward_ends(self) -> None:
        if self._order is not None:
            self._order.announce(-1, recomputes=False)

    def before_backward(self) -> None:
        if self._order is not None:
            self._order.close()

    def resharded(self) -> None:
        if self._order is not None:
            self._order.forget()

    # -- reducing ------------------------------------------------------------------------------------------------

    def backward_begins(self, may_defer: bool) -> bool:
        return may_defer and self.gathers_up_front and self._usage.ranks_ran_different_units()

    def reduction_begins(self, group: private.Group) -> None:
        # Cast, scaled or added to others, the output is read at once; all-reduced along the other axis, too
        self._reduce.may_wait = self._mesh.ndim == 1 and private.keeps_what_is_reduced(group)
        if self._reduce.may_wait:
            for p in private.trainable(group):
                self._finish_before_adding(p.sharded_param)

    def _finish_before_adding(self, shard: Tensor) -> None:
        """A gradient that reaches the shard by itself (a penalty over parameters) is added to a complete one."""
        if shard not in self._accumulators:
            node = get_gradient_edge(shard).node
            node.register_prehook(lambda grads: self._reduce.finish())
            self._accumulators[shard] = node

    def backward_ends(self) -> None:
        self._reduce.may_wait = False
        self._reduce.finish()

    def awaits_step(self, is_due: bool) -> None:
        self._aliased.step_is_due = is_due

    # -- writes --------------------------------------------------------------------------------------------------

    def before_write(self) -> None:
        if self._order is not None:
            self._order.num_writes += 1
        self.await_readers()

    def copies_written(self) -> None:
        self._aliased.forget()  # other ranks' rows may differ from their shards now

    def step_ends(self) -> None:
        self._aliased.forget()

    def await_readers(self) -> None:
        self._peer_memory.await_readers()

    def close(self) -> None:
        self._peer_memory.close()


class AliasedShards:
    """Shards that are a part of their gathered buffer, and whether the rest of the buffer is current.

    Attributes:
        everywhere: All shards are, on every rank.
        somewhere: At least one is.
        current: For the length of a gather: the buffers hold what the shards hold, on all ranks; nothing has to travel.
        step_is_due: On all ranks, between a synchronized backward and the next gather: then there is no need to ask.
    """

    def __init__(self) -> None:
        self.everywhere = self.somewhere = self.current = self.step_is_due = False
        self._groups: Sequence[private.Group] = ()
        self._marks: object = None  # of the shards when they were last gathered; None: unknown

    def attach(self, groups: Sequence[private.Group]) -> None:
        for group in groups:
            private.alias_shards(group)
        found = [private.is_aliased(p) for group in groups for p in group.fsdp_params]
        self._groups, self.everywhere, self.somewhere = groups, all(found), any(found)

    def forget(self) -> None:
        """The next gather must not rely on marks."""
        self._marks = None

    def gathering(self, recurs: bool, usage: Usage) -> _Gathering:
        """Around gathers of all units (collective): decides whether anything has to travel."""
        asks = recurs and self.everywhere and usage.can_agree
        self.current = asks and not self.step_is_due and self.unchanged(usage)
        self.step_is_due = False
        return _Gathering(self, asks)

    def unchanged(self, usage: Usage) -> bool:
        """Whether no rank has written to its shards since they were gathered."""
        changed = torch.tensor([self._marks != self._look()], dtype=torch.int32)
        return usage.agree(changed, dist.ReduceOp.MAX) == [0]

    def _look(self) -> object:
        return [private.shard_marks(group) for group in self._groups]

    def remember(self) -> None:
        """The buffers are current from now on, until a shard's mark changes."""
        self._marks = self._look()


class _Gathering:
    """Ends :attr:`AliasedShards.current` however the gathers end."""

    def __init__(self, aliased: AliasedShards, remembers: bool) -> None:
        self._aliased, self._remembers = aliased, remembers

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *unused: object) -> None:
        self._aliased.current = False
        if kind is None and self._remembers:
            self._aliased.remember()


class UnitOrder:
    """Stage 3: every rank announces the unit it is about to gather, in 16 bytes, before gathers could be mixed up.

    A unit that has travelled ahead runs without waiting for the others: what they say of it is heard at the next one.
    Nothing is gathered on a guess that another rank may not share: all ranks have heard of the unit before, and the
    follower of its follower is what all of them send for here, wherever they have gone meanwhile. So nobody waits for a
    gather that another rank never sends, not even in the teardown after an error.

    Attributes:
        num_writes: To shards, by user code; a unit that travelled before the latest one is gathered again.
    """

    def __init__(self, units: Sequence[nn.Module], usage: Usage) -> None:
        self._units, self._usage = units, usage
        self.num_writes = 0
        self._latest = -1  # the unit announced last in this forward, -1 for none
        self._follower: dict[int, int] = {}  # unit -> the one that always ran after it, -1 for none
        self._sent: dict[int, int] = {}  # unit that travels ahead -> num_writes when it was sent for
        self._unheard: tuple[int, int, dist.Work, Tensor] | None = None  # before, unit, the others' announcements

    def announce(self, index: int, recomputes: bool) -> None:
        """This rank is about to run unit ``index``, or has come to the end of its forward (-1)."""
        with DisableTorchFunction():
            self._hear()
            if not recomputes:  # in a backward units run in another order
                self._gather_ahead(self._followed_by(self._followed_by(self._latest)))
            is_ahead = index in self._sent and not recomputes
            is_old = self._sent.pop(index, self.num_writes) != self.num_writes
            self._say(index, is_old, recomputes)
            if is_ahead and not is_old:
                return
            self._hear()
            if is_old:
                for group in private.groups(self._units[index]):
                    private.forget_gather(group)
            if index >= 0 and not recomputes:
                self._gather(index)
                self._gather_ahead(self._followed_by(index))

    def close(self) -> None:
        """A backward is about to begin, maybe inside the forward; it gathers in an order of its own."""
        if self._latest >= 0:
            self.announce(-1, recomputes=False)

    def forget(self) -> None:
        """Everything gathered ahead is dropped."""
        self._latest = -1
        self._sent.clear()

    def _say(self, index: int, is_old: bool, recomputes: bool) -> None:
        before = -1
        if not recomputes:
            before, self._latest = self._latest, index
        ends = torch.tensor([index, is_old, -index, -is_old], dtype=torch.int32)
        self._unheard = before, index, self._usage.begin_agreement(ends, dist.ReduceOp.MAX), ends

    def _hear(self) -> None:
        """Waits for what all ranks have announced last.

        Raises:
            ValueError: On all ranks, if they run different units, or if only some have written to one that travels.
        """
        if self._unheard is None:
            return
        (before, index, work, ends), self._unheard = self._unheard, None
        work.wait()
        highest, lowest = ends[:2].tolist(), (-ends[2:]).tolist()  # on the CPU: no device waits
        if highest[0] != lowest[0]:
            raise self._usage.different_units([i for i in (lowest[0], highest[0]) if i >= 0])
        if highest[1] != lowest[1]:
            raise ValueError(
                "stage=3: some ranks only have written to parameters while those of"
                f" {self._usage.name_of(index)!r} travelled ahead in a forward, so that ranks would go on with"
                " different ones: write on every rank, or between two forwards."
            )
        if before >= 0 and self._follower.setdefault(before, index) != index:
            self._follower[before] = -1

    def _followed_by(self, index: int) -> int:
        """The unit that has always followed this one; -1 for good, once another one, or none, has followed."""
        return self._follower.get(index, -1)

    def _gather_ahead(self, index: int) -> None:
        if index >= 0:
            self._sent.setdefault(index, self.num_writes)
            self._gather(index)

    def _gather(self, index: int) -> None:
        with torch.inference_mode(False):  # storage made inside could never be trained on
            private.unshard(self._units[index], async_op=True)
