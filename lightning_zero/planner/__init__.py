"""Predicts memory and traffic of every stage and finds one that fits: ``lightning_zero.plan``.

The planner copies the module without its memory, traces one micro-batch under fake tensors
(:mod:`~lightning_zero.planner.tracing`) and runs one step of the module's optimizers on fake parameters.
:mod:`~lightning_zero.planner.memory` holds the formulas of every stage. Nothing runs on a device, and no process group
is needed.
"""

from __future__ import annotations

from lightning_zero.planner.choice import choose
from lightning_zero.planner.rows import GIB, Plan, Row, aligned, row_name
from lightning_zero.planner.run import (
    HEADROOM,
    Planner,
    device_memory_bytes,
    first_batch,
    plan,
    planned_on_rank_0,
    resolve_shard_size,
    training_batch,
)
from lightning_zero.planner.study import PRECISIONS

__all__ = [
    "GIB",
    "HEADROOM",
    "PRECISIONS",
    "Plan",
    "Planner",
    "Row",
    "aligned",
    "choose",
    "device_memory_bytes",
    "first_batch",
    "plan",
    "planned_on_rank_0",
    "resolve_shard_size",
    "row_name",
    "training_batch",
]
