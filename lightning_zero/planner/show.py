"""A plan as a table and as a chart."""

from __future__ import annotations

from typing import Any

from lightning_zero.planner.memory import KINDS

GIB = 2**30


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
                r.name + (" <-" if r.name == plan.choice else ""),
                *map(gib, (r.parameters, r.gradients, r.optimizer, r.gathered_unit)),
                gib(r.activations),
                gib(r.peak),
                gib(r.activations_checkpointed),
                gib(r.peak_checkpointed),
                _host(r),
                *(gib(v) if v else "-" for v in (r.disk, r.sent_total, r.pcie)),
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
        f"peak: most of a step together; ckpt: with {plan.recomputed}; max batch: the largest",
        "micro-batch that fits, without / with that.",
    ]
    if any(r.host != r.host_checkpointed for r in plan.rows):
        foot.append("host: without / with that; the way of saved inputs there and back is not in PCIe/step.")
    if plan.life is not None:
        foot += _life(plan.life, plan.ranks_per_host)
    foot += [f"note: {note}." for note in plan.notes]
    return "\n".join([*head, *lines, *foot, "", f"take {plan.reason}" if plan.choice else plan.reason])


def _host(row: Any) -> str:
    if row.host == row.host_checkpointed:
        return gib(row.host) if row.host else "-"
    return f"{gib(row.host)}/{gib(row.host_checkpointed)}"


def _life(life: Any, ranks_per_host: int) -> list[str]:
    """Most that host memory has to hold, from birth to end."""
    others = ranks_per_host - 1
    phases = {  # of a rank, of the host where rank 0 is
        "made by configure_model": (life.made, ranks_per_host * life.made),
        "made in __init__, or below stage 3": (life.whole, ranks_per_host * life.whole),
        "loaded from a file": (life.loaded, ranks_per_host * life.loaded),
        "trained": (life.trained, ranks_per_host * life.trained),
        "saved as one file, rank 0": (life.saved, life.saved + others * life.kept),
        "ended whole": (life.ended, ranks_per_host * life.ended),
    }
    width = max(map(len, phases))
    setting = "" if life.offload == "none" else f" with offload={life.offload}"
    lines = ["", f"zero3{setting} in its whole life, host memory in GiB: of a rank, of a host with {ranks_per_host}"]
    for phase, (of_rank, of_host) in phases.items():
        lines.append(f"  {phase.ljust(width)}  {gib(of_rank).rjust(7)}  {gib(of_host).rjust(7)}")
    return [
        *lines,
        "  what one file needs beyond half of the free memory lies on the disk meanwhile; with checkpoint=sharded and",
        "  after_fit=sharded saving and ending take no more than a step",
    ]


def plot(plan: Any, path: str) -> None:
    """Its chart as PNG."""
    try:
        import matplotlib  # optional: pip install lightning-zero[plot]
    except ImportError as error:
        raise ValueError(f"plan.plot={path!r} needs matplotlib: pip install 'lightning-zero[plot]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(9.0, 1.2 + 0.5 * len(plan.rows)), layout="constrained")
    colors = dict(zip(KINDS, pyplot.colormaps["tab10"].colors, strict=False))  # type: ignore[attr-defined]
    limit = _limit(plan)
    for place, row in enumerate(plan.rows):
        for offset, parts, checkpointed in ((-0.2, row.at_peak, False), (0.2, row.at_peak_checkpointed, True)):
            picked = row.name == plan.choice and plan.checkpointing == checkpointed
            y, left = place + offset, 0.0
            for kind in KINDS:
                style = {"color": colors[kind], "hatch": "///" if checkpointed else None, "edgecolor": "white"}
                axes.barh(y, parts[kind] / GIB, height=0.36, left=left, linewidth=0, **style)
                left += parts[kind] / GIB
            if picked:
                axes.barh(y, min(left, limit), height=0.36, fill=False, edgecolor="black", linewidth=1.8)
            text = f"{gib(left * GIB)}{' <- take' if picked else ''}"
            if left > limit:  # the bar is cut off, and says how long it is
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                axes.text(limit * 0.99, y, f"{text} >", ha="right", va="center", fontsize=7, bbox=box)
            else:
                weight = "bold" if picked else "normal"
                axes.text(left + limit * 0.006, y, text, va="center", fontsize=7, fontweight=weight)
    if plan.device_bytes is not None:
        axes.axvline(plan.device_bytes / GIB, color="black", linestyle="--")
        axes.axvline(plan.usable_bytes / GIB, color="black", linestyle=":")
    axes.set_xlim(0, limit * 1.001)
    axes.set_yticks(range(len(plan.rows)), [row.name for row in plan.rows])
    for label, row in zip(axes.get_yticklabels(), plan.rows, strict=True):
        label.set_fontweight("bold" if row.name == plan.choice else "normal")
    axes.invert_yaxis()
    axes.set_xlabel("GiB per rank at the peak of a step")
    axes.set_title(f"{plan.module}, {plan.num_parameters / 1e9:.3g} B parameters, {plan.world_size} rank(s)")
    shown: list[Any] = [Patch(color=colors[kind], label=kind) for kind in KINDS]
    shown.append(Patch(facecolor="white", edgecolor="grey", hatch="///", label=f"with {plan.recomputed}"))
    if plan.device_bytes is not None:
        shown.append(Line2D([], [], color="black", linestyle="--", label=f"device, {gib(plan.device_bytes)} GiB"))
        shown.append(Line2D([], [], color="black", linestyle=":", label=f"usable, {gib(plan.usable_bytes)} GiB"))
    figure.legend(handles=shown, fontsize="small", loc="outside lower center", ncols=4)
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def _limit(plan: Any) -> float:
    """The end of the chart's scale in GiB: rows that fit are shown whole, rows far beyond the memory are cut off."""
    peaks = [(row.peak_checkpointed / GIB, row.stage) for row in plan.rows]
    peaks += [(row.peak / GIB, row.stage) for row in plan.rows]
    longest = max(peak for peak, _ in peaks)
    if plan.device_bytes is not None:
        seen = 2.2 * plan.device_bytes / GIB
        if plan.choice is not None:
            row = plan.row(plan.choice)
            seen = max(seen, 1.3 * row.peak_with(plan.checkpointing) / GIB)
    else:
        seen = 1.3 * max((peak for peak, stage in peaks if stage == 3), default=longest)
    return 1.1 * longest if longest < 1.5 * seen else seen
