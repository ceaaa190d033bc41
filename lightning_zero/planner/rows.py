"""A plan's content: a row for each way to train."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_zero.planner import show
from lightning_zero.planner.life import Life


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train, per rank; bytes."""

    name: str
    """``ddp``, ``zero1`` ... ``zero3_nvme``."""
    stage: int
    offload: str
    parameters: float
    gradients: float
    optimizer: float
    """These three between two steps, as the tensors count; :attr:`at_peak` counts the bytes alive inside one."""
    gathered_unit: float
    """The largest unit while it is whole."""
    activations: float
    """Most that the activations of one micro-batch take, without and with recomputation (:attr:`Plan.recomputed`)."""
    activations_checkpointed: float
    at_peak: Mapping[str, float]
    """Kind -> device bytes at the peak of a step."""
    peak: float
    at_peak_checkpointed: Mapping[str, float]
    peak_checkpointed: float
    host: float
    """Host memory of a step."""
    host_checkpointed: float
    """With recomputation: and saved inputs that wait there (``activation_checkpointing.offload``)."""
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

    def peak_with(self, checkpointing: bool) -> float:
        """Device bytes of a step, with recomputation or without."""
        return self.peak_checkpointed if checkpointing else self.peak

    def host_with(self, checkpointing: bool) -> float:
        """Host bytes of a step, with recomputation or without."""
        return self.host_checkpointed if checkpointing else self.host


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rows, the one to take and why."""

    module: str
    num_parameters: int
    num_trainable: int
    world_size: int
    shard_size: int | None = None
    """Ranks that share one copy; ``None`` is all of them."""
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
    life: Life | None
    """Host memory at ``zero3``, from birth to end, under the run's offload; ``None`` for one rank."""
    choice: str | None
    """Name of the row to take; ``None`` if none fits."""
    checkpointing: bool
    """Whether the choice needs activation checkpointing, or has it set."""
    recomputed: str
    """Recomputation in the columns with it: the setting, or each unit's activations if none is set."""
    reason: str
    notes: Sequence[str] = field(default_factory=tuple)

    def row(self, name: str) -> Row:
        return next(r for r in self.rows if r.name == name)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def table(self) -> str:
        """The plan as text, GiB per rank."""
        return show.table(self)

    def plot(self, path: str) -> None:
        """Writes the chart as PNG; needs matplotlib (``pip install lightning-zero[plot]``)."""
        show.plot(self, path)

    def __str__(self) -> str:
        return self.table()
