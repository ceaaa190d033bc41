"""Which stage fits a module on given devices, and what it costs: ``lightning_zero.plan``. Floor 5.

The module is copied without its memory (:mod:`~lightning_zero.tracing`), one micro-batch is traced, one step of the
optimizers that it really configures is run on fake shards, and :mod:`~lightning_zero.memory` walks every stage through
what was found. Nothing runs on a device and no process group is needed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lightning_zero.config import ZeroConfig
from lightning_zero.memory import (
    KINDS,
    Layout,
    Moment,
    OffloadBytes,
    ParameterSize,
    StepBytes,
    StepRules,
    UnitSize,
    offload_bytes,
    scaled,
    simulate,
    state_bytes,
    untraced,
)
from lightning_zero.optim import is_elementwise
from lightning_zero.strategy import _available_host_bytes, _user_looks_between_micro_batches
from lightning_zero.tracing import LiveBytes, NotTraceable, Trace, fake_batch, shadow, trace
from lightning_zero.units import UnitPlan, plan_units

GIB = 2**30
OFFLOADS: dict[str, dict[int, str]] = {
    "none": {1: "fsdp2", 2: "fsdp2", 3: "fsdp2"},
    "cpu": {1: "fsdp2", 2: "fsdp2", 3: "fsdp2"},
    "nvme": {3: "deepspeed"},
}
"""offload -> stage -> the engine that runs it here; what is missing is planned but cannot be picked."""
ACCOUNTED = ("ddp", "fsdp2")
"""Engines whose own buffers the plan knows."""
MAX_MICRO_BATCH = 65536


# -- what is asked and answered --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train, per rank; bytes."""

    name: str
    """``ddp``, ``zero1`` ... ``zero3_nvme``."""
    stage: int
    offload: str
    engine: str | None
    """What runs it here; ``None`` is arithmetic only."""
    parameters: float
    gradients: float
    optimizer: float
    """These three between two steps, as the tensors count; :attr:`at_peak` is what is alive inside one."""
    gathered_unit: float
    """The largest unit while it is whole."""
    activations: float
    """Most that the activations of one micro-batch take, without and with recomputation of every unit."""
    activations_checkpointed: float
    at_peak: Mapping[str, float]
    """Kind -> device bytes at the peak of a step."""
    peak: float
    at_peak_checkpointed: Mapping[str, float]
    peak_checkpointed: float
    """With every unit's activations recomputed in the backward."""
    host: float
    disk: float
    sent: Mapping[str, float]
    """Collective -> bytes this rank sends per optimizer step, and receives as many."""
    sent_total: float
    pcie: float
    """Bytes per optimizer step between device and host."""
    disk_traffic: float
    fits: bool
    fits_checkpointed: bool
    max_micro_batch: int
    max_micro_batch_checkpointed: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rows, the one to take and why."""

    module: str
    num_parameters: int
    num_trainable: int
    world_size: int
    ranks_per_host: int
    precision: str
    micro_batch: int
    micro_batches: int
    optimizers: Sequence[str]
    device: str
    """The kind of device that is planned for."""
    device_bytes: float | None
    usable_bytes: float | None
    flops_per_micro_batch: float
    rows: Sequence[Row]
    choice: str | None
    """Name of the row to take; ``None`` if none fits."""
    checkpointing: bool
    """Whether the choice needs activation checkpointing."""
    reason: str
    notes: Sequence[str] = field(default_factory=tuple)

    def row(self, name: str) -> Row:
        return next(r for r in self.rows if r.name == name)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def table(self) -> str:
        """The plan as text, GiB per rank."""
        return _table(self)

    def plot(self, path: str) -> None:
        """Writes the chart as PNG; needs matplotlib (``pip install lightning-zero[plot]``)."""
        _plot(self, path)

    def __str__(self) -> str:
        return self.table()


# -- precision -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dtypes:
    """``None`` keeps the parameter's own dtype."""

    stored: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    autocast: torch.dtype | None = None


_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PRECISIONS: dict[str, _Dtypes] = {
    "32-true": _Dtypes(),
    "64-true": _Dtypes(stored=_FP64),
    "bf16-true": _Dtypes(stored=_BF16),
    "16-true": _Dtypes(stored=_FP16),
    "bf16-mixed": _Dtypes(compute=_BF16, reduce=_FP32, autocast=_BF16),
    "16-mixed": _Dtypes(compute=_FP16, reduce=_FP32, autocast=_FP16),
}
"""As :mod:`lightning_zero.precision` gives them to engines."""
_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed", "None": "32-true"}


def _precision(value: Any) -> str:
    name = _ALIASES.get(str(value), str(value))
    if name not in PRECISIONS:
        raise ValueError(f"precision={value!r}: use one of {', '.join(PRECISIONS)}.")
    return name


# -- the plan --------------------------------------------------------------------------------------------------------


def plan(
    module: LightningModule,
    batch: Any = None,
    *,
    world_size: int = 1,
    ranks_per_host: int | None = None,
    precision: Any = "32-true",
    device: str = "cpu",
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    headroom: float = 0.1,
    micro_batches: int = 1,
    max_steps: int = 1000,
    keep_gathered: bool = True,
    config: ZeroConfig | None = None,
) -> Plan:
    """Says what every stage and offload would take of each rank, and which one to use.

    Args:
        module: Whole, on any device; on the meta device it takes no memory. It is copied, never changed.
        batch: One micro-batch (its shapes and dtypes count); without one no activations are counted.
        world_size: Ranks that share the model states.
        ranks_per_host: Of them on one host (default: all).
        precision: As for ``Trainer(precision=...)``.
        device: Kind of device to plan for, ``"cpu"`` or ``"cuda"``.
        device_memory_gib: Of one device; without it nothing is said to fit or not to fit, and the largest micro-batch
            is not looked for.
        host_memory_gib: Of one host, for offload.
        headroom: Share of the device's memory that is left free.
        micro_batches: Accumulated per optimizer step.
        max_steps: What ``trainer.estimated_stepping_batches`` answers while optimizers are configured.
        keep_gathered: No hook of the user's looks at the module between micro-batches.
        config: Units and agreements of the run; its stage is not looked at.

    Raises:
        ValueError: For an unknown precision, or a module without trainable parameters.
    """
    name = _precision(precision)
    study = _Study(module, batch, name, torch.device(device), config or ZeroConfig(), world_size, max_steps)
    usable = None if device_memory_gib is None else device_memory_gib * GIB * (1 - headroom)
    rules = StepRules(
        stage=3,
        world_size=world_size,
        micro_batches=micro_batches,
        keep_gathered=keep_gathered,
        gathers_up_front=study.target.type == "cpu",
        agrees_per_unit=study.target.type == "cpu" and world_size > 1 and study.config.find_unused_parameters,
        agrees_on_unused=study.config.find_unused_parameters,
        broadcasts_buffers=study.config.broadcast_buffers,
        zeroes_late=module.automatic_optimization,
    )
    rows = [study.row(0, "none", rules, usable)]
    for offload in OFFLOADS:
        for stage in (3,) if offload == "nvme" else (1, 2, 3):
            rows.append(study.row(stage, offload, rules, usable))
    on_host = ranks_per_host or world_size
    choice, checkpointing, reason = choose(rows, usable, host_memory_gib, on_host)
    return Plan(
        module=type(module).__name__,
        num_parameters=study.layout.num_parameters,
        num_trainable=sum(p.numel for p in study.layout.parameters if p.trainable),
        world_size=world_size,
        ranks_per_host=on_host,
        precision=name,
        micro_batch=study.batch_size,
        micro_batches=micro_batches,
        optimizers=study.optimizer_names,
        device=study.target.type,
        device_bytes=None if device_memory_gib is None else device_memory_gib * GIB,
        usable_bytes=usable,
        flops_per_micro_batch=study.flops,
        rows=tuple(rows),
        choice=choice,
        checkpointing=checkpointing,
        reason=reason,
        notes=tuple(study.notes),
    )


class Planner:
    """A plan that waits for its batch: copies the module's structure now, while it is whole.

    Args:
        module: As for :func:`plan`.
        **settings: Its keywords.
    """

    def __init__(self, module: LightningModule, **settings: Any) -> None:
        copied = shadow(module, nullcontext(), torch.device("meta"), lambda name, t: t.dtype)
        self.module = cast(LightningModule, copied)
        self.settings = settings

    def __call__(self, batch: Any) -> Plan:
        with _quiet():
            return plan(self.module, batch, **self.settings)

    @classmethod
    def of_run(cls, trainer: Trainer, module: LightningModule, **settings: Any) -> Planner:
        """For the run that ``trainer`` is about to start."""
        strategy = trainer.strategy
        config = getattr(strategy, "config", None)
        device = strategy.root_device
        return cls(
            module,
            **{
                "world_size": trainer.world_size,
                "ranks_per_host": trainer.num_devices,
                "precision": trainer.precision,
                "device": device.type,
                "device_memory_gib": device_memory_bytes(device, trainer.num_devices) / GIB,
                "micro_batches": trainer.accumulate_grad_batches,
                "max_steps": trainer.max_steps if trainer.max_steps > 0 else 1000,
                "keep_gathered": not _user_looks_between_micro_batches(trainer, module),
                "config": config if isinstance(config, ZeroConfig) else None,
                **settings,
            },
        )


def device_memory_bytes(device: torch.device, ranks_per_host: int) -> float:
    """Memory of one device; on the CPU this rank's share of the host's available memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return _available_host_bytes() / max(ranks_per_host, 1)


def first_batch(loader: Any) -> Any:
    """The first micro-batch of a ``DataLoader`` over a map-style dataset, without its workers, its sampler or a trace
    in the random generators; ``None`` where there is no such thing."""
    dataset, size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
    if not isinstance(loader, DataLoader) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    batch_sampler = loader.batch_sampler
    size = size or getattr(batch_sampler, "batch_size", None)
    if not size or not len(dataset):  # type: ignore[arg-type]
        return None
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            return loader.collate_fn([dataset[i % len(dataset)] for i in range(size)])  # type: ignore[index, arg-type]
    finally:
        random.setstate(state)


def choose(
    rows: Sequence[Row], usable: float | None, host_gib: float | None, ranks_per_host: int, engine: str | None = None
) -> tuple[str | None, bool, str]:
    """``(name, needs checkpointing, reason)`` of the cheapest row that fits.

    Rows are tried in the order of what they send and recompute: stages 1, 2, 3 on the device, then with activation
    checkpointing, then with offload. DDP is never the answer: stage 1 sends the same and stores less. With ``engine``
    only rows that it runs.
    """
    candidates = [r for r in rows if r.stage and engine in (None, r.engine)]
    if usable is None:
        return "zero3", False, "zero3: no device memory was given, and stage 3 stores the least."
    on_device = [r for r in candidates if r.offload == "none"]
    offloaded = [r for r in candidates if r.offload != "none"]
    tried: list[str] = []
    for group in (on_device, offloaded):
        for checkpointing in (False, True):
            for row in group:
                peak = row.peak_checkpointed if checkpointing else row.peak
                if peak > usable:
                    tried.append(f"{row.name} {_gib(peak)}")
                elif host_gib is not None and row.host * ranks_per_host > host_gib * GIB:
                    tried.append(f"{row.name} {_gib(row.host * ranks_per_host)} of host memory")
                else:
                    return row.name, checkpointing, _reason(row, peak, usable, checkpointing, group, on_device)
    least = min((r for r in candidates), key=lambda r: r.peak_checkpointed)
    return (
        None,
        False,
        f"nothing fits: even {least.name} with activation checkpointing needs {_gib(least.peak_checkpointed)} of"
        f" {_gib(usable)} usable GiB; use more ranks, a smaller micro-batch or a larger device.",
    )


def _reason(
    row: Row, peak: float, usable: float, checkpointing: bool, group: Sequence[Row], on_device: Sequence[Row]
) -> str:
    before = [r for r in group if r.name != row.name and group.index(r) < group.index(row)]
    needs = f"{row.name}: needs {_gib(peak)} of {_gib(usable)} usable GiB per rank"
    extra = ""
    if row.offload != "none":
        if on_device:  # else offload was asked for
            least = min(on_device, key=lambda r: r.peak_checkpointed)
            extra = f"; without offload even {least.name} with activation checkpointing needs"
            extra += f" {_gib(least.peak_checkpointed)}"
        if row.engine is None:
            extra += "; this offload is not built yet, so it cannot be run here"
    elif before:
        short = ", ".join(f"{r.name} {_gib(r.peak_checkpointed if checkpointing else r.peak)}" for r in before)
        extra = f", where {short} would be needed"
    else:
        extra = ", and no stage sends less per step"
    if checkpointing:
        extra += " (with activation checkpointing, without which no stage fits)" if row.offload == "none" else ""
    return f"{needs}{extra}."


# -- what a module needs ---------------------------------------------------------------------------------------------


class _Study:
    """Everything that is found out about a module once, whatever the stage."""

    def __init__(
        self,
        module: LightningModule,
        batch: Any,
        precision: str,
        device: torch.device,
        config: ZeroConfig,
        world_size: int,
        max_steps: int,
    ) -> None:
        self.config, self.world_size, self.max_steps = config, world_size, max_steps
        self.dtypes = PRECISIONS[precision]
        self.notes: list[str] = []
        self.target, self.device = device, device
        """What is planned for, and whose operators are traced."""
        if device.type != "cpu" and not torch.get_device_module(device.type).is_available():
            self.device = torch.device("cpu")
            self._note(f"this machine has no {device.type}, so the CPU's operators were traced")
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.module, self.batch = module, batch
        self.batch_size = _batch_size(batch)
        stored = self._shadow(lambda name, t: self._stored(t))
        self.units = self._plan_units(stored)
        if not any(p.requires_grad for p in stored.parameters()):
            raise ValueError(f"{type(module).__name__} has no trainable parameter, so there is nothing to plan.")
        self.optimizers = self._configure_optimizers(stored)
        self.optimizer_names = [type(o).__name__ for o in self.optimizers]
        self.elementwise = [is_elementwise(o) for o in self.optimizers]
        self.steps_whole = {
            p
            for optimizer, elementwise in zip(self.optimizers, self.elementwise, strict=True)
            if not elementwise
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self.gradients_together: list[set[str]] = []
        """Manual optimization: the gradients that exist at each step of an optimizer."""
        if not module.automatic_optimization:
            self._note("manual optimization: traffic and peak are those of one forward and backward of every unit")
        self.traces: dict[tuple[bool, bool, int], Trace | None] = {}
        plain = self.trace(sharded=True, checkpointing=False)
        used = plain.used if plain is not None else {n for n, p in stored.named_parameters() if p.requires_grad}
        self.flops = plain.flops if plain is not None else 0.0
        states, self.optimizer_peak, self.optimizer_peak_whole = self._optimizer_states(stored, used)
        self.layout = self._layout(stored, used, states)

    # -- copies of the module

    def _shadow(self, dtype_of: Callable[[str, Tensor], torch.dtype]) -> Any:
        copied: Any = shadow(self.module, self.mode, self.device, dtype_of)
        with self.mode:
            copied.configure_model()
        return copied

    def _stored(self, t: Tensor) -> torch.dtype:
        return self.dtypes.stored if self.dtypes.stored is not None and t.is_floating_point() else t.dtype

    def _plan_units(self, copied: nn.Module) -> UnitPlan:
        whole = (nn.modules.batchnorm._BatchNorm,) if self.dtypes.compute is not None else ()
        return plan_units(copied, self.config.units, self.config.min_unit_numel, whole)

    def _layout(self, stored: nn.Module, used: set[str], states: Mapping[str, tuple[float, float]]) -> Layout:
        def size(name: str, p: Tensor, replicated: bool) -> ParameterSize:
            floating = p.is_floating_point() and not replicated
            compute = self.dtypes.compute if floating and self.dtypes.compute is not None else p.dtype
            reduce = self.dtypes.reduce if floating and self.dtypes.reduce is not None else compute
            per_element, whole = states.get(name, (0.0, 0.0))
            return ParameterSize(
                name=name,
                shape=tuple(p.shape),
                itemsize=p.element_size(),
                compute_itemsize=compute.itemsize,
                reduce_itemsize=reduce.itemsize,
                trainable=p.requires_grad,
                used=name in used,
                state_per_element=per_element,
                state_whole=whole,
                steps_whole=p in self.steps_whole and not replicated,
            )

        units = tuple(
            UnitSize(name=u.name, parameters=tuple(size(n, p, False) for n, p in u.parameters.items()))
            for u in self.units.units
        )
        buffers = list(stored.buffers())
        return Layout(
            units=units,
            replicated=tuple(size(n, p, True) for n, p in self.units.replicated.items()),
            buffer_bytes=sum(b.numel() * b.element_size() for b in buffers),
            num_buffers=len(buffers),
        )

    # -- activations

    def trace(self, sharded: bool, checkpointing: bool, times: int = 1) -> Trace | None:
        """One micro-batch, ``times`` as large; ``None`` where it cannot be traced.

        ``sharded``: parameters are in the compute dtype, as they are gathered; else stored ones under autocast (DDP).
        """
        if self.dtypes.compute is None:
            sharded = True
        key = (sharded, checkpointing, times)
        if key not in self.traces:
            self.traces[key] = self._traced(*key)
        return self.traces[key]

    def _traced(self, sharded: bool, checkpointing: bool, times: int) -> Trace | None:
        if self.batch is None:
            self._note("no batch was given, so activations are not counted")
            return None
        whole = set(self.units.replicated)
        parameters = {name for name, _ in self.module.named_parameters()}

        def dtype_of(name: str, t: Tensor) -> torch.dtype:
            compute = self.dtypes.compute
            if sharded and compute is not None and t.is_floating_point() and name in parameters - whole:
                return compute
            return self._stored(t)

        try:
            copied = self._shadow(dtype_of)
            batch = fake_batch(self.batch, self.mode, self.device, times, self.dtypes.stored)
            known = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
            autocast = self.dtypes.autocast
            context = nullcontext() if autocast is None else torch.autocast(self.device.type, autocast)
            self._attach(copied, step=False)
            with _quiet(), _DefaultDtype(self.dtypes.stored):
                return trace(
                    copied,
                    self._plan_units(copied),
                    partial(_training_step, copied, batch),
                    self.mode,
                    checkpointing=checkpointing,
                    autocast=context,
                    known=known,
                )
        except NotTraceable as error:
            what = "with activation checkpointing " if checkpointing else ""
            self._note(f"the step {what}could not be traced, so its activations are not counted ({error})")
            return None

    def moments(self, sharded: bool, checkpointing: bool, factor: float = 1.0) -> list[Moment]:
        found = self.trace(sharded, checkpointing)
        if found is None:
            return untraced(self.layout)
        if factor == 1.0:
            return found.moments
        doubled = self.trace(sharded, checkpointing, times=2)
        return scaled(found.moments, None if doubled is None else doubled.moments, factor)

    # -- optimizers

    def _attach(self, copied: Any, step: bool) -> None:
        """Gives the copy a Trainer that logs nothing, and optimizers whose steps do nothing."""
        trainer = _SilentTrainer(self.max_steps)
        copied._trainer = None
        copied.trainer = trainer
        strategy: Any = trainer.strategy
        strategy._lightning_module = copied
        strategy.model = copied
        if not step and not copied.automatic_optimization:
            optimizers = self._set_up_optimizers(copied)
            names = {p: name for name, p in copied.named_parameters()}
            self.gradients_together.clear()

            def instead_of_step(*args: Any, **kwargs: Any) -> None:
                _no_step(*args, **kwargs)
                self.gradients_together.append({name for p, name in names.items() if p.grad is not None})

            for optimizer in optimizers:
                optimizer.step = instead_of_step  # type: ignore[method-assign, assignment]

    def _set_up_optimizers(self, copied: Any) -> list[Optimizer]:
        trainer = copied.trainer
        trainer.state.fn = TrainerFn.FITTING
        with _quiet(), self.mode:
            trainer.strategy.setup_optimizers(trainer)
        return [o for o in trainer.strategy.optimizers if type(o).__name__ != "_MockOptimizer"]  # Lightning's for None

    def _configure_optimizers(self, copied: Any) -> list[Optimizer]:
        self._attach(copied, step=True)
        try:
            return self._set_up_optimizers(copied)
        except Exception as error:  # user code that wants more of a Trainer than there is
            self._note(
                f"configure_optimizers could not be run ({type(error).__name__}: {error}), so AdamW on everything is"
                " assumed"
            )
            with self.mode:
                return [torch.optim.AdamW([p for p in copied.parameters() if p.requires_grad])]

    def _optimizer_states(
        self, stored: nn.Module, used: set[str]
    ) -> tuple[dict[str, tuple[float, float]], float, float]:
        """Runs one step on what rank 0 would step on: ``name -> (state bytes per element, other state bytes)`` and
        the step's temporaries, on shards and on whole tensors."""
        names: dict[Tensor, str] = {p: n for n, p in stored.named_parameters()}
        sharded: set[Tensor] = {p for u in self.units.units for p in u.parameters.values()}
        found: dict[str, tuple[float, float]] = {}
        peak = peak_whole = 0.0
        for optimizer, elementwise in zip(self.optimizers, self.elementwise, strict=True):
            n = self.world_size if elementwise else 1
            stand_ins = self._stand_ins(optimizer, used, names, sharded, n)
            try:
                temporary = self._fake_step(optimizer, [s for s, _ in stand_ins])
            except Exception as error:  # an optimizer that needs values
                self._note(
                    f"a step of {type(optimizer).__name__} could not be traced ({type(error).__name__}: {error}), so"
                    " two states per parameter are assumed"
                )
                found |= {names[p]: (2.0 * p.element_size(), 0.0) for _, p in stand_ins}
                continue
            peak, peak_whole = max(peak, temporary), max(peak_whole, temporary * n)
            for stand_in, p in stand_ins:
                found[names[p]] = _state_of(optimizer.state.get(stand_in, {}), stand_in, p)
        return found, peak, peak_whole

    def _stand_ins(
        self, optimizer: Optimizer, used: set[str], names: Mapping[Any, str], sharded: set[Any], n: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Replaces the optimizer's parameters by fakes of rank 0's shape with gradients; ``(stand-in, original)``."""
        made: list[tuple[Tensor, Tensor]] = []
        with self.mode:
            for group in optimizer.param_groups:
                inside = []
                for p in group["params"]:
                    if names.get(p) not in used or not p.requires_grad:
                        continue
                    rows = math.ceil(p.shape[0] / n) if p in sharded else None
                    shape = p.shape if rows is None else (rows, *p.shape[1:])
                    stand_in = torch.empty(shape, dtype=p.dtype, device=self.device).requires_grad_()
                    stand_in.grad = torch.empty_like(stand_in)
                    made.append((stand_in, p))
                    inside.append(stand_in)
                group["params"] = inside
                if self.target.type == "cuda" and not group.get("fused") and group.get("foreach", False) is None:
                    group["foreach"] = True  # what torch.optim chooses for CUDA tensors, but not for fake ones
        optimizer.state.clear()
        return made

    def _fake_step(self, optimizer: Optimizer, stand_ins: Sequence[Tensor]) -> float:
        tracker = LiveBytes([*stand_ins, *(s.grad for s in stand_ins if s.grad is not None)])
        closure = partial(_fake_loss, self.device)
        with self.mode, tracker:
            if type(optimizer) is torch.optim.LBFGS:
                optimizer.step(closure)
            else:
                optimizer.step()
        return tracker.peak - tracker.live

    # -- rows

    def row(self, stage: int, offload: str, rules: StepRules, usable: float | None) -> Row:
        name = "ddp" if stage == 0 else f"zero{stage}" + ({"cpu": "_offload", "nvme": "_nvme"}.get(offload, ""))
        rules = dataclasses.replace(rules, stage=stage)
        plain, checkpointed = (self._step(rules, offload, c) for c in (False, True))
        together: Sequence[set[str] | None] = self.gradients_together or [None]
        states = [state_bytes(self.layout, stage, self.world_size, alive=alive) for alive in together]
        state = max(states, key=lambda s: s.gradients)
        step, moved, at_peak, peak = plain
        largest = max((u.gathered_bytes(self.world_size) for u in self.layout.units), default=0)
        return Row(
            name=name,
            stage=stage,
            offload=offload,
            engine="ddp" if stage == 0 else OFFLOADS[offload].get(stage),
            parameters=state.parameters,
            gradients=state.gradients,
            optimizer=state.optimizer,
            gathered_unit=float(largest) if stage else 0.0,
            activations=max(m.peak_bytes for m in self.moments(stage > 0, False)),
            activations_checkpointed=max(m.peak_bytes for m in self.moments(stage > 0, True)),
            at_peak=at_peak,
            peak=peak,
            at_peak_checkpointed=checkpointed[2],
            peak_checkpointed=checkpointed[3],
            host=moved.host,
            disk=moved.disk,
            sent=step.sent,
            sent_total=step.total_sent,
            pcie=moved.pcie_per_step,
            disk_traffic=moved.disk_per_step,
            fits=usable is not None and peak <= usable,
            fits_checkpointed=usable is not None and checkpointed[3] <= usable,
            max_micro_batch=self._largest(rules, offload, False, usable),
            max_micro_batch_checkpointed=self._largest(rules, offload, True, usable),
        )

    def _step(
        self, rules: StepRules, offload: str, checkpointing: bool, factor: float = 1.0
    ) -> tuple[StepBytes, OffloadBytes, dict[str, float], float]:
        moments = self.moments(sharded=rules.stage > 0, checkpointing=checkpointing, factor=factor)
        temporary = self.optimizer_peak if rules.stage else self.optimizer_peak_whole
        host_is_device = self.target.type == "cpu"
        steps_elsewhere = offload != "none" and not host_is_device
        rules = dataclasses.replace(rules, from_host=steps_elsewhere)
        step = simulate(self.layout, moments, rules, 0.0 if steps_elsewhere else temporary)
        moved = offload_bytes(self.layout, step, rules, offload, host_is_device)
        at_peak = {kind: max(step.at_peak[kind] - moved.off_device.get(kind, 0.0), 0.0) for kind in KINDS}
        return step, moved, at_peak, sum(at_peak.values())

    def _largest(self, rules: StepRules, offload: str, checkpointing: bool, usable: float | None) -> int:
        """The largest micro-batch whose step's peak stays below ``usable``; 0 where none does or none was traced."""
        if usable is None or not self.batch_size or self.trace(rules.stage > 0, checkpointing) is None:
            return 0

        def fits(size: int) -> bool:
            return self._step(rules, offload, checkpointing, size / self.batch_size)[3] <= usable

        if not fits(1):
            return 0
        low, high = 1, 2
        while high <= MAX_MICRO_BATCH and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class _SilentTrainer(Trainer):
    """Enough of a Trainer for a traced step: logs nothing, knows how many steps there will be."""

    def __init__(self, max_steps: int) -> None:
        self._planned_steps = max_steps
        with _quiet():
            super().__init__(
                barebones=True,
                accelerator="cpu",
                devices=1,
                max_steps=max_steps,
                max_epochs=-1,
                plugins=[LightningEnvironment()],  # whatever cluster this process belongs to
            )

    @property
    def estimated_stepping_batches(self) -> int | float:
        return self._planned_steps


class _DefaultDtype:
    """``torch.set_default_dtype`` for the length of a block, as Lightning's ``*-true`` precisions do."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)

    def __exit__(self, *unused: object) -> None:
        torch.set_default_dtype(self.before)


@contextmanager
def _quiet() -> Iterator[None]:
    """A second Trainer need not tell about the machine again."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)


def _training_step(module: LightningModule, batch: Any) -> Tensor | None:
    module.train()
    output = module.training_step(batch, 0)
    if not module.automatic_optimization:
        return None
    return output["loss"] if isinstance(output, Mapping) else output  # type: ignore[return-value]


def _no_step(*args: Any, **kwargs: Any) -> None:
    closure = kwargs.get("closure", args[0] if args else None)
    if closure is not None:
        closure()


def _fake_loss(device: torch.device) -> Tensor:
    return torch.empty((), device=device)


def _state_of(state: Mapping[str, Any], stand_in: Tensor, p: Tensor) -> tuple[float, float]:
    """``(bytes per element, other bytes)`` of one parameter's state."""
    per_element = other = 0.0
    for value in state.values():
        if not isinstance(value, Tensor):
            continue
        if value.shape == stand_in.shape and value.dim():
            per_element += value.element_size()
        else:
            nbytes = value.numel() * value.element_size()
            other += nbytes
    return per_element, other


def _batch_size(batch: Any) -> int:
    return next((t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), 0)


# -- what is shown ---------------------------------------------------------------------------------------------------


def _gib(nbytes: float) -> str:
    value = nbytes / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _table(plan: Plan) -> str:
    head = [
        f"{plan.module}: {plan.num_parameters:,} parameters ({plan.num_trainable:,} trainable),"
        f" {', '.join(plan.optimizers) or 'no optimizer'}, {plan.precision}",
        f"{plan.world_size} rank(s), micro-batch {plan.micro_batch}, {plan.micro_batches} per optimizer step,"
        f" on {plan.device}; GiB per rank",
        "",
    ]
    columns = [
        "",
        "param",
        "grad",
        "optim",
        "unit",
        "act",
        "peak",
        "act ckpt",
        "peak ckpt",
        "host",
        "disk",
        "sent/step",
        "PCIe/step",
        "fits",
        "max batch",
    ]
    rows = [columns]
    for r in plan.rows:
        fits = "?" if plan.usable_bytes is None else "yes" if r.fits else "ckpt" if r.fits_checkpointed else "no"
        largest = f"{r.max_micro_batch}/{r.max_micro_batch_checkpointed}"
        rows.append(
            [
                r.name
                + (" *" if r.engine is None else "" if r.engine in ACCOUNTED else " +")
                + (" <-" if r.name == plan.choice else ""),
                *map(_gib, (r.parameters, r.gradients, r.optimizer, r.gathered_unit)),
                _gib(r.activations),
                _gib(r.peak),
                _gib(r.activations_checkpointed),
                _gib(r.peak_checkpointed),
                *(_gib(v) if v else "-" for v in (r.host, r.disk, r.sent_total, r.pcie)),
                fits,
                "-" if plan.usable_bytes is None else largest,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    foot = [
        "",
        "param, grad, optim: between two steps; unit: the largest gathered one; act: most that activations take;",
        "peak: most of a step together; ckpt: with each unit's activations recomputed; max batch: the largest",
        "micro-batch that fits, without / with that.",
    ]
    if any(r.engine is None for r in plan.rows):
        foot.append("* arithmetic only: no engine runs it here yet.")
    if any(r.engine not in (None, *ACCOUNTED) for r in plan.rows):
        foot.append("+ run by DeepSpeed, whose own buffers are not counted; states are the same.")
    foot += [f"note: {note}." for note in plan.notes]
    return "\n".join([*head, *lines, *foot, "", f"take {plan.reason}" if plan.choice else plan.reason])


def _plot(plan: Plan, path: str) -> None:
    try:
        import matplotlib  # optional: pip install lightning-zero[plot]
    except ImportError as error:
        raise ValueError(f"plan.plot={path!r} needs matplotlib: pip install 'lightning-zero[plot]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.1 * len(plan.rows) + 2), 4.5))
    bottoms = [0.0] * len(plan.rows)
    for kind in KINDS:
        heights = [r.at_peak[kind] / GIB for r in plan.rows]
        axes.bar([r.name for r in plan.rows], heights, bottom=bottoms, label=kind)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    if plan.device_bytes is not None:
        axes.axhline(plan.device_bytes / GIB, color="black", linestyle="--", label="device")
    axes.set_ylabel("GiB per rank at the peak of a step")
    axes.set_title(f"{plan.module}, {plan.num_parameters / 1e9:.3g} B parameters, {plan.world_size} ranks")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)
