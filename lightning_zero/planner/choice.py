"""The row of a plan to take, and the reason."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_zero.planner.rows import Row
from lightning_zero.planner.show import GIB, gib


def choose(
    rows: Sequence[Row],
    usable: float | None,
    host_gib: float | None,
    ranks_per_host: int,
    recomputes: bool = False,
) -> tuple[str | None, bool, str]:
    """``(name, needs checkpointing, reason)`` of the cheapest row that fits.

    Rows are tried in the order of their traffic and recomputation: stages 1, 2, 3 on the device, then with activation
    checkpointing, then with offload. DDP is never the answer: stage 1 sends the same and stores less. With
    ``recomputes`` activation checkpointing is on already.
    """
    candidates = [r for r in rows if r.stage]
    if usable is None:
        return "zero3", recomputes, "zero3: no device memory was given, and stage 3 stores the least."
    on_device = [r for r in candidates if r.offload == "none"]
    offloaded = [r for r in candidates if r.offload != "none"]
    tried: list[str] = []
    for group in (on_device, offloaded):
        for checkpointing in (True,) if recomputes else (False, True):
            for row in group:
                peak = row.peak_with(checkpointing)
                if peak > usable:
                    tried.append(f"{row.name} {gib(peak)}")
                elif host_gib is not None and row.host_with(checkpointing) * ranks_per_host > host_gib * GIB:
                    tried.append(f"{row.name} {gib(row.host_with(checkpointing) * ranks_per_host)} of host memory")
                else:
                    reason = _reason(row, peak, usable, checkpointing, group, on_device)
                    if checkpointing and not recomputes and row.offload == "none":
                        reason += " It needs activation_checkpointing='full': without it no stage fits."
                    return row.name, checkpointing, reason
    least = min((r for r in candidates), key=lambda r: r.peak_checkpointed)
    return (
        None,
        False,
        f"nothing fits: even {least.name} with activation checkpointing needs {gib(least.peak_checkpointed)} of"
        f" {gib(usable)} usable GiB; use more ranks, a smaller micro-batch or a larger device.",
    )


def _reason(
    row: Row, peak: float, usable: float, checkpointing: bool, group: Sequence[Row], on_device: Sequence[Row]
) -> str:
    before = [r for r in group if r.name != row.name and group.index(r) < group.index(row)]
    needs = f"{row.name}: needs {gib(peak)} of {gib(usable)} usable GiB per rank"
    extra = ""
    if row.offload != "none":
        if on_device:  # else offload was asked for
            least = min(on_device, key=lambda r: r.peak_checkpointed)
            extra = f"; without offload even {least.name} with activation checkpointing needs"
            extra += f" {gib(least.peak_checkpointed)}"
    elif before:
        short = ", ".join(f"{r.name} {gib(r.peak_with(checkpointing))}" for r in before)
        extra = f", where {short} would be needed"
    else:
        extra = ", and no stage sends less per step"
    return f"{needs}{extra}."
