"""Formulas for the bytes that one rank stores and sends at each ZeRO stage, over the moments of one micro-batch.

"The paper" is Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(arXiv:1910.02054); offload follows ZeRO-Offload (arXiv:2101.06840) and ZeRO-Infinity (arXiv:2104.07857). States and
traffic count real shapes, padding and units. The peak of a step is an estimate, within 10 % of measured peaks
(docs/memory.md).

[Tensors of one unit on one rank, N ranks]
- *shard*: ``ceil(rows / N)`` rows of every parameter, padded, in the parameter's own dtype. Always allocated.
- *gathered copy*: N padded shards in the compute dtype.
- *unsharded gradient*: in the compute dtype, from autograd until the unit is reduced.
- *reduce buffer*: N padded shards in the reduce dtype, alive until the next unit's reduction.
- *gradient shard*: padded, in the parameter's dtype.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_zero.comm.meter import wire_bytes

KINDS = ("parameters", "gradients", "optimizer", "gathered", "buffers", "activations")
"""Kinds of bytes in the memory of a rank, in the order in which charts stack them."""


# -- one module ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """Sizes of one parameter and its optimizer states."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element as stored (master weights)."""
    compute_itemsize: int
    """Bytes per element of the gathered copy and of the gradient that autograd produces."""
    reduce_itemsize: int
    """Bytes per element of the gradient while it is reduced."""
    trainable: bool = True
    stepped: bool = True
    """Whether a step gives the parameter a gradient; without one there is no optimizer state."""
    state_per_element: float = 0
    """Bytes of optimizer states per element, sharded like the parameter."""
    state_replicated: float = 0
    """Bytes of optimizer states that every rank holds in full (step counters, row and column factors)."""
    steps_unsharded: bool = False
    """Whether the optimizer is not element-wise: parameter and gradient are gathered for the step, and states are
    full."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard_numel(self, world_size: int) -> int:
        """Elements of rank 0's shard, the largest, to which every rank pads its own."""
        return math.ceil(self.shape[0] / world_size) * math.prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """Parameters that are gathered and reduced together; bytes for N ranks."""

    parameters: tuple[ParameterSize, ...]

    @property
    def stepped(self) -> list[ParameterSize]:
        return [p for p in self.parameters if p.stepped]

    def gathered_bytes(self, n: int) -> int:
        return sum(n * p.shard_numel(n) * p.compute_itemsize for p in self.parameters)

    def reduced_bytes(self, n: int) -> int:
        """Size of the input of the reduce-scatter: all trainable parameters of the unit, if a step uses any of them."""
        reduced = (n * p.shard_numel(n) * p.reduce_itemsize for p in self.parameters if p.trainable)
        return sum(reduced) if self.stepped else 0

    def gradient_shard_bytes(self, n: int) -> int:
        return sum(p.shard_numel(n) * p.itemsize for p in self.parameters if p.trainable) if self.stepped else 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A module as its engine sees it: the units (the root is the last) and the parameters that are not sharded."""

    units: tuple[UnitSize, ...]
    replicated: tuple[ParameterSize, ...] = ()
    broadcast_bytes: int = 0
    """Bytes of buffers that are broadcast before each synchronized training forward."""

    @property
    def root(self) -> int:
        return len(self.units) - 1

    @property
    def parameters(self) -> list[ParameterSize]:
        return [*(p for u in self.units for p in u.parameters), *self.replicated]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A part of a micro-batch: it starts where the previous moment ends, and ends when a unit has run or a gradient is
    complete."""

    unit: int
    """Index in ``Layout.units`` of the unit that ran."""
    gradient: str = ""
    """Name of the parameter whose gradient became complete; empty in the forward."""
    activations: float = 0
    """Peak bytes of activations during the moment, without gradients of parameters."""
    returns: bool = False
    """Whether the unit, if it is not the root, has a backward after this forward."""


def untraced(layout: Layout) -> list[Moment]:
    """The moments of a micro-batch that was not traced: the units run one after another, without activations."""
    moments = [Moment(unit=u, returns=u != layout.root) for u in range(len(layout.units))]
    for unit in (*reversed(range(layout.root)), layout.root):
        moments += [Moment(unit=unit, gradient=p.name) for p in layout.units[unit].stepped]
    return moments


def trainable_bytes(parameters: Sequence[ParameterSize]) -> float:
    return float(sum(p.numel * p.itemsize for p in parameters if p.trainable))


# -- states between two steps ----------------------------------------------------------------------------------------


def state_bytes(layout: Layout, stage: int, world_size: int) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer states on rank 0, which holds the most, before the optimizer step.

    This is Section 5 of the paper at the end of a step. Under ``fully_shard`` only shards are left then at every stage,
    so stages 1 to 3 differ only during a step (:func:`account`).
    """
    sharded = [p for u in layout.units for p in u.parameters]
    sizes = [(p, p.shard_numel(world_size) if stage else p.numel) for p in sharded]
    sizes += [(p, p.numel) for p in layout.replicated]
    stepped = [(p, numel) for p, numel in sizes if p.stepped]
    return {
        "parameters": sum(numel * p.itemsize for p, numel in sizes),
        "gradients": sum(numel * p.itemsize for p, numel in stepped),
        "optimizer": sum(numel * p.state_per_element + p.state_replicated for p, numel in stepped),
    }


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """Properties of the step whose bytes are counted: stage, ranks, accumulation, offload."""

    stage: int
    """0 is DDP."""
    world_size: int
    """Number of ranks that share one copy of the model."""
    replicas: int = 1
    """Number of such groups (HSDP), which all-reduce their gradient shards."""
    micro_batches: int = 1
    """Micro-batches per optimizer step."""
    keep_gathered: bool = True
    """Whether units stay gathered between micro-batches at stages 1 and 2, because no user hook runs there."""
    in_place: bool = False
    """Whether CPU processes exchange directly, so that gathers need no message buffer."""
    automatic: bool = True
    """Whether optimization is automatic: then Lightning zeroes gradients after the next forward, and stage 3 keeps the
    unit gathered whose backward comes first."""
    offload: str = "none"
    host_is_device: bool = False
    """Whether the device is the CPU, so that offload to host memory moves nothing."""


def offloaded_bytes(layout: Layout, rules: StepRules) -> dict[str, float]:
    """The part of :func:`state_bytes` that offload moves off the device. Replicated parameters stay there.

    cpu (ZeRO-Offload, section 4; ``CPUOffloadPolicy``): shards of parameters, gradients and optimizer states live in
    host memory and the step runs there. nvme (ZeRO-Infinity, sections 5 and 6): optimizer states and master weights lie
    in files, gradients in host memory.
    """
    if rules.offload == "none" or (rules.host_is_device and rules.offload == "cpu"):
        return {}
    shards = state_bytes(dataclasses.replace(layout, replicated=()), rules.stage, rules.world_size)
    return {kind: held for kind, held in shards.items() if kind != "gradients" or not rules.host_is_device}


# -- one step --------------------------------------------------------------------------------------------------------


def account(layout: Layout, trace: Sequence[Moment], rules: StepRules, step_bytes: float = 0) -> list[dict[str, float]]:
    """Device bytes by kind (:data:`KINDS`) at each moment of the last micro-batch of an optimizer step, then during the
    optimizer's own step, whose temporaries take ``step_bytes``."""
    held, off = state_bytes(layout, rules.stage, rules.world_size), offloaded_bytes(layout, rules)
    held = {kind: nbytes - off.get(kind, 0.0) for kind, nbytes in held.items()}
    moments = _sharded(layout, trace, rules) if rules.stage else _ddp(layout, trace, rules)
    unsharded = sum(_unsharded_step_bytes(unit, 1) for unit in layout.units) if rules.stage else 0.0
    buckets = 0.0 if rules.stage else trainable_bytes(layout.parameters)
    at_step = held["gradients"], unsharded, buckets + step_bytes, 0.0
    changing = ("gradients", "gathered", "buffers", "activations")
    return [{**held, **dict(zip(changing, moment, strict=True))} for moment in (*moments, at_step)]


def _ddp(layout: Layout, trace: Sequence[Moment], rules: StepRules) -> Iterator[tuple[float, ...]]:
    """DDP at each moment: gradients, casts, buckets, activations.

    The buckets in which gradients are averaged are a second copy of them. Autocast casts weights and saves the casts
    for the backward.
    """
    sizes, buckets = {p.name: p for p in layout.parameters}, trainable_bytes(layout.parameters)
    casts = float(sum(p.numel * p.compute_itemsize for p in layout.parameters if p.compute_itemsize != p.itemsize))
    full = state_bytes(layout, 0, 1)["gradients"]
    complete = full if rules.micro_batches > 1 else 0.0
    for m in trace:
        if m.gradient and rules.micro_batches == 1:
            complete += sizes[m.gradient].numel * sizes[m.gradient].itemsize
        stale = full if rules.automatic and not m.gradient else 0.0
        yield max(complete, stale), casts, buckets, m.activations


def _sharded(layout: Layout, trace: Sequence[Moment], rules: StepRules) -> Iterator[tuple[float, ...]]:
    """``fully_shard`` at each moment, as ``engines/fsdp2`` drives it: gradients, gathered copies, reduce buffers,
    activations. The gradients of the root are reduced last."""
    n, root, units = rules.world_size, layout.root, layout.units
    fresh = {p.name: p.numel * p.compute_itemsize for u in units for p in u.parameters}
    reduced = [float(u.reduced_bytes(n)) for u in units]
    shards = [float(u.gradient_shard_bytes(n)) for u in units]
    if "gradients" in offloaded_bytes(layout, rules):
        shards = [0.0] * len(units)
    held = [0.0] * len(units)  # gradients of each unit
    if rules.micro_batches > 1:
        held = list(shards)
        if rules.stage == 1:
            held = [float(sum(p.numel * p.reduce_itemsize for p in u.stepped)) for u in units]
    # Lightning's closure zeroes gradients after the forward, so the previous step's are alive during it.
    stale = sum(shards) if rules.automatic else 0.0
    always = trainable_bytes(layout.replicated)
    incomplete = Counter(m.unit for m in trace if m.gradient) + Counter([root])
    reduce_buffer = 0.0
    for m, gathered in zip(trace, _gathered(layout, trace, rules), strict=True):
        if not m.gradient:
            yield max(sum(held), stale) + always, gathered, 0.0, m.activations
            continue
        held[m.unit] += fresh.get(m.gradient, 0)  # gradients of replicated parameters are in `always`
        incomplete[m.unit] -= 1
        if incomplete[m.unit]:
            yield sum(held) + always, gathered, reduce_buffer, m.activations
            continue
        # fully_shard frees the input of a reduce-scatter only when the next one starts.
        reduce_buffer = reduced[m.unit]
        yield sum(held) + always, gathered, reduce_buffer * (1 + 1 / n), m.activations
        held[m.unit] = shards[m.unit]
    yield sum(held) + always, 0.0, reduced[root] * (1 + 1 / n), 0.0


def _gathered(layout: Layout, trace: Sequence[Moment], rules: StepRules) -> Iterator[float]:
    """Bytes of gathered copies at each moment.

    At stage 3 the root, the running unit and, in a backward, the prefetched next unit are gathered. The message buffer
    of a gather is as large as the copy.
    """
    copies = [u.gathered_bytes(rules.world_size) for u in layout.units]
    returning = [m.unit for m in trace if m.returns]
    then = {later: earlier for earlier, later in itertools.pairwise(returning)}
    first_back = returning[-1] if returning else None  # stays gathered until its backward
    for m in trace:
        if m.gradient and m.unit != layout.root:
            first_back = None
        unit = first_back if m.unit == layout.root and first_back is not None else m.unit
        in_use = {layout.root, unit, then.get(unit, unit) if m.gradient else unit}
        message = 0 if rules.in_place or m.gradient or rules.world_size == 1 else copies[unit]
        yield message + sum(copies if rules.stage < 3 else (copies[u] for u in in_use))


def _unsharded_step_bytes(unit: UnitSize, n: int) -> float:
    """Bytes of parameters and gradients that are gathered for optimizers that are not element-wise."""
    unsharded = [p for p in unit.stepped if p.steps_unsharded]
    return sum(n * p.shard_numel(n) * 2 * p.itemsize for p in unsharded)


# -- traffic ---------------------------------------------------------------------------------------------------------


def traffic(layout: Layout, trace: Sequence[Moment], rules: StepRules) -> dict[str, float]:
    """Collective -> bytes that this rank sends per optimizer step; it receives as many.

    Section 7 of the paper, unit by unit: DDP 2Ψ, stage 1 Ψ + Ψ, stage 2 Ψ + AΨ, stage 3 2AΨ + AΨ for A micro-batches.
    At stage 3 the root and the unit whose backward comes first are gathered once per micro-batch. Agreements between
    ranks, a few KiB, are not counted.
    """
    n, ranks = rules.world_size, rules.world_size * rules.replicas
    sent: dict[str, float] = defaultdict(float)
    averaged = layout.replicated if rules.stage else layout.parameters
    sent["all_reduce"] = wire_bytes("all_reduce", trainable_bytes(averaged), ranks)
    sent["broadcast"] = wire_bytes("broadcast", layout.broadcast_bytes, ranks)
    gathers = _num_gathers(layout, trace, rules)
    completed = Counter(m.gradient for m in trace)
    for index, unit in enumerate(layout.units if rules.stage else ()):
        backwards = max((completed[p.name] for p in unit.stepped), default=0)
        reductions = 1 if rules.stage == 1 else rules.micro_batches * backwards
        full = gathers[index] * unit.gathered_bytes(n) + _unsharded_step_bytes(unit, n)
        sent["all_gather"] += wire_bytes("all_gather", full, n)
        sent["reduce_scatter"] += wire_bytes("reduce_scatter", reductions * unit.reduced_bytes(n), n)
        sent["all_reduce"] += wire_bytes("all_reduce", reductions * unit.reduced_bytes(n) / n, rules.replicas)
    return {name: nbytes for name, nbytes in sent.items() if nbytes}


def _num_gathers(layout: Layout, trace: Sequence[Moment], rules: StepRules) -> Counter[int]:
    """Index of each unit -> number of its gathers per optimizer step."""
    a = rules.micro_batches
    if rules.stage < 3:
        return Counter(dict.fromkeys(range(len(layout.units)), 1 if rules.keep_gathered else a))
    forwards = [m.unit for m in trace if not m.gradient and m.unit != layout.root]
    returning = [m.unit for m in trace if m.returns]
    gathers = Counter([layout.root, *forwards, *returning])
    gathers.subtract(returning[-1:] if rules.automatic else [])  # that unit stays gathered
    return Counter({unit: a * times for unit, times in gathers.items()})
