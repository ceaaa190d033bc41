"""Finds the stage that fits a module on given devices, and its costs: ``lightning_zero.plan``.

The module is copied without its memory (:mod:`~lightning_zero.planner.tracing`), one micro-batch is traced, one
step of the optimizers that it really configures is run on fake shards, and :mod:`~lightning_zero.planner.memory` walks
every stage through these findings. Nothing runs on a device and no process group is needed.
"""

from __future__ import annotations

from lightning_zero.planner.at_start import HEADROOM, resolve_shard_size, smallest_device_bytes, training_batch
from lightning_zero.planner.choice import choose
from lightning_zero.planner.rows import Plan, Row
from lightning_zero.planner.run import Planner, device_memory_bytes, first_batch, plan
from lightning_zero.planner.show import GIB
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
