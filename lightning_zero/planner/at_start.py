"""The planner at the start of a run, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_zero.config import ZeroConfig
from lightning_zero.host import available_host_bytes
from lightning_zero.planner.run import Planner, device_memory_bytes, first_batch
from lightning_zero.planner.show import GIB
from lightning_zero.private.lightning import training_source

HEADROOM = 0.1
"""Of a device's memory, where a run is planned by itself."""


def training_batch(trainer: Trainer) -> Any:
    """:func:`first_batch` of the fit that ``trainer`` is about to start, before its loops have set data up."""
    source = training_source(trainer)
    if source is not None and (isinstance(source, LightningModule) or hasattr(source, "train_dataloader")):
        source = source.train_dataloader()
    return first_batch(source)


def smallest_device_bytes(trainer: Trainer, config: ZeroConfig) -> float:
    """The least of all ranks' device memory, or what ``config`` says (collective)."""
    if config.device_memory_gib is not None:
        return config.device_memory_gib * GIB
    mine = device_memory_bytes(trainer.strategy.root_device, trainer.num_devices)
    if not dist.is_initialized() or trainer.world_size == 1:
        return mine
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, mine)
    return min(everyone)


def resolve_shard_size(
    trainer: Trainer, module: LightningModule, config: ZeroConfig, broadcast: Callable[[Any], Any]
) -> tuple[int | None, str]:
    """The groups of ``shard_size="auto"`` for the run that ``trainer`` is about to start, and the reason (collective).

    Raises:
        ValueError: On all ranks, where rank 0 cannot plan the run.
    """
    memory = smallest_device_bytes(trainer, config)
    answer: tuple[int | None, str, str] | None = None
    if trainer.is_global_zero:  # every rank would find the same; one of them asks the data
        try:
            answer = _group_of(trainer, module, config, memory)
        except Exception as error:  # whatever the module raises while it is traced: every rank has to hear of it
            text = f"shard_size='auto': the run could not be planned ({type(error).__name__}: {error}); use a number."
            answer = None, "", text
    answer = broadcast(answer)
    assert answer is not None
    size, why, error_text = answer
    if error_text:
        raise ValueError(error_text)
    return size, why


def _group_of(
    trainer: Trainer, module: LightningModule, config: ZeroConfig, memory: float
) -> tuple[int | None, str, str]:
    if trainer.state.fn != TrainerFn.FITTING:
        return None, "shard_size='auto' takes all ranks: nothing is trained", ""
    batch = training_batch(trainer)
    host = available_host_bytes() / GIB
    settings: dict[str, Any] = {
        "device_memory_gib": memory / GIB,
        "headroom": HEADROOM,
        "host_memory_gib": host,
        "config": config,
    }
    made = Planner.of_run(trainer, module, **settings)(batch)
    return made.shard_size, made.notes[-1], ""
