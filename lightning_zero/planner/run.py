"""Makes a plan: for a module, or for the run of a Trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_zero.config import OFFLOAD_TARGETS, ZeroConfig
from lightning_zero.engines.hooks import user_hooks
from lightning_zero.host import available_host_bytes
from lightning_zero.planner.choice import choose, groups_of_hosts
from lightning_zero.planner.memory import StepRules
from lightning_zero.planner.rows import GIB, Plan, gib
from lightning_zero.planner.study import Study, precision_name, quiet

HEADROOM = 0.1
"""Default fraction of a device's memory that a plan keeps free."""


def plan(
    module: LightningModule,
    batch: Any = None,
    *,
    world_size: int = 1,
    ranks_per_host: int | None = None,
    precision: Any = "32-true",
    device: str = "cpu",
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    headroom: float = HEADROOM,
    micro_batches: int = 1,
    max_steps: int = 1000,
    keep_gathered: bool = True,
    config: ZeroConfig | None = None,
) -> Plan:
    """Predicts memory and traffic per rank for every stage and offload, and recommends one.

    Args:
        module: An unsharded module on any device; on the meta device it takes no memory. It is copied, never changed.
        batch: One micro-batch, of which only shapes and dtypes matter; without one activations are not counted.
        world_size: Number of ranks.
        ranks_per_host: Number of ranks on one host (default: all).
        precision: As for ``Trainer(precision=...)``.
        device: Kind of device, ``"cpu"`` or ``"cuda"``.
        device_memory_gib: Memory of one device. Without it the plan neither says what fits nor finds the largest
            micro-batch.
        host_memory_gib: Memory of one host, for offload.
        headroom: Fraction of the device's memory to keep free.
        micro_batches: Micro-batches per optimizer step.
        max_steps: Value of ``trainer.estimated_stepping_batches`` for ``configure_optimizers``.
        keep_gathered: Whether units stay gathered between micro-batches, because no user hook runs there.
        config: Units, agreements and ``shard_size`` of the run; only ``shard_size="auto"`` uses its stage and offload.

    Raises:
        ValueError: If the precision is unknown, the module has no trainable parameters, or ``shard_size`` does not
            divide the ranks.
    """
    config = config or ZeroConfig()
    on_host, name = ranks_per_host or world_size, precision_name(precision)
    study = Study(module, batch, name, torch.device(device), config, max_steps)
    usable = None if device_memory_gib is None else device_memory_gib * GIB * (1 - headroom)
    usable_on_host = None if host_memory_gib is None else host_memory_gib * GIB / on_host
    on_cpu = study.target.type == "cpu"
    built_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    if usable_on_host is not None and built_bytes > usable_on_host:
        study.notes.append(
            f"before the run the ranks of a host hold {gib(built_bytes * on_host)} GiB of parameters, and it has"
            f" {host_memory_gib:.3g} GiB: build the module under torch.device('meta')"
        )
    recomputes = config.activation_checkpointing.is_on

    def planned(size: int | None) -> Plan:
        shards = size or world_size
        if world_size % shards:
            raise ValueError(f"shard_size={shards} does not divide {world_size} ranks into equal groups.")
        ddp = StepRules(
            stage=0,
            world_size=world_size,
            micro_batches=micro_batches,
            keep_gathered=keep_gathered,
            in_place=on_cpu and config.transport != "torch" and shards <= on_host,
            automatic=module.automatic_optimization,
            host_is_device=on_cpu,
        )
        sharded = dataclasses.replace(ddp, world_size=shards, replicas=world_size // shards)
        ways = [(s, offload) for offload in OFFLOAD_TARGETS for s in (1, 2, 3) if offload != "nvme" or s == 3]
        rules = [dataclasses.replace(sharded, stage=stage, offload=offload) for stage, offload in ways]
        rows = [study.row(ddp, False, usable, usable_on_host)]
        for checkpointing in (True,) if recomputes else (False, True):
            rows += [study.row(each, checkpointing, usable, usable_on_host) for each in rules]
        best, reason = choose(rows, usable)
        return Plan(
            module=type(module).__name__,
            num_parameters=sum(p.numel for p in study.layout.parameters),
            num_trainable=sum(p.numel for p in study.layout.parameters if p.trainable),
            world_size=world_size,
            shard_size=size,
            ranks_per_host=on_host,
            precision=name,
            micro_batch=study.batch_size,
            micro_batches=micro_batches,
            optimizers=[type(o).__name__ for o in study.optimizers],
            device=study.target.type,
            usable_bytes=usable,
            rows=tuple(rows),
            choice=None if best is None else best.name,
            checkpointing=recomputes if best is None else best.checkpointing,
            reason=reason,
            notes=tuple(dict.fromkeys(study.notes)),
        )

    if config.shard_size == "auto":
        return groups_of_hosts(planned, config, world_size, on_host)
    return planned(config.shard_size)


def plan_of_run(trainer: Trainer, module: LightningModule, batch: Any, **settings: Any) -> Plan:
    """Makes the plan of the run that ``trainer`` starts. ``module`` is its module, not sharded, or a copy of that
    module's structure. ``settings`` are keywords of :func:`plan` that override those of the run."""
    strategy = trainer.strategy
    config = getattr(strategy, "config", None)
    device = strategy.root_device
    of_run = {
        "world_size": trainer.world_size,
        "ranks_per_host": trainer.num_devices,
        "precision": trainer.precision,
        "device": device.type,
        "device_memory_gib": device_memory_bytes(device, trainer.num_devices) / GIB,
        "micro_batches": trainer.accumulate_grad_batches,
        "max_steps": trainer.max_steps if trainer.max_steps > 0 else 1000,
        "keep_gathered": not user_hooks(trainer, module).between_micro_batches,
        "config": config if isinstance(config, ZeroConfig) else None,
    }
    with quiet():
        return plan(module, batch, **{**of_run, **settings})


def device_memory_bytes(device: torch.device, ranks_per_host: int) -> float:
    """Bytes of memory of one device; on the CPU this rank's share of the host's available memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return available_host_bytes() / max(ranks_per_host, 1)


def first_batch(loader: Any) -> Any:
    """The first micro-batch of a ``DataLoader`` over a map-style dataset; ``None`` for any other loader. Uses neither
    workers nor the sampler, and restores the random generators."""
    dataset: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not size or not len(dataset):
        return None
    with isolate_rng(include_cuda=False):
        return loader.collate_fn([dataset[i % len(dataset)] for i in range(size)])
