"""Makes a plan: for a module, or for a run that is about to start, with the same result on all ranks."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader

from lightning_zero.comm.agree import Agreement
from lightning_zero.config import OFFLOAD_TARGETS, ZeroConfig
from lightning_zero.engines.hooks import user_hooks
from lightning_zero.host import available_host_bytes
from lightning_zero.planner.choice import choose, smallest_group
from lightning_zero.planner.memory import StepRules
from lightning_zero.planner.rows import GIB, Plan, gib
from lightning_zero.planner.study import Study, precision_name, quiet
from lightning_zero.planner.tracing import NotTraceable, shadow
from lightning_zero.private.lightning import training_source

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
    on_cpu = study.target.type == "cpu"
    built_bytes = on_host * sum(p.numel() * p.element_size() for p in module.parameters())
    if host_memory_gib is not None and built_bytes > host_memory_gib * GIB:
        study.notes.append(
            f"before the run the ranks of a host hold {gib(built_bytes)} GiB of parameters, and it has"
            f" {host_memory_gib:.3g} GiB: build the module under torch.device('meta')"
        )

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
        rules = [ddp, *(dataclasses.replace(sharded, stage=stage, offload=offload) for stage, offload in ways)]
        rows = tuple(study.row(each, usable) for each in rules)
        recomputes = config.activation_checkpointing.is_on
        choice, checkpointing, reason = choose(rows, usable, host_memory_gib, on_host, recomputes)
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
            device_bytes=None if device_memory_gib is None else device_memory_gib * GIB,
            usable_bytes=usable,
            rows=rows,
            choice=choice,
            checkpointing=checkpointing,
            recomputed=str(config.activation_checkpointing) if recomputes else "each unit's activations recomputed",
            reason=reason,
            notes=tuple(dict.fromkeys(study.notes)),
        )

    if config.shard_size == "auto":
        return smallest_group(planned, config, world_size, on_host, host_memory_gib)
    return planned(config.shard_size)


class Planner:
    """Makes a plan in two parts: it copies the module's structure now, before the module is sharded, and plans once a
    batch is known. ``settings`` are keywords of :func:`plan`."""

    def __init__(self, module: LightningModule, **settings: Any) -> None:
        meta = torch.device("meta")
        self.module = cast(LightningModule, shadow(module, nullcontext(), meta, lambda name, t: t.dtype))
        self.settings = settings
        self._original = weakref.ref(module)

    def __call__(self, batch: Any) -> Plan:
        """Plans for ``batch``. If the step of the copy runs layers of the original module, which may be sharded by now,
        it counts as not traceable."""
        original = self._original()
        layers = set() if original is None else set(original.modules())

        def refuse(layer: nn.Module, args: Any) -> None:  # the copy holds a closure over the original
            if layer in layers:
                raise NotTraceable(f"the step of the copy runs the module's own {type(layer).__name__}")

        with quiet(), register_module_forward_pre_hook(refuse):
            return plan(self.module, batch, **self.settings)

    @classmethod
    def of_run(cls, trainer: Trainer, module: LightningModule, **settings: Any) -> Planner:
        """Takes the settings from the run that ``trainer`` is about to start; ``settings`` override them."""
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


# -- a run that is about to start -------------------------------------------------------------------------------------


def training_batch(trainer: Trainer) -> Any:
    """The first training batch of the fit that ``trainer`` is about to start, before its loops have set up the data."""
    source = training_source(trainer)
    if source is not None and (isinstance(source, LightningModule) or hasattr(source, "train_dataloader")):
        source = source.train_dataloader()
    return first_batch(source)


def planned_on_rank_0(
    trainer: Trainer, config: ZeroConfig, agreement: Agreement, answer: Callable[[float], Any], asked: str, other: str
) -> Any:
    """Returns on all ranks what ``answer`` returns on rank 0 for the bytes of the smallest device (collective).

    All ranks would get the same answer, but only one loads a batch for it. The smallest device counts, because all
    ranks run the same stage.

    Raises:
        ValueError: On all ranks, if rank 0 cannot plan the run; names the setting ``asked`` and the ``other`` to use.
    """
    memory = (config.device_memory_gib or 0) * GIB
    memory = memory or min(agreement.gather(device_memory_bytes(trainer.strategy.root_device, trainer.num_devices)))
    with agreement.raise_if_any_failed():
        try:
            found = answer(memory) if agreement.rank == 0 else None
        except Exception as error:  # user code can raise anything
            reason = f"the run could not be planned ({type(error).__name__}: {error})"
            raise ValueError(f"{asked}: {reason}; use {other}.") from error
    return agreement.gather(found)[0]


def resolve_shard_size(
    trainer: Trainer, module: LightningModule, config: ZeroConfig, agreement: Agreement
) -> tuple[int | None, str]:
    """Finds the group size of ``shard_size="auto"`` for the run that ``trainer`` is about to start, and the reason
    (collective). Raises as :func:`planned_on_rank_0` does."""

    def answer(memory: float) -> tuple[int | None, str]:
        if trainer.state.fn != TrainerFn.FITTING:
            return None, "shard_size='auto' takes all ranks: nothing is trained"
        settings = {"device_memory_gib": memory / GIB, "headroom": HEADROOM, "config": config}
        planner = Planner.of_run(trainer, module, host_memory_gib=available_host_bytes() / GIB, **settings)
        made = planner(training_batch(trainer))
        return made.shard_size, made.notes[-1]

    return planned_on_rank_0(trainer, config, agreement, answer, "shard_size='auto'", "a number")
