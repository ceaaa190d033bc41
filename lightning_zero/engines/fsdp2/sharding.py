"""Turns a module into units of ``fully_shard``: mesh, policies, broadcast of rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_zero.comm.agree import broadcast_coalesced
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.base import Root, refuse_late_hooks
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.files import FileShards
from lightning_zero.engines.fsdp2.transport import Transport
from lightning_zero.engines.graphs import untraced
from lightning_zero.engines.materialize import Materializer
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.residency import showing_full
from lightning_zero.engines.units import BATCH_NORMS, Unit, UnitPlan, plan_units
from lightning_zero.private.torch import forget_meshes


@dataclass(frozen=True)
class ShardPlan:
    """All decisions, made before anything changes on the module.

    Attributes:
        units: The sets of parameters that are gathered together.
        reshards: Whether parameters are dropped after each use.
        device: The device that computes.
        home: The device on which tensors of the meta device get their memory.
    """

    module: nn.Module
    units: UnitPlan
    mesh: DeviceMesh
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshards: bool
    device: torch.device

    @property
    def home(self) -> torch.device:
        return torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else self.device

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules of all units except the root."""
        return [unit.module for unit in self.units.units[:-1]]


@dataclass
class Sharded:
    """A module that ``fully_shard`` has taken over.

    Attributes:
        root: Wraps the module; the root unit's hooks are registered on it.
        units: The modules that are gathered together; the root is last.
        originals: Sharded parameters -> the user's parameters.
    """

    plan: UnitPlan
    module: nn.Module
    root: Root
    units: list[Any] = field(default_factory=list)
    originals: dict[Tensor, nn.Parameter] = field(default_factory=dict)

    @property
    def replicated(self) -> list[nn.Parameter]:
        """Parameters that every rank holds in full."""
        return list(self.plan.replicated.values())

    @property
    def parameters(self) -> list[Any]:
        """Sharded and replicated, in an order that all ranks share."""
        return [*self.originals, *self.replicated]

    @property
    def names(self) -> list[str]:
        """The names of the units."""
        return [unit.name for unit in self.plan.units]

    @property
    def unit_of(self) -> dict[private.Group, int]:
        """The groups of ``fully_shard`` -> numbers of their units, in an order that all ranks share."""
        return {group: index for index, unit in enumerate(self.units) for group in private.groups(unit)}


def make_mesh(config: ZeroConfig, device: torch.device) -> DeviceMesh:
    """Make the mesh: axis "shard" over all ranks; with ``shard_size`` axes "replicate" and "shard" (consecutive ranks).

    Raises:
        ValueError: On all ranks, if ``shard_size`` does not divide their number.
    """
    forget_meshes()
    world_size, size = dist.get_world_size(), config.shard_size
    assert size != "auto", "the strategy has put a number in its place"
    if size is None or size == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if world_size % size:
        divisors = [n for n in range(2, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"shard_size={size} does not divide the {world_size} ranks of this run into equal groups: use one of"
            f" {', '.join(map(str, divisors)) or 'None'}, or None."
        )
    grid = torch.arange(world_size, device="cpu").view(-1, size)
    timeout = timedelta(seconds=config.timeout_seconds)  # init_device_mesh would take the default
    shard, _ = dist.new_subgroups_by_enumeration(grid.tolist(), timeout=timeout)
    replicate, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicate, shard], device.type, mesh=grid, mesh_dim_names=("replicate", "shard"))


def plan_shards(
    module: nn.Module, mesh: DeviceMesh, config: ZeroConfig, dtypes: DtypePolicy, device: torch.device
) -> ShardPlan:
    """Plan the shards of ``module`` without changing it."""
    keep_full = BATCH_NORMS if dtypes.is_mixed else ()
    units = plan_units(module, config.units, config.min_unit_numel, keep_full)
    precision = MixedPrecisionPolicy(
        param_dtype=dtypes.param_dtype, reduce_dtype=dtypes.reduce_dtype, cast_forward_inputs=False
    )
    return ShardPlan(module, units, mesh, precision, offload_policy(config, device), config.stage == 3, device)


def shard_units(plan: ShardPlan, transport: Transport, files: FileShards | None = None) -> Sharded:
    """Broadcast rank 0's values and shard them, unit by unit (collective); shards are in ``files`` if given."""
    module = plan.module
    sharded = Sharded(plan.units, module, Root(module))
    materializer = Materializer(module, plan.home, showing_full)
    refuse_late_hooks(dict(module.named_parameters()))
    everything = set(module.parameters())
    for unit in plan.units.units:
        mine = list(unit.parameters.values())
        materializer.materialize(unit.module, mine)
        _start_from_rank_0(mine, plan.device)
        target: Any = sharded.root if unit.module is module else unit.module
        sharded.originals.update(_fully_shard(plan, unit, target, everything.difference(mine)))
        sharded.units.append(target)
        if files is not None:
            for group in private.groups(target):
                files.take(group)
    rest = [*sharded.replicated, *module.buffers()]
    materializer.materialize(module, rest)
    materializer.finish()
    _start_from_rank_0(rest, plan.device)
    transport.install(sharded.units)  # before give_class_back: it may call methods of FSDPModule
    for target in sharded.units:
        private.give_class_back(target)
    private.init_now(sharded.root)
    transport.start(sharded.units, sharded.names)
    return sharded


def _fully_shard(plan: ShardPlan, unit: Unit, target: Any, ignored: set[nn.Parameter]) -> dict[Tensor, nn.Parameter]:
    """Shard ``unit``; return its shards -> the user's parameters, which are empty."""
    is_root = unit.module is plan.module
    fully_shard(
        target,
        mesh=plan.mesh,
        mp_policy=plan.precision,
        offload_policy=plan.offload,
        reshard_after_forward=plan.reshards and not is_root,  # the backward needs the root at once
        ignored_params=ignored,
    )
    # Dropping them inside a backward would free tensors that uses outside the unit's forward have saved.
    target.set_reshard_after_backward(plan.reshards, recurse=False)
    named = dict(plan.module.named_parameters())
    for original in unit.parameters.values():
        original.data = original.data.new_empty(0)  # only the shards keep the values
    return {named[name]: original for name, original in unit.parameters.items()}


def _start_from_rank_0(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Broadcast rank 0's values, on ``device``. Call this unit by unit: an offloaded module need not fit there."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    broadcast_coalesced(tensors)


def root_owners(root: Root) -> set[nn.Module]:
    """Return the modules that hold the root unit's parameters."""
    return {m for group in private.groups(root) for _, places in private.registrations(group) for m, _ in places}


@dataclass
class Marks:
    """All that compiled code reads of a run: one boolean, equal in every step. A change means recompilation."""

    root_is_full: bool = False
    """The root's parameters stay gathered until the engine says otherwise."""


def before_owner(marks: Marks, gather: Callable[[], None]) -> Callable[..., None]:
    """Return a forward pre-hook that gathers the root's parameters unless ``marks`` says they are gathered.

    Dynamo inlines the hooks of every module in a compiled region, and a call that it must not trace breaks the graph.
    At a unit the hooks of ``fully_shard`` break it anyway; here there is nothing to do inside a step.
    """
    gather = untraced(gather)

    def hook(*unused: Any) -> None:
        if not marks.root_is_full:
            gather()

    return hook


def offload_policy(config: ZeroConfig, device: torch.device) -> OffloadPolicy:
    """Return the policy that tells ``fully_shard`` where to keep the shards.

    Raises:
        ValueError: For pinned memory without an accelerator.
    """
    if config.offload.target == "none":
        return OffloadPolicy()
    if config.offload.target == "nvme":
        return CPUOffloadPolicy(pin_memory=False)  # mapped files cannot be pinned
    pin_memory = config.offload.pin_memory
    if pin_memory and device.type == "cpu":
        raise ValueError(
            "offload.pin_memory=True on accelerator='cpu': pinned memory only serves copies to an accelerator; leave"
            " pin_memory unset."
        )
    return CPUOffloadPolicy(pin_memory=device.type != "cpu" if pin_memory is None else pin_memory)
