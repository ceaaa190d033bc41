"""The plan itself, for a module and for a run that is about to start."""

from __future__ import annotations

import dataclasses
import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero.comm.direct import SMALL_BYTES
from lightning_zero.config import OFFLOAD_TARGETS, ZeroConfig
from lightning_zero.engines.hooks import user_hooks
from lightning_zero.host import available_host_bytes
from lightning_zero.planner.choice import choose
from lightning_zero.planner.groups import smallest_group
from lightning_zero.planner.life import Life, life_of
from lightning_zero.planner.memory import StepRules
from lightning_zero.planner.rows import Plan, Row
from lightning_zero.planner.show import GIB
from lightning_zero.planner.silent import quiet
from lightning_zero.planner.study import Study, precision_name
from lightning_zero.planner.tracing import NotTraceable, shadow


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
    headroom: float = 0.1,
    micro_batches: int = 1,
    max_steps: int = 1000,
    keep_gathered: bool = True,
    config: ZeroConfig | None = None,
) -> Plan:
    """Predicts memory and traffic of each rank for every stage and offload, and recommends one.

    Args:
        module: Whole, on any device; on the meta device it takes no memory. It is copied, never changed.
        batch: One micro-batch (its shapes and dtypes count); without one no activations are counted.
        world_size: Ranks that share the model states.
        ranks_per_host: Of them on one host (default: all).
        precision: As for ``Trainer(precision=...)``.
        device: Kind of device to plan for, ``"cpu"`` or ``"cuda"``.
        device_memory_gib: Of one device; without it nothing is said to fit or not to fit, and the largest micro-batch
            is not looked for.
        host_memory_gib: Of one host, for offload.
        headroom: Share of the device's memory that is left free.
        micro_batches: Accumulated per optimizer step.
        max_steps: The answer of ``trainer.estimated_stepping_batches`` while optimizers are configured.
        keep_gathered: No hook of the user's looks at the module between micro-batches.
        config: Units, agreements and ``shard_size`` of the run; its stage and offload are looked at only by
            ``shard_size="auto"``.

    Raises:
        ValueError: For an unknown precision, a module without trainable parameters, or groups that are not equal.
    """
    config = config or ZeroConfig()
    on_host = ranks_per_host or world_size
    if config.shard_size == "auto":

        def planned(size: int | None) -> Plan:
            return plan(
                module,
                batch,
                world_size=world_size,
                ranks_per_host=ranks_per_host,
                precision=precision,
                device=device,
                device_memory_gib=device_memory_gib,
                host_memory_gib=host_memory_gib,
                headroom=headroom,
                micro_batches=micro_batches,
                max_steps=max_steps,
                keep_gathered=keep_gathered,
                config=config.with_(shard_size=size),
            )

        return smallest_group(planned, config, world_size, on_host, host_memory_gib)
    name, shards = precision_name(precision), config.shard_size or world_size
    if world_size % shards:
        raise ValueError(f"shard_size={shards} does not divide {world_size} ranks into equal groups.")
    study = Study(module, batch, name, torch.device(device), config, shards, max_steps)
    usable = None if device_memory_gib is None else device_memory_gib * GIB * (1 - headroom)
    exchanges_directly = study.target.type == "cpu" and study.config.transport != "torch"
    rules = StepRules(
        stage=3,
        world_size=shards,
        replicas=world_size // shards,
        micro_batches=micro_batches,
        keep_gathered=keep_gathered,
        gathers_up_front=exchanges_directly,
        gathers_in_place_from=SMALL_BYTES if exchanges_directly else None,
        keeps_shards_in_copies=exchanges_directly,
        keeps_last=module.automatic_optimization,
        agrees_per_unit=exchanges_directly and world_size > 1 and study.config.find_unused_parameters,
        agrees_on_unused=study.config.find_unused_parameters,
        broadcasts_buffers=study.config.broadcast_buffers,
        zeroes_late=module.automatic_optimization,
    )
    rows = [study.row(0, "none", dataclasses.replace(rules, world_size=world_size, replicas=1), usable)]
    for offload in OFFLOAD_TARGETS:
        for stage in (3,) if offload == "nvme" else (1, 2, 3):
            rows.append(study.row(stage, offload, rules, usable))
    choice, checkpointing, reason = choose(
        rows, usable, host_memory_gib, on_host, recomputes=config.activation_checkpointing.is_on
    )
    return Plan(
        module=type(module).__name__,
        num_parameters=study.layout.num_parameters,
        num_trainable=sum(p.numel for p in study.layout.parameters if p.trainable),
        world_size=world_size,
        shard_size=config.shard_size,
        ranks_per_host=on_host,
        precision=name,
        micro_batch=study.batch_size,
        micro_batches=micro_batches,
        optimizers=study.optimizer_names,
        device=study.target.type,
        device_bytes=None if device_memory_gib is None else device_memory_gib * GIB,
        usable_bytes=usable,
        flops_per_micro_batch=study.flops,
        rows=tuple(rows),
        life=None if world_size == 1 else _life(study, shards, rows),
        choice=choice,
        checkpointing=checkpointing,
        recomputed=str(config.activation_checkpointing)
        if config.activation_checkpointing.is_on
        else "each unit's activations recomputed",
        reason=reason,
        notes=tuple(study.notes),
    )


def _life(study: Study, shards: int, rows: Sequence[Row]) -> Life:
    config, offload, host_is_device = study.config, study.config.offload.target or "none", study.target.type == "cpu"
    (row,) = (r for r in rows if r.stage == 3 and r.offload == offload)
    recomputes = config.activation_checkpointing.is_on
    peak, host = row.peak_with(recomputes) if host_is_device else 0.0, row.host_with(recomputes)
    return life_of(study.layout, shards, offload, host_is_device, config.build, peak + host)


class Planner:
    """A plan that waits for its batch: copies the module's structure now, while it is whole.

    Args:
        module: As for :func:`plan`.
        **settings: Its keywords.
    """

    def __init__(self, module: LightningModule, **settings: Any) -> None:
        copied = shadow(module, nullcontext(), torch.device("meta"), lambda name, t: t.dtype)
        self.module = cast(LightningModule, copied)
        self.settings = settings
        self._original = weakref.ref(module)

    def __call__(self, batch: Any) -> Plan:
        """The plan for that batch. A step that runs layers of the module itself, which may be sharded by now, counts as
        one that cannot be traced."""
        with quiet(), _at_rest(self._original()):
            return plan(self.module, batch, **self.settings)

    @classmethod
    def of_run(cls, trainer: Trainer, module: LightningModule, **settings: Any) -> Planner:
        """For the run that ``trainer`` is about to start."""
        strategy = trainer.strategy
        config = getattr(strategy, "config", None)
        device = strategy.root_device
        return cls(
            module,
            **{
                "world_size": trainer.world_size,
                "ranks_per_host": trainer.num_devices,
                "precision": trainer.precision,
                "device": device.type,
                "device_memory_gib": device_memory_bytes(device, trainer.num_devices) / GIB,
                "micro_batches": trainer.accumulate_grad_batches,
                "max_steps": trainer.max_steps if trainer.max_steps > 0 else 1000,
                "keep_gathered": not user_hooks(trainer, module).between_micro_batches,
                "config": config if isinstance(config, ZeroConfig) else None,
                **settings,
            },
        )


@contextmanager
def _at_rest(module: nn.Module | None) -> Iterator[None]:
    """No layer of ``module`` runs: a function that a copy could not be given (a global one that knows the module) would
    gather, on this rank alone."""

    def refuse(layer: nn.Module, args: Any) -> None:
        raise NotTraceable(
            f"the step of the copy runs the run's own {type(layer).__name__}: a function or object that is no part of"
            " the module knows it"
        )

    layers = [] if module is None else list(module.modules())
    handles = [layer.register_forward_pre_hook(refuse, prepend=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def device_memory_bytes(device: torch.device, ranks_per_host: int) -> float:
    """Memory of one device; on the CPU this rank's share of the host's available memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return available_host_bytes() / max(ranks_per_host, 1)


def first_batch(loader: Any) -> Any:
    """The first micro-batch of a ``DataLoader`` over a map-style dataset, without its workers, its sampler or a trace
    in the random generators; ``None`` where there is no such thing."""
    dataset, size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
    if not isinstance(loader, DataLoader) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    batch_sampler = loader.batch_sampler
    size = size or getattr(batch_sampler, "batch_size", None)
    if not size or not len(dataset):  # type: ignore[arg-type]
        return None
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            return loader.collate_fn([dataset[i % len(dataset)] for i in range(size)])  # type: ignore[index, arg-type]
    finally:
        random.setstate(state)
