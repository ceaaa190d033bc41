"""Finds the stage that fits a module on given devices, and its costs: ``lightning_zero.plan``.

The module is copied without its memory and one micro-batch is traced under fake tensors
(:mod:`~lightning_zero.planner.tracing`), one step of its own optimizers is run on fake parameters, and
:mod:`~lightning_zero.planner.memory` has the formulas of every stage. Nothing runs on a device and no process group is
needed.
"""

from __future__ import annotations

from lightning_zero.planner.choice import choose
from lightning_zero.planner.rows import GIB, Plan, Row
from lightning_zero.planner.run import (
    HEADROOM,
    Planner,
    device_memory_bytes,
    first_batch,
    plan,
    resolve_shard_size,
    smallest_device_bytes,
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
    "choose",
    "device_memory_bytes",
    "first_batch",
    "plan",
    "resolve_shard_size",
    "smallest_device_bytes",
    "training_batch",
]
