"""Measures the bytes and times of a run on each rank, and prints them next to the plan.

[Where a step's time goes] A *window* is one optimizer step with its micro-batches, from the end of the previous step to
the end of this one. On the CPU a mark is a clock reading. On CUDA it is an event on the compute stream, which is read
only after it has completed, at least one window later: the host never waits for the device.

    data            from the end of the hooks of one batch to the start of those of the next
    communication   exposed communication only, during which nothing is computed.
                    CPU: the time inside blocking collectives. CUDA: the waits of the compute stream before each unit's
                    forward and backward, and between the last gradient and the end of the backward
    optimizer       clipping and the step, without their communication
    compute         the rest

[Bytes] Parameters, gradients and optimizer states are counted tensor by tensor, in a few windows. Traffic is counted by
:class:`~lightning_zero.comm.meter.TrafficMeter` in all windows.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.callbacks.model_state_report import state_of_run
from lightning_zero.comm.meter import TrafficMeter
from lightning_zero.engines.model_state import KINDS as STATES
from lightning_zero.engines.optimizer_family import family
from lightning_zero.planner import Plan, Planner
from lightning_zero.private.lightning import comm_hook, unwrapped
from lightning_zero.private.torch import at_end_of_backward, pytree
from lightning_zero.private.torch_optim import takes_step_hooks

MIB = 2**20
PARTS = ("compute", "communication", "optimizer", "data")


# -- clocks ----------------------------------------------------------------------------------------------------------


class HostClock:
    """Marks are seconds: on a CPU, work is done when the next line runs."""

    def mark(self) -> Any:
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        return True

    def seconds(self, begin: Any, end: Any) -> float:
        return end - begin


class CudaClock:
    """Marks are events on the current stream."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return mark.query()

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3


@dataclass
class _Window:
    """Marks of one optimizer step."""

    begin: Any
    end: Any = None
    data: list[tuple[Any, Any]] = field(default_factory=list)
    optimizer: list[tuple[Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """Exposed communication outside the optimizer."""
    host_waits: float = 0.0
    """CPU: seconds inside blocking collectives."""
    data_waits: float = 0.0
    """The part of ``host_waits`` between two batches, where Lightning's ranks agree whether to end."""
    optimizer_waits: list[float] = field(default_factory=list)
    """The part of ``host_waits`` inside each optimizer's step."""
    samples: int = 0
    tokens: int = 0
    micro_batches: int = 0


# -- the callback ----------------------------------------------------------------------------------------------------


class ZeroMonitor(Callback):
    """Logs the cost of each optimizer step, and prints at the end what every rank stored and sent, next to the plan.

    Args:
        every_n_steps: Steps between logged averages; ``None`` is the Trainer's ``log_every_n_steps``.
        predict: Make the plan, whose trace also counts the FLOPs; takes about a second, once.
        peak_flops: Peak FLOP/s of one device, for MFU; ``None`` looks it up by the device's name.

    Validation, checkpoints and the time between epochs are part of no window. The first window is not counted, because
    it includes warm-up and the creation of optimizer states. After the run ``rows`` has one mapping per rank with all
    measurements, and ``plan`` has the prediction.
    """

    def __init__(self, every_n_steps: int | None = None, predict: bool = True, peak_flops: float | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r}: use 1 or more, or None.")
        self.every_n_steps, self.predict, self.peak_flops = every_n_steps, predict, peak_flops
        self.plan: Plan | None = None
        self.rows: list[dict[str, float]] = []
        self.meter = TrafficMeter()
        self._planner: Planner | None = None
        self._handles: list[Any] = []
        self._ddp: DistributedDataParallel | None = None
        self._ddp_bytes = 0

    # -- life ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.predict:
            # Copy the structure now, before the module is sharded; trace it with the first batch.
            self._planner = _planner_for(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        self._clock: Any = CudaClock() if device.type == "cuda" else HostClock()
        self._on_host = device.type != "cuda"
        self._parts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._state = dict.fromkeys(STATES, 0)
        self._elsewhere: dict[str, int] = {}
        self._pending: deque[_Window] = deque()
        self._window: _Window | None = None
        self._batch_end: Any = None
        self._optimizer_begin: Any = None
        self._steps = self._global_step = self._num_read = 0
        self._sample = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._watch(trainer)
        self.meter.install()
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._unwatch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._unwatch()

    def _watch(self, trainer: Trainer) -> None:
        model: Any = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            if comm_hook(trainer.strategy) is None:  # a user hook calls torch.distributed, which is counted
                self._ddp, self._ddp_bytes = model, _bytes_reduced(model)
        elif not self._on_host and isinstance(model, nn.Module):
            engine = getattr(trainer.strategy, "engine", None)
            units = [m for m in model.modules() if isinstance(m, FSDPModule)] if engine is None else engine.units
            for unit in units:
                self._watch_unit(unit)
        for optimizer in trainer.optimizers:
            for member in filter(takes_step_hooks, family(unwrapped(optimizer))):
                self._handles.append(member.register_step_post_hook(self._after_optimizer))

    def _unwatch(self) -> None:
        self.meter.remove()
        self._ddp = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch_unit(self, unit: Any) -> None:
        """Records marks around ``fully_shard``'s own hooks, in which the stream waits for a gather.

        Order matters: ``prepend`` puts a hook before ``fully_shard``'s, and the others run after it.
        """
        marks: list[Any] = []
        add = self._handles.append

        def begin(*unused: Any) -> None:
            marks.append(self._clock.mark())

        def end(*unused: Any) -> None:
            if marks and self._window is not None:
                self._window.waits.append((marks.pop(), self._clock.mark()))
            marks.clear()

        def on_output(action: Any) -> Any:
            def after_forward(module: nn.Module, args: Any, output: Any) -> None:
                for t in pytree.tree_leaves(output):
                    if isinstance(t, Tensor) and t.requires_grad:
                        t.register_hook(action)
                        return

            return after_forward

        add(unit.register_forward_pre_hook(begin, prepend=True))
        add(unit.register_forward_pre_hook(end))
        add(unit.register_forward_hook(on_output(begin), prepend=True))
        add(unit.register_forward_hook(on_output(end)))

    # -- marks ---------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window = self._batch_end = None  # the time between epochs is part of no step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window = self._batch_end = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._planner is not None:
            self._make_plan(batch)
        now = self._clock.mark()
        window = self._window
        if window is None:
            window = self._open(now)
        elif self._batch_end is not None:
            window.data.append((self._batch_end[0], now))
            window.data_waits += self.meter.seconds - self._batch_end[1]
        samples, tokens = _sizes(batch)
        window.samples += samples
        window.tokens += tokens
        window.micro_batches += 1
        self._sample = self._steps == 1 or self._steps % self._interval(trainer) == 0

    def _open(self, now: Any) -> _Window:
        window = self._window = _Window(begin=now)
        self._host_begin = self.meter.seconds
        self._sent_begin, self._received_begin = Counter(self.meter.sent), Counter(self.meter.received)
        return window

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
        self._backward_computed: Any = None
        if loss.requires_grad and (ddp or not self._on_host):
            # Queued before the engines' own end-of-backward callbacks, so it runs before they wait for reductions.
            def computed() -> None:
                self._backward_computed = (self._clock.mark(), self.meter.seconds)

            loss.register_hook(lambda grad: at_end_of_backward(computed))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._backward_computed is not None and self._window is not None:
            self._window.waits.append((self._backward_computed[0], self._clock.mark()))
            self._window.host_waits -= self.meter.seconds - self._backward_computed[1]  # already in `waits`
        self._backward_computed = None
        if self._ddp is not None and self._ddp.require_backward_grad_sync:
            self.meter.add("all_reduce", self._ddp_bytes, trainer.world_size)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._sample:  # counting walks all tensors, so only some windows do it
            state = state_of_run(trainer, pl_module)
            self._state["parameters"] = state.held("parameters")
            self._state["gradients"] = max(self._state["gradients"], state.held("gradients"))
        self._optimizer_begin = (self._clock.mark(), self.meter.seconds)
        self._optimizer_ended = False

    def _after_optimizer(self, *unused: Any) -> None:
        if self._optimizer_begin is None or self._window is None:
            return
        begin, seconds = self._optimizer_begin
        if self._optimizer_ended:  # an optimizer that steps another one: only the outer step, which ends last, counts
            self._window.optimizer.pop()
            self._window.optimizer_waits.pop()
        self._window.optimizer.append((begin, self._clock.mark()))
        self._window.optimizer_waits.append(self.meter.seconds - seconds)
        self._optimizer_ended = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = self._clock.mark()
        self._batch_end = (now, self.meter.seconds)
        self._optimizer_begin = None
        if trainer.global_step == self._global_step or self._window is None:
            return  # a micro-batch that only accumulated
        if self._sample:
            state = state_of_run(trainer, pl_module)
            self._state["optimizer"] = state.held("optimizer")
            self._elsewhere = {place: state.at(place) for place in ("host", "disk")}
        window, window.end = self._window, now
        window.host_waits += self.meter.seconds - self._host_begin
        self._pending.append(window)
        for total, counter, begin in (
            (self._sent, self.meter.sent, self._sent_begin),
            (self._received, self.meter.received, self._received_begin),
        ):
            if self._steps == 1:
                total.clear()
            for kind, value in counter.items():
                total[kind] += value - begin[kind]
        self._steps += 1
        self._global_step = trainer.global_step
        self._open(now)
        self._read()
        if self._steps % self._interval(trainer) == 0:
            self._log(trainer, pl_module)

    def _interval(self, trainer: Trainer) -> int:
        return self.every_n_steps or int(getattr(trainer, "log_every_n_steps", 0)) or 50

    # -- readings ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Adds up the windows whose marks have completed."""
        while self._pending and self._clock.passed(self._pending[0].end):
            window = self._pending.popleft()
            if self._num_read == 1:  # drop the first: warm-up, and waits for ranks that were slow to plan
                self._parts.clear()
                self._totals.clear()
            self._num_read += 1
            between = self._clock.seconds
            seconds = between(window.begin, window.end)
            optimizer = sum(between(*pair) for pair in window.optimizer)
            optimizer -= sum(window.optimizer_waits) if self._on_host else 0.0
            data = sum(between(*pair) for pair in window.data) - (window.data_waits if self._on_host else 0.0)
            waits = sum(between(*pair) for pair in window.waits) + (window.host_waits if self._on_host else 0.0)
            parts = {"communication": waits, "optimizer": optimizer, "data": data}
            parts["compute"] = max(seconds - sum(parts.values()), 0.0)
            for target in (self._parts, self._totals):
                target.update(parts)  # type: ignore[arg-type]
                target.update(
                    {
                        "seconds": seconds,  # type: ignore[dict-item]
                        "steps": 1,
                        "samples": window.samples,
                        "tokens": window.tokens,
                        "micro_batches": window.micro_batches,
                    }
                )

    def _rates(self, sums: Mapping[str, float]) -> dict[str, float]:
        steps, seconds = sums["steps"], sums["seconds"]
        if not steps or not seconds:
            return {}
        found = {"step_seconds": seconds / steps, **{f"{part}_seconds": sums[part] / steps for part in PARTS}}
        found["samples_per_second"] = sums["samples"] / seconds
        if sums["tokens"]:
            found["tokens_per_second"] = sums["tokens"] / seconds
        flops = self.plan.flops_per_micro_batch if self.plan is not None else 0.0
        if flops:
            found["tflops_per_second"] = flops * sums["micro_batches"] / seconds / 1e12
            if self.peak_flops:
                found["mfu"] = found["tflops_per_second"] * 1e12 / self.peak_flops
        return found

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = {f"zero/{name}": value for name, value in self._rates(self._parts).items()}
        self._parts.clear()
        values |= {f"zero/{kind}_bytes": float(value) for kind, value in self._state.items()}
        values["zero/memory_peak_bytes"] = float(_memory_peak(trainer.strategy.root_device))
        values["zero/sent_bytes_per_step"] = sum(self._sent.values()) / max(self._steps - 1, 1)
        shown = "zero/samples_per_second"
        for name, value in values.items():
            pl_module.log(name, value, prog_bar=name == shown, rank_zero_only=True, on_step=True, on_epoch=False)

    # -- plan and table ------------------------------------------------------------------------------------------

    def _make_plan(self, batch: Any) -> None:
        assert self._planner is not None
        planner, self._planner = self._planner, None
        try:
            self.plan = planner(batch)
        except Exception as error:  # a run must not fail because its plan failed
            rank_zero_warn(f"ZeroMonitor: no plan, {type(error).__name__}: {error}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._global_step = trainer.global_step  # not 0 when a run is resumed
        if self.peak_flops is None and trainer.strategy.root_device.type == "cuda":
            mixed = {"bf16": torch.bfloat16, "16": torch.float16}
            dtype = next((d for name, d in mixed.items() if str(trainer.precision).startswith(name)), torch.float32)
            try:
                self.peak_flops = float(get_available_flops(trainer.strategy.root_device, dtype) or 0) or None
            except Exception as error:  # an unknown chip must not end the run
                rank_zero_warn(f"ZeroMonitor: peak_flops is not known, {type(error).__name__}: {error}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.meter.calls:
            self._unwatch()
        if not self._on_host:
            torch.cuda.synchronize()  # the only wait for the device; the run is over
        self._read()
        steps = max(self._steps - 1, 1)
        mine: dict[str, float] = {f"{kind} bytes": float(self._state[kind]) for kind in STATES}
        mine |= {f"of these on {place} bytes": float(held) for place, held in self._elsewhere.items() if held}
        mine["memory peak bytes"] = float(_memory_peak(trainer.strategy.root_device))
        for label, counter in (("sent", self._sent), ("received", self._received)):
            for kind, value in sorted(counter.items()):
                mine[f"{label} per step: {kind} bytes"] = value / steps
        mine |= self._rates(self._totals)
        self.rows = _everyone(mine)
        rank_zero_only(print)(f"\n{self.table(trainer)}", flush=True)

    def table(self, trainer: Trainer | None = None) -> str:
        """Formats the measurements per rank, with the plan's prediction if it covers the run's stage."""
        planned = self._planned(trainer)
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        head = ["ZeroMonitor", *(["plan"] if planned else []), *(f"rank {i}" for i in range(len(self.rows)))]
        lines = [head]
        for name in names:
            label = name.replace(" bytes", ", MiB") if name.endswith("bytes") else name
            cells = [_cell(name, row.get(name)) for row in self.rows]
            lines.append([label, *([_cell(name, planned.get(name))] if planned else []), *cells])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        ]
        text.insert(1, "-" * len(text[0]))
        return "\n".join(text)

    def _planned(self, trainer: Trainer | None) -> dict[str, float]:
        if self.plan is None or trainer is None:
            return {}
        config = getattr(trainer.strategy, "config", None)
        name = f"zero{config.stage}" if config is not None else "ddp"
        if config is not None and config.offload.target != "none":
            name += {"cpu": "_offload", "nvme": "_nvme"}[config.offload.target]
        row = next((row for row in self.plan.rows if row.name == name), None)
        if row is None:  # the plan has no rows for files at stages 1 and 2
            return {}
        found = {f"{kind} bytes": getattr(row, kind) for kind in STATES}
        if not self._on_host:  # RSS also holds the interpreter and every library
            found["memory peak bytes"] = row.peak_with(config is not None and config.activation_checkpointing.is_on)
        return found | {f"sent per step: {kind} bytes": value for kind, value in row.sent.items()}


def _planner_for(trainer: Trainer, module: LightningModule) -> Planner | None:
    try:
        return Planner.of_run(trainer, module)
    except Exception as error:  # as in _make_plan
        rank_zero_warn(f"ZeroMonitor: no plan, {type(error).__name__}: {error}")
        return None


def _bytes_reduced(model: DistributedDataParallel) -> int:
    """Bytes that DDP reduces in each synchronized backward.

    DDP's reducer calls the process group from C++, where the meter cannot count. A communication hook could count, but
    it would replace the reducer that a run without the monitor uses.
    """
    ignored = set(model.parameters_to_ignore)
    reduced = (p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored)
    return sum(p.numel() * p.element_size() for p in reduced)


def _sizes(batch: Any) -> tuple[int, int]:
    """``(samples, tokens)``: the first dimension of the first tensor, and its number of elements if it holds token
    ids."""
    for t in pytree.tree_leaves(batch):
        if isinstance(t, Tensor) and t.dim():
            ids = t.dim() == 2 and not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
            return int(t.shape[0]), int(t.numel()) if ids else 0
    return 0, 0


def _memory_peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss if sys.platform == "darwin" else rss * 1024


def _everyone(mine: dict[str, float]) -> list[dict[str, float]]:
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, mine)
    return rows


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("bytes"):
        return f"{value / MIB:.3f}"
    if name.endswith("_seconds"):
        return f"{value * 1e3:.2f} ms"
    return f"{value:.4g}"
