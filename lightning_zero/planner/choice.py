"""Chooses the row of a plan, and the size of its groups (``shard_size="auto"``), each with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lightning_zero.config import ZeroConfig
from lightning_zero.planner.rows import Plan, Row, gib, row_name


def choose(rows: Sequence[Row], usable: float | None) -> tuple[Row | None, str]:
    """Returns the cheapest row that fits into ``usable`` bytes of a device, or ``None``, and the reason.

    Rows are tried in the order of their traffic and recomputation: stages 1, 2, 3 on the device, then with activation
    checkpointing, then with offload. DDP is never chosen: stage 1 sends as much and stores less.
    """
    candidates = sorted((r for r in rows if r.stage), key=lambda r: (r.offload != "none", r.checkpointing))
    if usable is None:
        row = next(r for r in candidates if r.stage == 3)
        return row, f"{_in_words(row)}: no device memory was given, and stage 3 stores the least."
    for index, row in enumerate(candidates):
        if not row.fits:
            continue
        reason = f"{_in_words(row)}: needs {gib(row.peak)} of {gib(usable)} usable GiB per rank"
        too_large = [r for r in candidates[:index] if r.peak > usable]
        if too_large:
            least = min(too_large, key=lambda r: r.peak)
            reason += f"; {_in_words(least)} would need {gib(least.peak)}."
        else:
            reason += ", and no stage sends less per step."
        if row.checkpointing and not candidates[0].checkpointing:
            reason += " Set activation_checkpointing='full', or recompute in the module itself."
        return row, reason
    least = min(candidates, key=lambda r: r.peak)
    needs = f"{gib(least.peak)} of {gib(usable)} usable GiB"
    advice = "use more ranks, a smaller micro-batch, a larger device or more host memory."
    return None, f"nothing fits: even {_in_words(least)} needs {needs}; {advice}"


def _in_words(row: Row) -> str:
    return f"{row.name} with activation checkpointing" if row.checkpointing else row.name


def groups_of_hosts(
    planned: Callable[[int | None], Plan], config: ZeroConfig, world_size: int, ranks_per_host: int
) -> Plan:
    """The plan with groups of the ranks of one host if the run of ``config`` fits into them, and otherwise with one
    group of all ranks; its last note gives the reason. ``planned`` makes the plan for a ``shard_size``.

    In smaller groups no gather crosses hosts, but each rank stores more.
    """

    def noted(made: Plan, size: int | None, why: str) -> Plan:
        return dataclasses.replace(made, shard_size=size, notes=(*made.notes, f"shard_size='auto' takes {why}"))

    if world_size == ranks_per_host or world_size % ranks_per_host or ranks_per_host == 1:
        return noted(planned(None), None, "all ranks: they are not on several hosts with equally many, two or more")
    made = planned(ranks_per_host)
    row = made.row(row_name(config.stage, str(config.offload.target)))
    if row.fits:
        needs = f"{row.name} needs {gib(row.peak)} GiB there"
        return noted(made, ranks_per_host, f"{ranks_per_host}, the ranks of one host: {needs}")
    why = "does not fit" if made.usable_bytes is not None else "may not fit: no device memory was given"
    return noted(planned(None), None, f"all ranks: in groups of {ranks_per_host} {row.name} {why}")
