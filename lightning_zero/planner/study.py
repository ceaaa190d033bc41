"""The needs of a module at any stage: its units, its activations, its optimizers' states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import ActivationCheckpointingConfig, ZeroConfig
from lightning_zero.engines.elementwise import is_elementwise
from lightning_zero.engines.optimizer_family import family, states
from lightning_zero.engines.units import UnitPlan, plan_units
from lightning_zero.planner.memory import (
    KINDS,
    Layout,
    Moment,
    OffloadBytes,
    ParameterSize,
    StepBytes,
    StepRules,
    UnitSize,
    kept_bytes,
    offload_bytes,
    scaled,
    simulate,
    state_bytes,
    untraced,
)
from lightning_zero.planner.rows import Row
from lightning_zero.planner.silent import DefaultDtype, SilentTrainer, fake_loss, no_step, quiet, training_step
from lightning_zero.planner.tracing import NO_RECOMPUTATION, LiveBytes, NotTraceable, Trace, fake_batch, shadow, trace
from lightning_zero.private.lightning import MockOptimizer
from lightning_zero.private.torch import BatchNorm, FakeTensorMode, pytree

MAX_MICRO_BATCH = 65536


# -- precision -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dtypes:
    """``None`` keeps the parameter's own dtype."""

    stored: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    autocast: torch.dtype | None = None


_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PRECISIONS: dict[str, Dtypes] = {
    "32-true": Dtypes(),
    "64-true": Dtypes(stored=_FP64),
    "bf16-true": Dtypes(stored=_BF16),
    "16-true": Dtypes(stored=_FP16),
    "bf16-mixed": Dtypes(compute=_BF16, reduce=_FP32, autocast=_BF16),
    "16-mixed": Dtypes(compute=_FP16, reduce=_FP32, autocast=_FP16),
}
"""As :mod:`lightning_zero.engines.precision` gives them to engines."""
_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed", "None": "32-true"}


def precision_name(value: Any) -> str:
    name = _ALIASES.get(str(value), str(value))
    if name not in PRECISIONS:
        raise ValueError(f"precision={value!r}: use one of {', '.join(PRECISIONS)}.")
    return name


# -- the module ------------------------------------------------------------------------------------------------------


class Study:
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
        """The device of the plan, and the one whose operators are traced."""
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
        self.elementwise = [is_elementwise(o, config.elementwise_optimizers or ()) for o in self.optimizers]
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
        given = config.activation_checkpointing
        self.recompute = given if given.is_on else ActivationCheckpointingConfig(target="full")
        """Recomputation in the columns with it: the setting, else ``"full"``."""
        if given.offload and self.target.type == "cpu":
            self.recompute = dataclasses.replace(given, offload=False)  # host memory is the device's
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
        whole = (BatchNorm,) if self.dtypes.compute is not None else ()
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
        ``checkpointing``: with :attr:`recompute`.
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
            with quiet(), DefaultDtype(self.dtypes.stored):
                return trace(
                    copied,
                    self._plan_units(copied),
                    partial(training_step, copied, batch),
                    self.mode,
                    recompute=self.recompute if checkpointing else NO_RECOMPUTATION,
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

    def _waiting_bytes(self, sharded: bool) -> float:
        """Saved inputs in host memory, with recomputation."""
        found = self.trace(sharded, checkpointing=True)
        return 0.0 if found is None else found.waiting_bytes

    # -- optimizers

    def _attach(self, copied: Any, step: bool) -> None:
        """Gives the copy a Trainer that logs nothing, and optimizers whose steps do nothing."""
        trainer = SilentTrainer(self.max_steps)
        copied.trainer = trainer
        strategy: Any = trainer.strategy
        strategy.connect(copied)
        if not step and not copied.automatic_optimization:
            optimizers = self._set_up_optimizers(copied)
            names = {p: name for name, p in copied.named_parameters()}
            self.gradients_together.clear()

            def instead_of_step(*args: Any, **kwargs: Any) -> None:
                no_step(*args, **kwargs)
                self.gradients_together.append({name for p, name in names.items() if p.grad is not None})

            for optimizer in optimizers:
                optimizer.step = instead_of_step  # type: ignore[method-assign, assignment]

    def _set_up_optimizers(self, copied: Any) -> list[Optimizer]:
        trainer = copied.trainer
        trainer.state.fn = TrainerFn.FITTING
        with quiet(), self.mode:
            trainer.strategy.setup_optimizers(trainer)
        return [o for o in trainer.strategy.optimizers if not isinstance(o, MockOptimizer)]

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
            if len(family(optimizer)) > 1:
                self._note(
                    f"{type(optimizer).__name__} is made around another optimizer: states that it makes later than in"
                    " its first step are not counted"
                )
            peak, peak_whole = max(peak, temporary), max(peak_whole, temporary * n)
            for stand_in, p in stand_ins:
                found[names[p]] = _state_of([each.get(stand_in, {}) for each in states(family(optimizer))], stand_in)
        return found, peak, peak_whole

    def _stand_ins(
        self, optimizer: Optimizer, used: set[str], names: Mapping[Any, str], sharded: set[Any], n: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Replaces the optimizer's parameters by fakes of rank 0's shape with gradients; ``(stand-in, original)``."""
        made: dict[Tensor, Tensor] = {}
        groups = {id(group): group for member in family(optimizer) for group in member.param_groups}
        with self.mode:
            for group in groups.values():
                inside = []
                for p in group["params"]:
                    if names.get(p) not in used or not p.requires_grad:
                        continue
                    if p not in made:
                        rows = math.ceil(p.shape[0] / n) if p in sharded else None
                        shape = p.shape if rows is None else (rows, *p.shape[1:])
                        made[p] = torch.empty(shape, dtype=p.dtype, device=self.device).requires_grad_()
                        made[p].grad = torch.empty_like(made[p])
                    inside.append(made[p])
                group["params"] = inside
                if self.target.type == "cuda" and not group.get("fused") and group.get("foreach", False) is None:
                    group["foreach"] = True  # what torch.optim chooses for CUDA tensors, but not for fake ones
            for state in states(family(optimizer)):
                made_early = {made[p]: _laid_out(its, p, made[p]) for p, its in state.items() if p in made}
                state.clear()
                state.update(made_early)
        return [(stand_in, p) for p, stand_in in made.items()]

    def _fake_step(self, optimizer: Optimizer, stand_ins: Sequence[Tensor]) -> float:
        tracker = LiveBytes([*stand_ins, *(s.grad for s in stand_ins if s.grad is not None)])
        closure = partial(fake_loss, self.device)
        with self.mode, tracker:
            try:
                optimizer.step()
            except Exception:  # LBFGS, SAM and others evaluate the loss themselves
                # Any other error comes again, and the caller notes it
                optimizer.step(closure)  # type: ignore[arg-type]
        return tracker.peak - tracker.live

    # -- rows

    def row(self, stage: int, offload: str, rules: StepRules, usable: float | None) -> Row:
        name = "ddp" if stage == 0 else f"zero{stage}" + ({"cpu": "_offload", "nvme": "_nvme"}.get(offload, ""))
        keeps = rules.keeps_shards_in_copies and offload == "none"
        rules = dataclasses.replace(rules, stage=stage, keeps_shards_in_copies=keeps)
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
            parameters=state.parameters + kept_bytes(self.layout, rules),
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
            host_checkpointed=moved.host + self._waiting_bytes(stage > 0),
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


def _laid_out(state: Mapping[str, Any], p: Tensor, stand_in: Tensor) -> dict[str, Any]:
    """A parameter's state that the optimizer made at its construction."""
    return {
        key: torch.empty_like(stand_in, dtype=value.dtype)
        if isinstance(value, Tensor) and value.dim() and value.shape == p.shape
        else value
        for key, value in state.items()
    }


def _state_of(states_of_parameter: Iterable[Mapping[str, Any]], stand_in: Tensor) -> tuple[float, float]:
    """``(bytes per element, other bytes)`` of one parameter's states."""
    per_element = other = 0.0
    for value in (value for state in states_of_parameter for value in state.values()):
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
