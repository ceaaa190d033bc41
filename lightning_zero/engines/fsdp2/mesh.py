"""The ranks that share out one copy of the module, and their replicas."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_mesh(device_type: str, shard_size: int | None, timeout_seconds: float) -> DeviceMesh:
    """Axis "shard" over all ranks; with ``shard_size``, axes "replicate" and "shard" (consecutive ranks). Collective.

    Raises:
        ValueError: If ``shard_size`` does not divide the ranks into equal groups.
    """
    world_size = dist.get_world_size()
    if shard_size is None or shard_size == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    if world_size % shard_size:
        divisors = [n for n in range(2, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"shard_size={shard_size} does not divide the {world_size} ranks of this run into equal groups: use one of"
            f" {', '.join(map(str, divisors)) or 'None'}, or None."
        )
    grid = torch.arange(world_size).view(-1, shard_size)
    timeout = timedelta(seconds=timeout_seconds)  # init_device_mesh would take the default
    shard, _ = dist.new_subgroups_by_enumeration(grid.tolist(), timeout=timeout)
    replicate, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=grid, mesh_dim_names=("replicate", "shard"))
