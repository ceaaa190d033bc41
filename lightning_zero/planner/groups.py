"""``shard_size="auto"``: the smallest group of whole hosts in which a run fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lightning_zero.config import ZeroConfig
from lightning_zero.planner.rows import Plan
from lightning_zero.planner.show import GIB, gib


def smallest_group(
    planned: Callable[[int | None], Plan],
    config: ZeroConfig,
    world_size: int,
    ranks_per_host: int,
    host_gib: float | None,
) -> Plan:
    """The plan of the run in groups, :attr:`Plan.shard_size` among it; its last note says why.

    The smaller a group, the fewer hosts a gather crosses and the shorter its ring; the more each rank stores. So groups
    are tried from one host on, in numbers of hosts that divide all of them.

    Args:
        planned: ``shard_size`` -> the plan with it.
        config: Its stage and offload are planned for.
        world_size: All ranks.
        ranks_per_host: Consecutive ranks of one host.
        host_gib: Memory of one host, for offload; ``None`` does not look at it.
    """
    hosts, rest = divmod(world_size, ranks_per_host)
    if hosts < 2 or rest:
        where = "are on one host" if hosts == 1 and not rest else "are not in hosts of equally many"
        return _noted(planned(None), None, f"all ranks: they {where}")
    in_files = "_nvme" if config.stage == 3 else "_offload"  # plans have files at stage 3 only
    moved = {"cpu": "_offload", "nvme": in_files}
    name = f"zero{config.stage}" + moved.get(str(config.offload.target), "")
    tried = ""
    for count in (n for n in range(1, hosts) if hosts % n == 0 and n * ranks_per_host > 1):
        made = planned(count * ranks_per_host)
        row, size = made.row(name), count * ranks_per_host
        recomputes = config.activation_checkpointing.is_on
        peak, of_host = row.peak_with(recomputes), row.host_with(recomputes) * ranks_per_host
        if made.usable_bytes is None:
            return _noted(planned(None), None, "all ranks: no device memory was given, and they store the least")
        if peak > made.usable_bytes:
            tried = f"; groups of {size} would need {gib(peak)} of {gib(made.usable_bytes)} usable GiB"
        elif host_gib is not None and of_host > host_gib * GIB:
            tried = f"; groups of {size} would need {gib(of_host)} GiB of a host's memory"
        else:
            group = "the ranks of one host" if count == 1 else f"the ranks of {count} hosts"
            why = f"{name} needs {gib(peak)} of {gib(made.usable_bytes)} usable GiB there{tried}"
            return _noted(made, size, f"{size}, {group}: {why}")
    return _noted(planned(None), None, f"all ranks{tried}")


def _noted(made: Plan, size: int | None, why: str) -> Plan:
    return dataclasses.replace(made, shard_size=size, notes=(*made.notes, f"shard_size='auto' takes {why}"))
