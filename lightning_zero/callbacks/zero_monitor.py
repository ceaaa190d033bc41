"""Measures the bytes and times of a run on each rank, and prints them next to the plan.

A *window* is one optimizer step with its micro-batches, from the end of the previous step to the end of this one.
Validation, checkpoints and the time between epochs are part of no window.

[Times] The host's clock. The four parts add up to the seconds of a step:

    data            from the end of a batch to the start of the next one
    optimizer       from the first ``on_before_optimizer_step`` of a batch to its end
    communication   the main thread inside collectives and their waits, at any of these times
    compute         the rest

On an accelerator the host only queues work: its parts show where the host spends its time. A trace (``profile=true``)
shows how much of the communication does not overlap with compute.

[Bytes] Parameters, gradients and optimizer states are counted tensor by tensor, in a few windows. Traffic is counted by
:class:`~lightning_zero.comm.meter.TrafficMeter` in all windows. DDP's reducer communicates in C++ and is not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zero.comm.meter import TrafficMeter
from lightning_zero.engines.model_state import KINDS as STATES
from lightning_zero.engines.model_state import ModelState, plain_state
from lightning_zero.planner import Plan, aligned, plan_of_run, row_name, structure_of

T = TypeVar("T")

MIB = 2**20
PARTS = ("data", "compute", "communication", "optimizer")
"""The parts of a step's time."""


class ZeroMonitor(Callback):
    """Logs the cost of each optimizer step, and prints at the end what every rank stored and sent, next to the plan.

    Args:
        every_n_steps: Steps between logged averages; ``None`` is the Trainer's ``log_every_n_steps``.
        predict: Make the plan; takes about a second, once.

    Lightning's ``ThroughputMonitor`` logs tokens per second, FLOP/s and MFU.

    The first window is not counted, because it includes warm-up and the creation of optimizer states; so a run needs
    two steps. After the run ``rows`` has one mapping per rank with all measurements, and ``plan`` has the prediction.
    """

    def __init__(self, every_n_steps: int | None = None, predict: bool = True) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps!r}: use 1 or more, or None.")
        self.every_n_steps, self.predict = every_n_steps, predict
        self.plan: Plan | None = None
        self.rows: list[dict[str, float]] = []
        self.meter = TrafficMeter()
        self._structure: LightningModule | None = None
        self._part, self._since, self._waited = "data", 0.0, 0.0
        """The current part of a step, its begin, and the meter's seconds at that time."""

    # -- life ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.predict:
            # Copy the structure now, before the module is sharded; trace it with the first batch.
            self._structure = _or_warn(partial(structure_of, pl_module))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        self._on_host = device.type != "cuda"
        self._recent: Counter[str] = Counter()
        """Sums since the last log."""
        self._totals: Counter[str] = Counter()
        self._window: Counter[str] | None = None
        """Seconds of each part since the window began."""
        self._state = dict.fromkeys(STATES, 0)
        self._elsewhere: dict[str, int] = {}
        self._num_windows = self._global_step = 0
        self._counts_state = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.meter.install()
        self._sent: Counter[str] = Counter()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.meter.remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.meter.remove()

    # -- windows -------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (structure := self._structure) is not None:
            self._structure, self.plan = None, _or_warn(partial(plan_of_run, trainer, structure, batch))
        self._enter("compute")
        if self._window is None:
            self._open()
        self._counts_state = self._num_windows == 1 or self._num_windows % self._interval(trainer) == 0

    def _open(self) -> None:
        self._window, self._sent_before = Counter(), Counter(self.meter.sent)

    def _enter(self, part: str) -> None:
        """Ends the current part of a step and begins ``part``."""
        now, waited = time.perf_counter(), self.meter.seconds
        if self._window is not None:
            communication = waited - self._waited
            self._window[self._part] += now - self._since - communication  # type: ignore[assignment]
            self._window["communication"] += communication  # type: ignore[assignment]
        self._part, self._since, self._waited = part, now, waited

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._enter("optimizer")
        if self._counts_state:  # counting walks all tensors, so only some windows do it
            state = state_of_run(trainer, pl_module)
            self._state = {kind: max(held, state.held(kind)) for kind, held in self._state.items()}
            self._elsewhere = {place: state.at(place) for place in ("host", "disk")}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        has_stepped = self._window is not None and trainer.global_step != self._global_step
        self._enter("data")
        if not has_stepped:
            return
        self._global_step = trainer.global_step
        self._close()
        if self._num_windows % self._interval(trainer) == 0:
            self._log(trainer, pl_module)

    def _close(self) -> None:
        if self._num_windows == 1:  # drop the first: warm-up, and waits for ranks that were slow to plan
            for counted in (self._recent, self._totals, self._sent):
                counted.clear()
        self._num_windows += 1
        for sums in (self._recent, self._totals):
            sums.update(self._window, steps=1)
        self._sent += self.meter.sent - self._sent_before
        self._open()

    def _interval(self, trainer: Trainer) -> int:
        return self.every_n_steps or int(getattr(trainer, "log_every_n_steps", 0)) or 50

    # -- readings ------------------------------------------------------------------------------------------------

    def _rates(self, sums: Mapping[str, float]) -> dict[str, float]:
        parts = {f"{part}_seconds": sums[part] / sums["steps"] for part in PARTS if sums["steps"]}
        return {"step_seconds": sum(parts.values()), **parts} if parts else {}

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = {f"zero/{name}": value for name, value in self._rates(self._recent).items()}
        self._recent.clear()
        values |= {f"zero/{kind}_bytes": float(value) for kind, value in self._state.items()}
        values["zero/memory_peak_bytes"] = float(_memory_peak(trainer.strategy.root_device))
        values["zero/sent_bytes_per_step"] = sum(self._sent.values()) / max(self._num_windows - 1, 1)
        for name, value in values.items():
            pl_module.log(name, value, rank_zero_only=True, on_step=True, on_epoch=False)

    # -- plan and table ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._global_step = trainer.global_step  # not 0 when a run is resumed

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meter.remove()  # the ranks' exchange of rows is part of no step
        steps = max(self._num_windows - 1, 1)
        mine: dict[str, float] = {f"{kind} bytes": float(self._state[kind]) for kind in STATES}
        mine |= {f"of these on {place} bytes": float(held) for place, held in self._elsewhere.items() if held}
        mine["memory peak bytes"] = float(_memory_peak(trainer.strategy.root_device))
        mine |= {f"sent per step: {kind} bytes": value / steps for kind, value in sorted(self._sent.items())}
        mine |= self._rates(self._totals)
        self.rows = of_every_rank(mine)
        rank_zero_only(print)(f"\n{self.table(trainer)}", flush=True)

    def table(self, trainer: Trainer) -> str:
        """Formats the measurements per rank, with the plan's prediction if it covers the run's stage."""
        columns = {f"rank {i}": row for i, row in enumerate(self.rows)}
        if planned := self.planned(trainer):
            columns = {"plan": planned, **columns}
        lines = [["ZeroMonitor", *columns]]
        for name in dict.fromkeys(name for row in self.rows for name in row):
            label = name.replace(" bytes", ", MiB") if name.endswith("bytes") else name
            lines.append([label, *(_cell(name, column.get(name)) for column in columns.values())])
        return "\n".join(aligned(lines))

    def planned(self, trainer: Trainer) -> dict[str, float]:
        """The plan's figures for the run, under the names of ``rows``; empty if the plan does not cover the run."""
        if self.plan is None:
            return {}
        config = getattr(trainer.strategy, "config", None)
        if config is not None and config.offload.target == "nvme" and config.stage != 3:
            return {}  # the plan has no rows for files at stages 1 and 2
        row = self.plan.row(row_name(config.stage, config.offload.target) if config is not None else "ddp")
        found = {f"{kind} bytes": getattr(row, kind) for kind in STATES}
        if not self._on_host:  # RSS also holds the interpreter and every library
            found["memory peak bytes"] = row.peak
        return found | {f"sent per step: {kind} bytes": value for kind, value in row.sent.items()}


def state_of_run(trainer: Trainer, module: LightningModule) -> ModelState:
    """Returns this rank's current model state, counted by its engine if it has one."""
    engine = getattr(trainer.strategy, "engine", None)
    return plain_state(module, trainer.optimizers) if engine is None else engine.model_state(trainer.optimizers)


def _or_warn(make: Callable[[], T]) -> T | None:
    """Returns what ``make`` returns; a run must not fail because its plan failed."""
    try:
        return make()
    except Exception as error:  # user code can raise anything
        rank_zero_warn(f"ZeroMonitor: no plan, {type(error).__name__}: {error}")
        return None


def _memory_peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss if sys.platform == "darwin" else rss * 1024


def of_every_rank(value: T) -> list[T]:
    """Returns each rank's ``value`` (collective)."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("bytes"):
        return f"{value / MIB:.3f}"
    if name.endswith("_seconds"):
        return f"{value * 1e3:.2f} ms"
    return f"{value:.4g}"
