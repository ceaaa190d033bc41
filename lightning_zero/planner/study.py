"""Measures what a module needs at every stage: its units, activations and optimizer states."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import ActivationCheckpointingConfig, ZeroConfig
from lightning_zero.engines.elementwise import is_elementwise
from lightning_zero.engines.optimizer_family import family, states
from lightning_zero.engines.precision import REDUCE_DTYPES
from lightning_zero.engines.units import BATCH_NORMS, UnitPlan, plan_units
from lightning_zero.planner import memory
from lightning_zero.planner.memory import Layout, Moment, ParameterSize, StepRules, UnitSize
from lightning_zero.planner.rows import Row, row_name
from lightning_zero.planner.tracing import LiveBytes, NotTraceable, fake, shadow, trace
from lightning_zero.private.torch import FakeTensorMode, pytree

# -- precision -------------------------------------------------------------------------------------------------------


_BF16, _FP16, _FP64 = torch.bfloat16, torch.float16, torch.float64
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "32-true": (None, None),
    "64-true": (_FP64, None),
    "bf16-true": (_BF16, None),
    "16-true": (_FP16, None),
    "bf16-mixed": (None, _BF16),
    "16-mixed": (None, _FP16),
}
"""Precision -> dtype in which parameters are stored, and dtype of compute under autocast; ``None`` keeps a parameter's
own. Under autocast gradients are reduced in fp32, as in :mod:`lightning_zero.engines.precision`."""
_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed", "None": "32-true"}


def precision_name(value: Any) -> str:
    name = _ALIASES.get(str(value), str(value))
    if name not in PRECISIONS:
        raise ValueError(f"precision={value!r}: use one of {', '.join(PRECISIONS)}.")
    return name


# -- a Trainer for steps that are only traced --------------------------------------------------------------------------


def _silent_trainer(max_steps: int) -> Trainer:
    """A Trainer that logs nothing and, without a limit of epochs, knows its number of steps without data."""
    options: dict[str, Any] = {"barebones": True, "max_epochs": -1, "accelerator": "cpu", "devices": 1}
    with quiet():  # its environment ignores the cluster that this process may run on
        return Trainer(max_steps=max_steps, plugins=[LightningEnvironment()], **options)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses logs and warnings, because a second Trainer would report the hardware again."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# -- the module ------------------------------------------------------------------------------------------------------


class Study:
    """Everything about a module that is independent of the stage, measured once. Arguments are those of
    :func:`~lightning_zero.planner.run.plan`."""

    def __init__(
        self,
        module: LightningModule,
        batch: Any,
        precision: str,
        device: torch.device,
        config: ZeroConfig,
        max_steps: int,
    ) -> None:
        self.config, self.max_steps = config, max_steps
        self.stored, self.compute = PRECISIONS[precision]
        self.notes: list[str] = []
        self.target = self.device = device
        """``target`` is the device of the plan; ``device`` is the one whose operators are traced."""
        if device.type != "cpu" and not torch.get_device_module(device.type).is_available():
            self.device = torch.device("cpu")
            self.notes.append(f"this machine has no {device.type}, so the CPU's operators were traced")
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        leaves = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
        self.batch, self.batch_size = batch, leaves[0].shape[0] if leaves else 0
        self.copy = cast(LightningModule, shadow(module, self.mode, self.device, lambda name, t: self._stored(t)))
        with self.mode:
            self.copy.configure_model()
        if not any(p.requires_grad for p in self.copy.parameters()):
            raise ValueError(f"{type(module).__name__} has no trainable parameters, so there is nothing to plan.")
        if not module.automatic_optimization:
            self.notes.append(
                "manual optimization: gradients of all optimizers are counted as if they existed at the same time"
            )
        self.units = self._plan_units(self.copy)
        self.optimizers = self._set_up_optimizers(self.copy)
        given = config.activation_checkpointing
        if given.offload and self.target.type != "cpu":
            self.notes.append("activation_checkpointing.offload: saved inputs are counted as if they stayed there")
        recompute = given if given.is_on else ActivationCheckpointingConfig(target="full")
        traces = {False: self._trace(None), True: self._trace(recompute)}
        used = {name for name, p in self.copy.named_parameters() if p.requires_grad}
        if (plain := traces[False]) is not None:
            used = {m.gradient for m in plain}
        self.optimizer_peak = 0.0
        """Bytes of temporaries of an optimizer step on unsharded parameters."""
        self.layout = self._layout(used, self._optimizer_states(used))
        self.traces = {recomputes: made or memory.untraced(self.layout) for recomputes, made in traces.items()}
        """Traces without recomputation and with it."""

    def _stored(self, t: Tensor) -> torch.dtype:
        return self.stored if self.stored is not None and t.is_floating_point() else t.dtype

    def _plan_units(self, copied: nn.Module) -> UnitPlan:
        kept_full = BATCH_NORMS if self.compute is not None else ()
        return plan_units(copied, self.config.units, self.config.min_unit_numel, kept_full)

    def _layout(self, used: set[str], states: Mapping[str, tuple[float, float]]) -> Layout:
        not_elementwise = [optimizer for optimizer in self.optimizers if not self._is_elementwise(optimizer)]
        unsharded = {p for optimizer in not_elementwise for group in optimizer.param_groups for p in group["params"]}

        def size(name: str, p: Tensor, replicated: bool) -> ParameterSize:
            mixed = self.compute is not None and p.is_floating_point() and not replicated
            compute, reduce = (self.compute, torch.float32) if mixed else (p.dtype, p.dtype)
            if self.config.reduce_dtype is not None and p.is_floating_point() and not replicated:
                reduce = REDUCE_DTYPES[self.config.reduce_dtype]
            assert compute is not None
            per_element, other = states.get(name, (0.0, 0.0))
            if p in unsharded:  # states stay full, as under DDP
                per_element, other = 0.0, other + per_element * p.numel()
            return ParameterSize(
                name=name,
                shape=tuple(p.shape),
                itemsize=p.element_size(),
                compute_itemsize=compute.itemsize,
                reduce_itemsize=reduce.itemsize,
                trainable=p.requires_grad,
                stepped=p.requires_grad and name in used,
                state_per_element=per_element,
                state_replicated=other,
                steps_unsharded=p in unsharded and not replicated,
            )

        units = tuple(
            UnitSize(parameters=tuple(size(n, p, False) for n, p in u.parameters.items())) for u in self.units.units
        )
        return Layout(
            units=units,
            replicated=tuple(size(n, p, True) for n, p in self.units.replicated.items()),
            broadcast_bytes=sum(b.nbytes for b in self.copy.buffers()) if self.config.broadcast_buffers else 0,
        )

    # -- activations

    def _trace(self, recompute: ActivationCheckpointingConfig | None) -> list[Moment] | None:
        """Traces one micro-batch with parameters in the compute dtype, as gathered ones are; ``None`` if that is not
        possible."""
        if self.batch is None:
            self.notes.append("no batch was given, so activations are not counted")
            return None
        gathered = {name for unit in self.units.units for name in unit.parameters}

        def dtype_of(name: str, t: Tensor) -> torch.dtype:
            is_cast = self.compute is not None and name in gathered and t.is_floating_point()
            return self.compute if is_cast else t.dtype  # type: ignore[return-value]

        autocast = nullcontext() if self.compute is None else torch.autocast(self.device.type, self.compute)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.stored or default)
        try:
            copied: Any = shadow(self.copy, self.mode, self.device, dtype_of)
            for optimizer in self._set_up_optimizers(copied):
                optimizer.step = lambda closure=None: closure and closure()  # type: ignore[assignment, method-assign]
            with quiet(), self.mode:
                leaves, spec = pytree.tree_flatten(self.batch)
                leaves = [fake(t, self.device, self._stored(t)) if isinstance(t, Tensor) else t for t in leaves]
                batch, known = pytree.tree_unflatten(leaves, spec), [t for t in leaves if isinstance(t, Tensor)]
                step = partial(_training_step, copied, batch, autocast)
                return trace(copied, self._plan_units(copied), step, known, recompute)
        except NotTraceable as error:
            which = "with activation checkpointing " if recompute is not None else ""
            self.notes.append(f"the step {which}could not be traced, so activations are not counted ({error})")
            return None
        finally:
            torch.set_default_dtype(default)

    # -- optimizers

    def _set_up_optimizers(self, copied: Any) -> list[Optimizer]:
        """Attaches a silent Trainer to the copy and returns the optimizers of ``configure_optimizers``."""
        trainer = copied.trainer = _silent_trainer(self.max_steps)
        trainer.strategy.connect(copied)
        trainer.state.fn = TrainerFn.FITTING
        with quiet(), self.mode:
            try:
                trainer.strategy.setup_optimizers(trainer)
                return list(trainer.strategy.optimizers)
            except Exception as error:  # user code may need a real Trainer
                found = f"{type(error).__name__}: {error}"
                self.notes.append(f"configure_optimizers could not be run ({found}), so AdamW is assumed")
                return [torch.optim.AdamW([p for p in copied.parameters() if p.requires_grad])]

    def _is_elementwise(self, optimizer: Optimizer) -> bool:
        return is_elementwise(optimizer, self.config.elementwise_optimizers or ())

    def _optimizer_states(self, used: set[str]) -> dict[str, tuple[float, float]]:
        """Runs one step on the fake parameters: ``name -> (state bytes per element, other state bytes)``."""
        names = {p: name for name, p in self.copy.named_parameters()}
        with self.mode:
            for p, name in names.items():
                p.grad = torch.empty_like(p) if name in used else None
        found: dict[str, tuple[float, float]] = {}
        for optimizer in self.optimizers:
            mine = [p for group in optimizer.param_groups for p in group["params"] if names.get(p) in used]
            try:
                peak = self._fake_step(optimizer)
            except Exception as error:  # fake tensors have no values, which some optimizers need
                reason = f"{type(optimizer).__name__} could not be traced ({type(error).__name__}: {error})"
                self.notes.append(f"a step of {reason}, so two states per parameter are assumed")
                found |= {names[p]: (2.0 * p.element_size(), 0.0) for p in mine}
                continue
            self.optimizer_peak = max(self.optimizer_peak, peak)
            found |= {names[p]: _state_of([each.get(p, {}) for each in states(family(optimizer))], p) for p in mine}
        return found

    def _fake_step(self, optimizer: Optimizer) -> float:
        """Runs a step on fake parameters and returns the peak bytes of its temporaries."""
        if self.target.type == "cuda":
            for group in (group for member in family(optimizer) for group in member.param_groups):
                if not group.get("fused") and group.get("foreach", False) is None:
                    group["foreach"] = True  # torch.optim's choice for CUDA tensors, but not for fake ones
        live = LiveBytes([t for p in self.copy.parameters() for t in (p, p.grad) if t is not None])
        with self.mode, live:
            optimizer.step(lambda: torch.empty((), device=self.device))  # type: ignore[arg-type, return-value]
        return live.peak - live.live

    # -- rows

    def row(self, rules: StepRules, checkpointing: bool, usable: float | None, usable_on_host: float | None) -> Row:
        """The row for one stage and offload, with so many usable bytes per rank on the device and on the host."""
        layout, trace, n = self.layout, self.traces[checkpointing], rules.world_size if rules.stage else 1
        # An optimizer in host memory has its temporaries there; an element-wise one has those of its shards only.
        step_bytes = 0.0 if rules.offload != "none" and not rules.host_is_device else self.optimizer_peak
        if all(map(self._is_elementwise, self.optimizers)):
            step_bytes /= n
        moments = memory.account(layout, trace, rules, step_bytes)
        at_peak = max(moments, key=_total)
        peak = _total(at_peak)
        state, off = memory.state_bytes(layout, rules.stage, n), memory.offloaded_bytes(layout, rules)
        files = off["parameters"] + off["optimizer"] if rules.offload == "nvme" else 0.0
        host = sum(off.values()) - files
        return Row(
            name=row_name(rules.stage, rules.offload),
            stage=rules.stage,
            offload=rules.offload,
            checkpointing=checkpointing,
            parameters=state["parameters"],
            gradients=state["gradients"],
            optimizer=state["optimizer"],
            activations=max(m.activations for m in trace),
            at_peak=at_peak,
            peak=peak,
            host=host,
            disk=files,
            sent=memory.traffic(layout, trace, rules),
            fits=usable is not None and peak <= usable and (usable_on_host is None or host <= usable_on_host),
            max_micro_batch=self._largest(moments, usable),
        )

    def _largest(self, moments: Sequence[Mapping[str, float]], usable: float | None) -> int:
        """The largest micro-batch that fits, if activations are proportional to it; 0 if none fits or if there was no
        trace."""
        if usable is None:
            return 0
        room = [(usable - _total(m) + m["activations"], m["activations"]) for m in moments]
        times = min((left / taken for left, taken in room if taken), default=0.0)
        return int(self.batch_size * times) if all(left >= 0 for left, _ in room) else 0


def _total(kinds: Mapping[str, float]) -> float:
    return sum(kinds.values())


def _training_step(module: LightningModule, batch: Any, autocast: Any) -> Tensor | None:
    module.train()
    with autocast:
        output = module.training_step(batch, 0)
    if not module.automatic_optimization:
        return None
    return output["loss"] if isinstance(output, Mapping) else output  # type: ignore[return-value]


def _state_of(states_of_parameter: Iterable[Mapping[str, Any]], p: Tensor) -> tuple[float, float]:
    """``(bytes per element, other bytes)`` of the optimizer states of one parameter."""
    tensors = [value for state in states_of_parameter for value in state.values() if isinstance(value, Tensor)]
    per_element = sum(t.element_size() for t in tensors if t.dim() and t.shape == p.shape)
    return per_element, sum(t.nbytes for t in tensors) - per_element * p.numel()
