"""Chooses the row of a plan, and the size of its groups (``shard_size="auto"``), each with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lightning_zero.config import ZeroConfig
from lightning_zero.planner.rows import GIB, Plan, Row, gib, row_name


def choose(
    rows: Sequence[Row],
    usable: float | None,
    host_gib: float | None,
    ranks_per_host: int,
    recomputes: bool = False,
) -> tuple[str | None, bool, str]:
    """Returns ``(name, needs checkpointing, reason)`` of the cheapest row that fits.

    Rows are tried in the order of their traffic and recomputation: stages 1, 2, 3 on the device, then with activation
    checkpointing, then with offload. DDP is never chosen: stage 1 sends as much and stores less. With ``recomputes``
    activation checkpointing is already on.
    """
    if usable is None:
        return "zero3", recomputes, "zero3: no device memory was given, and stage 3 stores the least."
    candidates = [r for r in rows if r.stage]
    on_device = [r for r in candidates if r.offload == "none"]
    offloaded = [r for r in candidates if r.offload != "none"]
    for group in (on_device, offloaded):
        for checkpointing in (True,) if recomputes else (False, True):
            for index, row in enumerate(group):
                peak, of_host = row.peak_with(checkpointing), row.host * ranks_per_host
                if peak > usable or (host_gib is not None and of_host > host_gib * GIB):
                    continue
                reason = f"{row.name}: needs {gib(peak)} of {gib(usable)} usable GiB per rank"
                if group is on_device:
                    before = ", ".join(f"{r.name} {gib(r.peak_with(checkpointing))}" for r in group[:index])
                    reason += f", where {before} would be needed." if before else ", and no stage sends less per step."
                    if checkpointing and not recomputes:
                        reason += " It needs activation_checkpointing='full': without it no stage fits."
                elif on_device:  # else the user asked for offload
                    least = min(on_device, key=lambda r: r.peak_checkpointed)
                    reason += f"; without offload even {least.name} with activation checkpointing needs"
                    reason += f" {gib(least.peak_checkpointed)}."
                return row.name, checkpointing, reason
    least = min(candidates, key=lambda r: r.peak_checkpointed)
    needs = f"{gib(least.peak_checkpointed)} of {gib(usable)} usable GiB"
    advice = "use more ranks, a smaller micro-batch or a larger device."
    return None, False, f"nothing fits: even {least.name} with activation checkpointing needs {needs}; {advice}"


def smallest_group(
    planned: Callable[[int | None], Plan],
    config: ZeroConfig,
    world_size: int,
    ranks_per_host: int,
    host_gib: float | None,
) -> Plan:
    """The plan of the run with the smallest groups that fit; its last note gives the reason.

    In smaller groups a gather crosses fewer hosts and its ring is shorter, but each rank stores more. So group sizes
    are tried upwards from one host, for the stage and offload of ``config``. A size must divide the number of hosts.
    ``planned`` makes the plan for a ``shard_size``.
    """

    def noted(made: Plan, size: int | None, why: str) -> Plan:
        return dataclasses.replace(made, shard_size=size, notes=(*made.notes, f"shard_size='auto' takes {why}"))

    everyone = planned(None)
    hosts, rest = divmod(world_size, ranks_per_host)
    if hosts < 2 or rest:
        where = "are on one host" if hosts == 1 and not rest else "are not spread evenly over hosts"
        return noted(everyone, None, f"all ranks: they {where}")
    if everyone.usable_bytes is None:
        return noted(everyone, None, "all ranks: no device memory was given, and they store the least")
    name = row_name(config.stage, str(config.offload.target))
    recomputes, usable, tried = config.activation_checkpointing.is_on, everyone.usable_bytes, ""
    for count in (n for n in range(1, hosts) if hosts % n == 0 and n * ranks_per_host > 1):
        size = count * ranks_per_host
        made = planned(size)
        peak = made.row(name).peak_with(recomputes)
        of_host = made.row(name).host * ranks_per_host
        if peak > usable:
            tried = f"; groups of {size} would need {gib(peak)} of {gib(usable)} usable GiB"
        elif host_gib is not None and of_host > host_gib * GIB:
            tried = f"; groups of {size} would need {gib(of_host)} GiB of a host's memory"
        else:
            group = "the ranks of one host" if count == 1 else f"the ranks of {count} hosts"
            why = f"{name} needs {gib(peak)} of {gib(usable)} usable GiB there{tried}"
            return noted(made, size, f"{size}, {group}: {why}")
    return noted(everyone, None, f"all ranks{tried}")
