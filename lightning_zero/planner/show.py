"""What is shown of a plan: the table and the chart."""

from __future__ import annotations

from typing import Any

from lightning_zero.planner.memory import KINDS

GIB = 2**30
ACCOUNTED = ("ddp", "fsdp2")
"""Engines whose own buffers the plan knows."""


def gib(nbytes: float) -> str:
    """Bytes in GiB, in three figures or so."""
    value = nbytes / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def table(plan: Any) -> str:
    """A :class:`~lightning_zero.planner.rows.Plan` as text, GiB per rank."""
    head = [
        f"{plan.module}: {plan.num_parameters:,} parameters ({plan.num_trainable:,} trainable),"
        f" {', '.join(plan.optimizers) or 'no optimizer'}, {plan.precision}",
        f"{plan.world_size} rank(s), micro-batch {plan.micro_batch}, {plan.micro_batches} per optimizer step,"
        f" on {plan.device}; GiB per rank",
        "",
    ]
    columns = [
        "",
        "param",
        "grad",
        "optim",
        "unit",
        "act",
        "peak",
        "act ckpt",
        "peak ckpt",
        "host",
        "disk",
        "sent/step",
        "PCIe/step",
        "fits",
        "max batch",
    ]
    rows = [columns]
    for r in plan.rows:
        fits = "?" if plan.usable_bytes is None else "yes" if r.fits else "ckpt" if r.fits_checkpointed else "no"
        largest = f"{r.max_micro_batch}/{r.max_micro_batch_checkpointed}"
        rows.append(
            [
                r.name
                + (" *" if r.engine is None else "" if r.engine in ACCOUNTED else " +")
                + (" <-" if r.name == plan.choice else ""),
                *map(gib, (r.parameters, r.gradients, r.optimizer, r.gathered_unit)),
                gib(r.activations),
                gib(r.peak),
                gib(r.activations_checkpointed),
                gib(r.peak_checkpointed),
                *(gib(v) if v else "-" for v in (r.host, r.disk, r.sent_total, r.pcie)),
                fits,
                "-" if plan.usable_bytes is None else largest,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    foot = [
        "",
        "param, grad, optim: between two steps; unit: the largest gathered one; act: most that activations take;",
        "peak: most of a step together; ckpt: with each unit's activations recomputed; max batch: the largest",
        "micro-batch that fits, without / with that.",
    ]
    if any(r.engine is None for r in plan.rows):
        foot.append("* arithmetic only: no engine runs it here yet.")
    if any(r.engine not in (None, *ACCOUNTED) for r in plan.rows):
        foot.append("+ run by DeepSpeed, whose own buffers are not counted; states are the same.")
    foot += [f"note: {note}." for note in plan.notes]
    return "\n".join([*head, *lines, *foot, "", f"take {plan.reason}" if plan.choice else plan.reason])


def plot(plan: Any, path: str) -> None:
    """Its chart as PNG."""
    try:
        import matplotlib  # optional: pip install lightning-zero[plot]
    except ImportError as error:
        raise ValueError(f"plan.plot={path!r} needs matplotlib: pip install 'lightning-zero[plot]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.1 * len(plan.rows) + 2), 4.5))
    bottoms = [0.0] * len(plan.rows)
    for kind in KINDS:
        heights = [r.at_peak[kind] / GIB for r in plan.rows]
        axes.bar([r.name for r in plan.rows], heights, bottom=bottoms, label=kind)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    if plan.device_bytes is not None:
        axes.axhline(plan.device_bytes / GIB, color="black", linestyle="--", label="device")
    axes.set_ylabel("GiB per rank at the peak of a step")
    axes.set_title(f"{plan.module}, {plan.num_parameters / 1e9:.3g} B parameters, {plan.world_size} ranks")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)
