"""Predicts memory and traffic of every stage and finds one that fits: ``lightning_zero.plan``.

The planner copies the module without its memory, traces one micro-batch under fake tensors
(:mod:`~lightning_zero.planner.tracing`) and runs one step of the module's optimizers on fake parameters.
:mod:`~lightning_zero.planner.memory` holds the formulas of every stage. Nothing runs on a device, and no process group
is needed.
"""

from __future__ import annotations

from lightning_zero.planner.choice import choose
from lightning_zero.planner.rows import GIB, Plan, Row, aligned, row_name
from lightning_zero.planner.run import HEADROOM, device_memory_bytes, first_batch, plan, plan_of_run
from lightning_zero.planner.tracing import structure_of

__all__ = [
    "GIB",
    "HEADROOM",
    "Plan",
    "Row",
    "aligned",
    "choose",
    "device_memory_bytes",
    "first_batch",
    "plan",
    "plan_of_run",
    "row_name",
    "structure_of",
]
