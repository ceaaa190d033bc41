"""The plan: one row for each stage and offload, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GIB = 2**30


def gib(nbytes: float) -> str:
    """Formats bytes in GiB with two to four significant digits."""
    value = nbytes / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats ``rows`` of cells as the lines of a table: the head, a rule, the other rows."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def row_name(stage: int, offload: str) -> str:
    """The name of a stage's row; stage 0 is DDP. Files have a row of their own at stage 3 only."""
    if not stage:
        return "ddp"
    return f"zero{stage}" + {"none": "", "nvme": "_nvme" if stage == 3 else "_offload"}.get(offload, "_offload")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Costs of one stage with one offload, in bytes per rank."""

    name: str
    """``ddp``, ``zero1`` ... ``zero3_nvme``."""
    stage: int
    offload: str
    checkpointing: bool
    """Whether activations are recomputed, by the run's ``activation_checkpointing``, else by ``"full"``."""
    parameters: float
    gradients: float
    optimizer: float
    """Parameters, gradients and optimizer states between two steps; :attr:`at_peak` has the bytes during a step."""
    activations: float
    """Peak of the activations of one micro-batch."""
    at_peak: Mapping[str, float]
    """Kind -> device bytes at the peak of a step."""
    peak: float
    host: float
    """Host memory during a step."""
    disk: float
    sent: Mapping[str, float]
    """Collective -> bytes that this rank sends per optimizer step; it receives as many."""
    fits: bool
    """Whether peak and host memory fit; ``False`` if no device memory was given."""
    max_micro_batch: int

    @property
    def label(self) -> str:
        """Name in the printed table."""
        return f"{self.name}, ckpt" if self.checkpointing else self.name

    @property
    def sent_total(self) -> float:
        """Bytes that this rank sends per optimizer step."""
        return sum(self.sent.values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rows, the recommended row and the reason."""

    module: str
    num_parameters: int
    num_trainable: int
    world_size: int
    shard_size: int | None = None
    """Number of ranks that share one copy of the model; ``None`` is all ranks."""
    ranks_per_host: int
    precision: str
    micro_batch: int
    micro_batches: int
    optimizers: Sequence[str]
    device: str
    """Kind of device of the plan, such as ``"cuda"``."""
    usable_bytes: float | None
    rows: Sequence[Row]
    choice: str | None
    """Name of the recommended row; ``None`` if none fits."""
    checkpointing: bool
    """Whether the recommended row recomputes activations."""
    reason: str
    notes: Sequence[str] = field(default_factory=tuple)

    def row(self, name: str) -> Row:
        """The row of a stage and offload with the run's own ``activation_checkpointing``."""
        return next(r for r in self.rows if r.name == name)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Formats the plan as text, in GiB per rank."""
        head = [
            f"{self.module}: {self.num_parameters:,} parameters ({self.num_trainable:,} trainable),"
            f" {', '.join(self.optimizers) or 'no optimizer'}, {self.precision}",
            f"{self.world_size} rank(s), micro-batch {self.micro_batch}, {self.micro_batches} per optimizer step,"
            f" on {self.device}; GiB per rank",
            "",
        ]
        rows = [["", *"param grad optim act peak host disk sent/step fits".split(), "max batch"]]
        for r in self.rows:
            is_choice = (r.name, r.checkpointing) == (self.choice, self.checkpointing)
            rows.append(
                [
                    r.label + (" <-" if is_choice else ""),
                    *map(gib, (r.parameters, r.gradients, r.optimizer, r.activations, r.peak)),
                    *(gib(v) if v else "-" for v in (r.host, r.disk, r.sent_total)),
                    "?" if self.usable_bytes is None else "yes" if r.fits else "no",
                    "-" if self.usable_bytes is None else str(r.max_micro_batch),
                ]
            )
        foot = [
            "",
            "param, grad, optim: between two steps; act: peak of activations; peak: all of these and gathered units",
            "during a step, within 10 % of measured peaks; max batch: the largest micro-batch that fits;",
            "ckpt: activations recomputed, as the settings say or in each unit.",
        ]
        foot += [f"note: {note}." for note in self.notes]
        return "\n".join([*head, *aligned(rows), *foot, "", f"take {self.reason}" if self.choice else self.reason])
