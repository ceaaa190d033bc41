"""The bytes that one rank stores and sends at each ZeRO stage: arithmetic only.

The paper is Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(arXiv:1910.02054); offload is ZeRO-Offload (arXiv:2101.06840) and ZeRO-Infinity (arXiv:2104.07857). Two layers:

- the *formulas* (:func:`paper_bytes`, :func:`fsdp2_bytes`, :func:`popular_bytes`) in Ψ parameters and N ranks;
- the *account* of one module (:class:`Layout`, :func:`simulate`): real shapes, padding, units and buffers, walked
  through the moments of a traced step, as ``torch.distributed.fsdp.fully_shard`` (torch 2.11-2.13) really allocates.

[Tensors of one unit on one rank, N ranks]
- *shard*: ``ceil(rows / N)`` rows of every parameter, padded, in its own dtype. Always there.
- *gathered buffer*: N padded shards in the compute dtype. At stages 1 and 2 between CPU processes, and at any stage of
  a process alone, the shard aliases it if the dtypes are equal; it is then always there.
- *gather buffer*: one flat message of the same size, alive until it is copied out; in a forward until the next unit's.
- *whole gradient*: in the compute dtype, from autograd until the unit is reduced.
- *reduce buffer*: N padded shards in the reduce dtype, alive until the next unit's reduction.
- *gradient shard*: padded, in the parameter's dtype.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_zero.comm.costs import CHANGED_BYTES, ORDER_BYTES, agreement_bytes, wire_bytes

STAGES = (0, 1, 2, 3)
"""0 is DDP."""
KINDS = ("parameters", "gradients", "optimizer", "gathered", "buffers", "activations")
"""The kinds of bytes in a rank's memory, in the order in which charts stack them."""


# -- formulas --------------------------------------------------------------------------------------------------------


def paper_bytes(stage: int, num_parameters: float, world_size: int, optimizer_bytes: float = 12) -> float:
    """Model states per rank in mixed precision: 2 parameter, 2 gradient and K=12 optimizer bytes for Adam.

    Sections 3.1 and 5 (P_os, P_os+g, P_os+g+p; figure 1, table 1): (2 + 2 + K)Ψ without ZeRO, 4Ψ + KΨ/N,
    2Ψ + (2 + K)Ψ/N, (4 + K)Ψ/N.
    """
    k, n = optimizer_bytes, world_size
    return num_parameters * {0: 4 + k, 1: 4 + k / n, 2: 2 + (2 + k) / n, 3: (4 + k) / n}[stage]


def paper_bytes_fp32(stage: int, num_parameters: float, world_size: int) -> float:
    """The same split (section 5) of 4 parameter, 4 gradient and 8 optimizer bytes: full fp32 and Adam."""
    n = world_size
    return num_parameters * {0: 16, 1: 8 + 8 / n, 2: 4 + 12 / n, 3: 16 / n}[stage]


def popular_bytes(stage: int, num_parameters: float, world_size: int) -> float:
    """The formulas that circulate instead: "12 + 4/N", "8 + 8/N", "16/N" bytes per parameter.

    All agree with the paper at N = 1; for more ranks only stage 3's holds. Stage 1's swaps the coefficients of 4 + 12/N
    and stage 2's is the fp32 formula of stage 1.
    """
    n = world_size
    return num_parameters * {1: 12 + 4 / n, 2: 8 + 8 / n, 3: 16 / n}[stage]


def fsdp2_bytes(
    stage: int,
    num_parameters: float,
    world_size: int,
    mixed: bool = True,
    accumulating: bool = False,
    between_hosts: bool = False,
) -> float:
    """Model states per rank inside a step under ``fully_shard`` with Adam; the gathered units of stage 3 left out.

    ``fully_shard`` keeps the fp32 shard beside the gathered buffer, so a parameter costs p + 4/N bytes, while the paper
    (section 5) counts p: bf16-mixed with fp32 reduction has p = 2 and accumulates in 4 bytes, fp32 has 4 and 4.
    Between steps every stage holds 16Ψ/N. Between CPU processes in fp32 at stages 1 and 2 the shard aliases the
    gathered buffer, so a step takes the paper's bytes, and (4 + 12/N)Ψ is left between steps.

    Args:
        stage: 1, 2 or 3.
        num_parameters: Ψ.
        world_size: N.
        mixed: ``bf16-mixed`` or ``16-mixed``, else ``32-true``.
        accumulating: In the middle of an accumulation window, where stage 1 holds whole gradients and no shards of
            them. Without accumulation stage 1 is stage 2: each unit is reduced as soon as it is complete.
        between_hosts: Ranks are processes on CPUs.
    """
    n, gathered = world_size, 2 if mixed else 4
    if stage == 3:
        return num_parameters * 16 / n
    shard = 0 if between_hosts and not mixed else 4 / n
    if stage == 1 and accumulating:
        return num_parameters * (gathered + shard + 4 + 8 / n)
    return num_parameters * (gathered + shard + 12 / n)


# -- one module ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element as stored (master weights)."""
    compute_itemsize: int
    """Bytes per element of the gathered copy and of the gradient that autograd makes."""
    reduce_itemsize: int
    """Bytes per element while reduced."""
    trainable: bool = True
    used: bool = True
    """Whether a step gives it a gradient; without one there is no gradient and no optimizer state."""
    state_per_element: float = 0
    """Bytes of optimizer states per element, sharded like the parameter."""
    state_whole: float = 0
    """Bytes of optimizer states that do not follow the shards (step counters, row and column factors)."""
    steps_whole: bool = False
    """Its optimizer looks across elements, so parameter, gradient and states are gathered to step."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard_numel(self, world_size: int, rank: int = 0) -> int:
        """Elements of rank ``rank``'s part: ``ceil(rows / N)`` rows until there are none left."""
        rows, row = self.shape[0], math.prod(self.shape[1:])
        chunk = math.ceil(rows / world_size)
        return max(min(chunk, rows - rank * chunk), 0) * row

    def padded_numel(self, world_size: int) -> int:
        """Elements of the buffer that every rank keeps: the largest shard."""
        return self.shard_numel(world_size)


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """Parameters that are gathered and reduced together."""

    name: str
    parameters: tuple[ParameterSize, ...]

    def shard_bytes(self, n: int) -> int:
        return sum(p.padded_numel(n) * p.itemsize for p in self.parameters)

    def gathered_bytes(self, n: int) -> int:
        """Of the whole copy, and of the message that brings it."""
        return sum(n * p.padded_numel(n) * p.compute_itemsize for p in self.parameters)

    def copies_of_shards_bytes(self, n: int) -> int:
        """The part of the whole copy that has the shards' own dtype."""
        return sum(n * p.padded_numel(n) * p.itemsize for p in self.parameters if p.compute_itemsize == p.itemsize)

    def packed_bytes(self, n: int, small_bytes: int) -> int:
        """Of the message that shards of less than ``small_bytes`` share."""
        shards = [p.padded_numel(n) * p.compute_itemsize for p in self.parameters]
        return n * sum(nbytes for nbytes in shards if nbytes < small_bytes)

    def cast_bytes(self, n: int) -> int:
        """Of the shard in the compute dtype, where that is another than the stored one."""
        return sum(p.padded_numel(n) * p.compute_itemsize for p in self.parameters if p.compute_itemsize != p.itemsize)

    def upload_bytes(self, n: int) -> int:
        """Of host shards on the device before they are joined: all of them, or one at a time where they are cast."""
        cast = [p.padded_numel(n) * p.itemsize for p in self.parameters if p.compute_itemsize != p.itemsize]
        kept = [p.padded_numel(n) * p.itemsize for p in self.parameters if p.compute_itemsize == p.itemsize]
        return sum(kept) + max(cast, default=0)

    def whole_gradient_bytes(self) -> int:
        return sum(p.numel * p.compute_itemsize for p in self.parameters if p.trainable)

    def accumulated_gradient_bytes(self) -> int:
        return sum(p.numel * p.reduce_itemsize for p in self.parameters if p.trainable and p.used)

    def reduced_bytes(self, n: int) -> int:
        """Of the reduce-scatter's input: every trainable parameter, used or not."""
        return sum(n * p.padded_numel(n) * p.reduce_itemsize for p in self.parameters if p.trainable)

    def gradient_shard_bytes(self, n: int) -> int:
        return sum(p.padded_numel(n) * p.itemsize for p in self.parameters if p.trainable)

    @property
    def trainable(self) -> bool:
        return any(p.trainable for p in self.parameters)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A module as its engine sees it: the units, the root last, and the parameters that are whole on every rank."""

    units: tuple[UnitSize, ...]
    replicated: tuple[ParameterSize, ...] = ()
    buffer_bytes: int = 0
    """Of the module's buffers: whole on every rank, broadcast before each synchronized training forward."""
    num_buffers: int = 0

    @property
    def parameters(self) -> list[ParameterSize]:
        return [*(p for u in self.units for p in u.parameters), *self.replicated]

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for p in self.parameters)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One event of a traced micro-batch, with the activation bytes around it (parameter gradients not counted)."""

    event: str
    """``forward``, ``forward_end``, ``backward``, ``backward_end`` of a unit, ``gradient`` (one is complete),
    ``end`` of the micro-batch."""
    unit: int = -1
    """Index in ``Layout.units``; the last is the root; -1 for a replicated parameter's gradient."""
    peak_bytes: float = 0
    """Most that was alive since the previous moment."""
    live_bytes: float = 0
    """Alive now."""
    gradient_bytes: float = 0
    """Of the gradient that became complete."""


def untraced(layout: Layout) -> list[Moment]:
    """The moments of a module whose units run one after another, without activations: for modules that cannot be
    traced, and for the state of a step alone."""
    root = len(layout.units) - 1
    found = [Moment(event="forward", unit=root)]
    for i in range(root):
        found += [Moment(event="forward", unit=i), Moment(event="forward_end", unit=i)]
    found += [Moment(event="forward_end", unit=root), Moment(event="backward", unit=root)]
    for i in reversed(range(root)):
        found += [Moment(event="backward", unit=i), *_gradients(layout.units[i], i)]
        found.append(Moment(event="backward_end", unit=i))
    whole = UnitSize(name="", parameters=layout.replicated)
    found += [*_gradients(layout.units[root], root), *_gradients(whole, -1)]
    return [*found, Moment(event="backward_end", unit=root), Moment(event="end")]


def _gradients(unit: UnitSize, index: int) -> list[Moment]:
    return [
        Moment(event="gradient", unit=index, gradient_bytes=p.numel * p.compute_itemsize)
        for p in unit.parameters
        if p.trainable and p.used
    ]


# -- states that stay ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on a rank between the last backward and the optimizer's step, tensor by tensor."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    layout: Layout, stage: int, world_size: int, rank: int = 0, alive: Collection[str] | None = None
) -> StateBytes:
    """Parameters, gradients and optimizer states of rank ``rank`` as its tensors count them, padding left out.

    Section 5 of the paper for a step's end: under ``fully_shard`` the shards are all that is left at every stage, so
    stages differ only inside a step (:func:`simulate`). Rank 0 holds the most.

    Args:
        layout, stage, world_size, rank: What and where.
        alive: Names of the parameters whose gradients exist together; by default all that a step uses.
    """
    parameters = gradients = optimizer = 0.0
    sharded = [p for u in layout.units for p in u.parameters]
    for group, n, r in ((sharded, world_size if stage else 1, rank if stage else 0), (layout.replicated, 1, 0)):
        for p in group:
            numel = p.shard_numel(n, r) if p.shape else 1
            parameters += numel * p.itemsize
            if p.trainable and p.used:
                gradients += numel * p.itemsize if alive is None or p.name in alive else 0
                optimizer += numel * p.state_per_element + p.state_whole
    return StateBytes(parameters=parameters, gradients=gradients, optimizer=optimizer)


# -- one step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """An engine's way of running the step that is counted."""

    stage: int
    world_size: int
    """Ranks that share one copy."""
    replicas: int = 1
    """Groups of so many ranks (HSDP), which all-reduce their shards of gradients."""
    micro_batches: int = 1
    """Accumulated before one optimizer step."""
    keep_gathered: bool = True
    """Stages 1 and 2 stay gathered between micro-batches: no user hook looks at the module there."""
    gathers_up_front: bool = False
    """Stages 1 and 2 on the CPU gather every unit before the forward."""
    gathers_in_place_from: int | None = None
    """Bytes of a shard: on the CPU larger ones arrive where they stay, smaller ones share a message."""
    keeps_shards_in_copies: bool = False
    """Shards alias their gathered buffers, which stay: at stages 1 and 2 between CPU processes, and at any stage of a
    process alone, unless shards are offloaded."""
    keeps_last: bool = True
    """Stage 3 keeps the unit whose backward comes first gathered after its forward, from the second step on: under
    automatic optimization."""
    agrees_per_unit: bool = False
    """Stage 3 on the CPU agrees before each gather which unit is next."""
    agrees_on_unused: bool = True
    broadcasts_buffers: bool = True
    from_host: bool = False
    """Shards lie in host memory: each gather copies them up first."""
    zeroes_late: bool = True
    """Lightning's automatic optimization zeroes gradients after the next forward, so that one sees the last step's."""


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """One optimizer step of one rank."""

    peak: float
    at_peak: Mapping[str, float]
    """:data:`KINDS` -> bytes at the moment of the peak; they add up to it."""
    sent: Mapping[str, float]
    """Collective -> bytes that this rank sends; it receives as many (see :func:`wire_bytes`)."""
    gathers: int
    reductions: int
    gathered_shards: float
    """Bytes of this rank's parameter shards, as stored, each time they were gathered."""
    reduced_shards: float
    """Bytes of its gradient shards, each time they were reduced."""

    @property
    def total_sent(self) -> float:
        return sum(self.sent.values())


def simulate(layout: Layout, moments: Sequence[Moment], rules: StepRules, optimizer_peak_bytes: float = 0) -> StepBytes:
    """Walks a step's moments and keeps the account of what is alive.

    Args:
        layout: The module.
        moments: Of one micro-batch, from a trace or from :func:`untraced`; they are repeated for an accumulation.
        rules: Stage, ranks and how the step is run.
        optimizer_peak_bytes: Temporaries of the optimizer's step, on this rank's shards.
    """
    account = _Ddp(layout, rules) if rules.stage == 0 else _FullyShard(layout, rules)
    for index in range(rules.micro_batches):
        account.micro_batch(moments, last=index == rules.micro_batches - 1)
    account.optimizer_step(optimizer_peak_bytes)
    return StepBytes(
        peak=account.peak,
        at_peak=dict(account.at_peak),
        sent={name: value for name, value in account.sent.items() if value},
        gathers=account.gathers,
        reductions=account.reductions,
        gathered_shards=account.gathered_shards,
        reduced_shards=account.reduced_shards,
    )


class _Account(ABC):
    """Bytes alive by kind, their peak, and the bytes sent."""

    def __init__(self, layout: Layout, rules: StepRules) -> None:
        self.layout, self.rules = layout, rules
        self.n = rules.world_size
        self.alive = dict.fromkeys(KINDS, 0.0)
        self.peak = 0.0
        self.at_peak: dict[str, float] = dict(self.alive)
        self.sent = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0, "broadcast": 0.0}
        self.gathers = self.reductions = 0
        self.gathered_shards = self.reduced_shards = 0.0
        self.state = state_bytes(layout, rules.stage, self.n)
        self.alive["optimizer"] = self.state.optimizer
        self.root = len(layout.units) - 1
        self.stale = 0.0  # gradients of the step before
        if rules.zeroes_late:
            self.stale = self.state.gradients
            self.alive["gradients"] = self.stale

    def add(self, kind: str, nbytes: float) -> None:
        self.alive[kind] += nbytes
        self.look()

    def drop(self, kind: str, nbytes: float) -> None:
        self.alive[kind] -= nbytes

    def look(self) -> None:
        total = sum(self.alive.values())
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.alive)

    def send(self, collective: str, nbytes: float) -> None:
        ranks = self.n if collective in ("all_gather", "reduce_scatter") else self.n * self.rules.replicas
        self.sent[collective] += wire_bytes(collective, nbytes, ranks)

    def agree_on(self, nbytes: float) -> None:
        self.send("all_reduce", agreement_bytes(nbytes, self.n * self.rules.replicas))

    def see(self, moment: Moment) -> None:
        """The activations since the last moment, then those of now."""
        self.alive["activations"] = moment.peak_bytes
        self.look()
        self.alive["activations"] = moment.live_bytes
        if moment.event == "backward" and self.stale:
            self.drop("gradients", self.stale)
            self.stale = 0.0

    @abstractmethod
    def micro_batch(self, moments: Sequence[Moment], last: bool) -> None:
        """Forward and backward of one micro-batch; ``last`` of its optimizer step."""

    def optimizer_step(self, peak_bytes: float) -> None:
        self.add("buffers", peak_bytes)
        self.drop("buffers", peak_bytes)

    def broadcast_buffers(self) -> None:
        if self.rules.broadcasts_buffers and self.layout.buffer_bytes:
            self.send("broadcast", self.layout.buffer_bytes)


class _Ddp(_Account):
    """Everything whole; gradients are copied into buckets of the same size and averaged there once per step."""

    def __init__(self, layout: Layout, rules: StepRules) -> None:
        super().__init__(layout, rules)
        self.alive["parameters"] = sum(p.numel * p.itemsize for p in layout.parameters)
        self.gradient_bytes = sum(p.numel * p.itemsize for p in layout.parameters if p.trainable)
        self.alive["buffers"] = self.gradient_bytes  # the reducer's buckets, from the start
        self.held = 0.0

    def micro_batch(self, moments: Sequence[Moment], last: bool) -> None:
        if last:
            self.broadcast_buffers()
        fresh = self.held == 0
        for moment in moments:
            self.see(moment)
            if moment.event == "gradient" and fresh:
                self.held += moment.gradient_bytes
                self.add("gradients", moment.gradient_bytes)
        if last:
            self.send("all_reduce", self.gradient_bytes)


class _FullyShard(_Account):
    """``fully_shard`` as ``engines/fsdp2`` drives it; the steps bear the names of ``_fsdp_param_group.py``."""

    def __init__(self, layout: Layout, rules: StepRules) -> None:
        super().__init__(layout, rules)
        n = self.n
        self.alive["parameters"] = sum(u.shard_bytes(n) for u in layout.units) + _whole_bytes(layout.replicated)
        self.alive["gathered"] = kept_bytes(layout, rules)
        sharded = [p for u in layout.units for p in u.parameters]
        self.keeps_all = _keeps_copies(rules) and n > 1 and all(p.compute_itemsize == p.itemsize for p in sharded)
        self.gathered: set[int] = set()
        self.prefetched: set[int] = set()
        self.order: list[int] = []  # units in the order of their forwards
        self.stays: int | None = None  # unit that is not dropped after its forward
        self.kept_buffer = 0.0  # the last forward's gather buffer
        self.reduce_buffer = 0.0  # the last reduction's input
        self.whole: dict[int, float] = {}  # unit -> bytes of whole gradients, fresh from autograd
        self.accumulated: set[int] = set()  # units whose whole gradients wait for the last micro-batch
        self.sharded: set[int] = set()  # units with gradient shards
        self.replicated_gradients = 0.0

    # -- gather and drop

    def start_gather(self, unit: int) -> None:
        size = self.layout.units[unit]
        self.gathered_shards += size.shard_bytes(self.n)
        if self.n == 1 or not size.parameters:
            return
        inputs = self.gather_inputs(size)
        if self.rules.gathers_in_place_from is not None:
            self.add("gathered", self.copy_bytes(size))
            self.add("buffers", inputs + self.message_bytes(size))  # a sent tensor must stay until it has arrived
        else:
            self.add("buffers", inputs + self.message_bytes(size))
            self.drop("buffers", inputs)
        self.send("all_gather", size.gathered_bytes(self.n))
        self.gathers += 1

    def copy_bytes(self, size: UnitSize) -> float:
        """Of the gathered copy, as far as it comes and goes."""
        kept = size.copies_of_shards_bytes(self.n) if _keeps_copies(self.rules) else 0
        return size.gathered_bytes(self.n) - kept

    def message_bytes(self, size: UnitSize) -> float:
        """Of messages that are received in one place and copied to another."""
        if self.n == 1:
            return 0.0
        small = self.rules.gathers_in_place_from
        return size.gathered_bytes(self.n) if small is None else size.packed_bytes(self.n, small)

    def gather_inputs(self, size: UnitSize) -> float:
        """Of temporaries made from shards before they are joined: casts, copies brought up from the host."""
        return size.cast_bytes(self.n) + (size.upload_bytes(self.n) if self.rules.from_host else 0)

    def finish_gather(self, unit: int, forward: bool) -> None:
        size = self.layout.units[unit]
        buffer = self.message_bytes(size)
        self.prefetched.discard(unit)
        if self.n > 1 and self.rules.gathers_in_place_from is not None:
            self.gathered.add(unit)
            self.drop("buffers", self.gather_inputs(size) + buffer)
            return
        if forward:
            self.drop_kept_buffer()
        self.add("gathered", self.copy_bytes(size))
        self.gathered.add(unit)
        if self.n == 1:  # a copy of the shard, cast on the way
            inputs = self.gather_inputs(size)
            self.add("buffers", inputs)
            self.drop("buffers", inputs)
        elif forward:
            self.kept_buffer = buffer
        else:
            self.drop("buffers", buffer)

    def gather(self, unit: int, forward: bool) -> None:
        if unit in self.gathered or not self.layout.units[unit].parameters:
            return
        if unit not in self.prefetched:
            self.start_gather(unit)
        self.finish_gather(unit, forward)

    def drop_kept_buffer(self) -> None:
        self.drop("buffers", self.kept_buffer)
        self.kept_buffer = 0.0

    def reshard(self, unit: int) -> None:
        if unit in self.gathered:
            self.gathered.remove(unit)
            self.drop("gathered", self.copy_bytes(self.layout.units[unit]))

    # -- the events

    def micro_batch(self, moments: Sequence[Moment], last: bool) -> None:
        self.order.clear()
        self.stays = self.last_of_forward(moments) if self.rules.keeps_last else None
        if last:
            self.broadcast_buffers()
        if self.rules.gathers_up_front and self.rules.stage < 3:
            if self.keeps_all and not self.rules.keep_gathered and self.gathered:
                self.agree_on(CHANGED_BYTES)
            for unit in range(len(self.layout.units)):
                self.gather(unit, forward=False)
        reduces = last or self.rules.stage > 1
        for moment in moments:
            self.see(moment)
            if moment.event == "forward":
                self.forward(moment.unit)
            elif moment.event == "forward_end":
                self.forward_end(moment.unit)
            elif moment.event == "backward":
                self.backward(moment.unit)
            elif moment.event == "gradient":
                self.gradient(moment)
            elif moment.event == "backward_end":
                self.backward_end(moment.unit, reduces)
        self.end(last, reduces)

    def last_of_forward(self, moments: Sequence[Moment]) -> int | None:
        """The unit that ran last, with gradients, before anything was computed backward: later ones are recomputed."""
        comes_back = {m.unit for m in moments if m.event == "backward"} - {self.root}
        in_forward = itertools.takewhile(lambda moment: moment.event != "backward", moments)
        ran = [m.unit for m in in_forward if m.event == "forward" and m.unit in comes_back]
        return ran[-1] if ran else None

    def forward(self, unit: int) -> None:
        if self.rules.stage == 3 and self.rules.agrees_per_unit and unit != self.root:
            self.agree_on(ORDER_BYTES)
        self.gather(unit, forward=True)

    def forward_end(self, unit: int) -> None:
        if self.rules.stage == 3 and unit not in (self.root, self.stays):
            self.reshard(unit)
        self.order.append(unit)
        if unit == self.root:
            self.drop_kept_buffer()

    def backward(self, unit: int) -> None:
        self.gather(unit, forward=False)
        if unit not in self.order:
            return
        index = len(self.order) - 1 - self.order[::-1].index(unit)
        self.order[index] = -2  # done
        before = next((u for u in reversed(self.order[:index]) if u >= 0), None)
        if (
            before is not None
            and before not in self.gathered | self.prefetched
            and self.layout.units[before].parameters
        ):
            self.start_gather(before)
            self.prefetched.add(before)

    def gradient(self, moment: Moment) -> None:
        if moment.unit < 0:
            if self.replicated_gradients < _whole_bytes(self.layout.replicated):
                self.replicated_gradients += moment.gradient_bytes
                self.add("gradients", moment.gradient_bytes)
            return
        self.whole[moment.unit] = self.whole.get(moment.unit, 0.0) + moment.gradient_bytes
        self.add("gradients", moment.gradient_bytes)

    def backward_end(self, unit: int, reduces: bool) -> None:
        fresh = self.whole.pop(unit, 0.0)
        if not fresh and unit not in self.accumulated and unit != self.root:
            return
        if reduces:
            self.reduce(unit, fresh)
        else:
            self.accumulate(unit, fresh)

    def accumulate(self, unit: int, fresh: float) -> None:
        size = self.layout.units[unit]
        if unit in self.accumulated:
            self.drop("gradients", fresh)
        else:
            self.accumulated.add(unit)
            kept = size.accumulated_gradient_bytes()
            if kept != fresh:  # another dtype: a copy
                self.add("gradients", kept)
                self.drop("gradients", fresh)

    def reduce(self, unit: int, fresh: float) -> None:
        size, n = self.layout.units[unit], self.n
        if not size.trainable:
            return
        held = fresh
        if unit in self.accumulated:
            self.accumulated.remove(unit)
            self.drop("gradients", fresh)
            held = size.accumulated_gradient_bytes()
        missing = max(size.whole_gradient_bytes() - held, 0.0)  # zeros for what no one used
        self.add("gradients", missing)
        held += missing
        if self.rules.stage == 3:
            self.reshard(unit)
        self.drop("buffers", self.reduce_buffer)
        self.reduce_buffer = float(size.reduced_bytes(n))
        self.add("buffers", self.reduce_buffer)
        self.drop("gradients", held)
        shard, output = size.gradient_shard_bytes(n), self.reduce_buffer / n
        self.reduced_shards += shard
        self.add("buffers", output)
        self.add("gradients", shard if output != shard else 0.0)  # cast to the parameter's dtype, or the very tensor
        self.drop("buffers", output)
        if unit in self.sharded:
            self.drop("gradients", shard if output != shard else 0.0)
        else:
            self.sharded.add(unit)
            self.add("gradients", 0.0 if output != shard else shard)
        if n > 1:
            self.send("reduce_scatter", size.reduced_bytes(n))
            self.sent["all_reduce"] += wire_bytes("all_reduce", size.reduced_bytes(n) / n, self.rules.replicas)
            self.reductions += 1

    def end(self, last: bool, reduces: bool) -> None:
        """The root's final callback, then the engine's own end of a backward; and what ranks say before it."""
        if reduces and self._gathers_all and self.rules.agrees_on_unused and self.root:
            self.agree_on(4 * 2 * self.root)  # when units have run: the latest and the earliest of all ranks
        for unit in range(len(self.layout.units)):
            if unit in self.whole or (reduces and unit in self.accumulated):
                self.backward_end(unit, reduces)
        self.drop("buffers", self.reduce_buffer)
        self.reduce_buffer = 0.0
        for unit in list(self.prefetched):  # gathered for a backward that never came
            self.finish_gather(unit, forward=False)
        if self.rules.stage == 3 or last or not (self.rules.keep_gathered or self.keeps_all):
            for unit in list(self.gathered):
                self.reshard(unit)
        if self.rules.stage == 3 and self.rules.agrees_per_unit:
            self.agree_on(ORDER_BYTES)
        if last:
            self.agree()

    def agree(self) -> None:
        trainable = [p for p in self.layout.replicated if p.trainable]
        nbytes = _whole_bytes(trainable)
        self.add("buffers", nbytes)
        self.drop("buffers", nbytes)
        self.send("all_reduce", nbytes)
        if self.rules.agrees_on_unused:
            moments = self.root if self._gathers_all else 2 * self.root  # of reductions, and of gathers
            self.agree_on(4 * (len(self.layout.parameters) + 2 * moments))

    @property
    def _gathers_all(self) -> bool:
        return self.rules.gathers_up_front and self.rules.stage < 3

    def optimizer_step(self, peak_bytes: float) -> None:
        sharded = [p for u in self.layout.units for p in u.parameters if p.trainable and p.used and p.steps_whole]
        whole = sum(p.numel * (2 * p.itemsize + p.state_per_element) for p in sharded)
        self.add("gathered", whole)
        super().optimizer_step(peak_bytes)
        self.drop("gathered", whole)
        for p in sharded:
            padded = self.n * p.padded_numel(self.n)
            self.send("all_gather", padded * (2 * p.itemsize + p.state_per_element))


def kept_bytes(layout: Layout, rules: StepRules) -> float:
    """Of the gathered copies that are always there, beside the shards in them."""
    if not _keeps_copies(rules):
        return 0.0
    n = rules.world_size
    return sum(u.copies_of_shards_bytes(n) for u in layout.units) * (n - 1) / n


def _keeps_copies(rules: StepRules) -> bool:
    return rules.keeps_shards_in_copies and (rules.stage in (1, 2) or (rules.stage == 3 and rules.world_size == 1))


def _whole_bytes(parameters: Iterable[ParameterSize]) -> int:
    return sum(p.numel * p.itemsize for p in parameters)


# -- offload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OffloadBytes:
    """Bytes kept off the device and copied to and from it, per rank."""

    host: float = 0.0
    disk: float = 0.0
    pcie_per_step: float = 0.0
    """Both directions together."""
    disk_per_step: float = 0.0
    """Read and written together."""
    off_device: Mapping[str, float] = field(default_factory=dict)
    """:data:`KINDS` -> bytes that no longer lie on the device."""


def offload_bytes(
    layout: Layout, step: StepBytes, rules: StepRules, target: str, host_is_device: bool = False
) -> OffloadBytes:
    """Model states moved to ``"cpu"`` or ``"nvme"``; with ``host_is_device`` (CPU-only machines) only files are
    elsewhere.

    cpu (ZeRO-Offload, section 4; ``CPUOffloadPolicy``): shards of parameters, gradients and optimizer states live in
    host memory and the step runs there; what is replicated stays on the device. Every gather brings the shard up in its
    stored dtype, every reduction takes a gradient shard down. nvme (ZeRO-Infinity, sections 5 and 6): optimizer states
    and master weights lie in files, read and written once per step; gradients wait in host memory; what is gathered
    comes from the files too.
    """
    if target == "none" or (host_is_device and target == "cpu"):
        return OffloadBytes()
    n = rules.world_size
    whole = [p for p in layout.replicated if p.trainable and p.used]
    states = state_bytes(layout, rules.stage, n).optimizer
    states -= sum(p.numel * p.state_per_element + p.state_whole for p in whole)
    shards = sum(u.shard_bytes(n) for u in layout.units)
    gradients = sum(u.gradient_shard_bytes(n) for u in layout.units)
    pcie = step.gathered_shards + step.reduced_shards
    off = {"parameters": float(shards), "gradients": float(gradients), "optimizer": states}
    if target == "cpu":
        return OffloadBytes(host=sum(off.values()), pcie_per_step=pcie, off_device=off)
    files = shards + states
    if host_is_device:
        off["gradients"] = 0.0
    return OffloadBytes(
        host=0.0 if host_is_device else gradients,
        disk=files,
        pcie_per_step=0.0 if host_is_device else pcie,
        disk_per_step=2 * files + max(step.gathered_shards - shards, 0),
        off_device=off,
    )


def scaled(moments: Sequence[Moment], doubled: Sequence[Moment] | None, factor: float) -> list[Moment]:
    """The moments of a micro-batch ``factor`` times as large: linear between those of one and of two sizes, or in
    proportion where the second trace does not match."""
    if doubled is None or [m.event for m in doubled] != [m.event for m in moments]:
        return [replace(m, peak_bytes=m.peak_bytes * factor, live_bytes=m.live_bytes * factor) for m in moments]

    def at(one: float, two: float) -> float:
        return max(one + (two - one) * (factor - 1), 0.0)

    return [
        replace(a, peak_bytes=at(a.peak_bytes, b.peak_bytes), live_bytes=at(a.live_bytes, b.live_bytes))
        for a, b in zip(moments, doubled, strict=True)
    ]
