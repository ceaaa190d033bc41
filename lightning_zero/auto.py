"""``zero_auto`` and ``shard_size="auto"``: the plan chooses stage, offload and groups when a run is set up."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_zero.comm.agree import Agreement
from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.host import available_host_bytes
from lightning_zero.planner import GIB, HEADROOM, Plan, choose, device_memory_bytes, first_batch, plan_of_run
from lightning_zero.private.lightning import training_source


def resolve(
    trainer: Any, module: LightningModule, config: ZeroConfig, agreement: Agreement
) -> tuple[ZeroConfig, list[str]]:
    """Plans the run that ``trainer`` is about to start; returns ``config`` with the values that the plan chooses, and
    the reasons (collective).

    All ranks would get the same answer, but only rank 0 loads a batch for it. The smallest device counts, because all
    ranks run the same stage.

    Raises:
        ValueError: On all ranks, if rank 0 cannot plan the run.
    """
    memory = (config.device_memory_gib or 0) * GIB
    memory = memory or min(agreement.gather(device_memory_bytes(trainer.strategy.root_device, trainer.num_devices)))
    answer: tuple[ZeroConfig, list[str]] | None = None
    with agreement.raise_if_any_failed():
        try:
            if agreement.rank == 0:
                answer = _answer(trainer, module, config, memory)
        except Exception as error:  # user code can raise anything
            asked = "strategy='zero_auto'" if config.auto else "shard_size='auto'"
            instead = "strategy='zero1', 'zero2' or 'zero3'" if config.auto else "a number"
            reason = f"the run could not be planned ({type(error).__name__}: {error})"
            raise ValueError(f"{asked}: {reason}; use {instead}.") from error
    return agreement.gather(answer)[0]  # type: ignore[return-value]


def _answer(trainer: Any, module: LightningModule, config: ZeroConfig, memory: float) -> tuple[ZeroConfig, list[str]]:
    groups, reasons = config.shard_size == "auto", []
    if groups:
        config = config.with_(shard_size=None)
    if trainer.state.fn != TrainerFn.FITTING:
        stored = "nothing is trained, and shards of all ranks store the least"
        return (config.with_(stage=3), [f"zero_auto takes zero3: {stored}"]) if config.auto else (config, [])
    batch, host_memory_gib = _training_batch(trainer), available_host_bytes() / GIB
    memory_of = {"device_memory_gib": memory / GIB, "host_memory_gib": host_memory_gib, "headroom": HEADROOM}
    planned = partial(plan_of_run, trainer, module, batch, **memory_of)
    if config.auto:
        config, reason = _stage_of(planned(config=config), config)
        reasons.append(f"zero_auto takes {reason}")
    if groups:
        made = planned(config=config.with_(shard_size="auto"))
        config = config.with_(shard_size=made.shard_size)
        reasons.append(made.notes[-1])
    return config, reasons


def _training_batch(trainer: Any) -> Any:
    """The first training batch of the fit that ``trainer`` is about to start, before its loops have set up the data."""
    source = training_source(trainer)
    if source is not None and (isinstance(source, LightningModule) or hasattr(source, "train_dataloader")):
        source = source.train_dataloader()
    return first_batch(source)


def _stage_of(plan: Plan, config: ZeroConfig) -> tuple[ZeroConfig, str]:
    """Offload to host memory is chosen if nothing fits without it, or if the user asked for it. Offload to files is
    chosen only if the user asked for it."""
    asked = config.offload.target
    rows = [r for r in plan.rows if r.offload == asked or (asked == "none" and r.offload != "nvme")]
    row, reason = choose(rows, plan.usable_bytes)
    notes = "".join(f" ({note})" for note in plan.notes)
    if row is not None:
        offload = config.offload if asked != "none" else OffloadConfig(target=row.offload)  # type: ignore[arg-type]
        return config.with_(stage=row.stage, offload=offload), reason + notes
    wanted = f" {plan.choice} would fit: use strategy={plan.choice!r}." if plan.choice else ""
    return config.with_(stage=3), f"zero3, which stores the least, although {reason}{wanted}{notes}"
