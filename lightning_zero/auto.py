"""``zero_auto``: the plan chooses stage and offload when a run is set up."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_zero.comm.agree import Agreement
from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.host import available_host_bytes
from lightning_zero.planner import GIB, HEADROOM, Planner, choose, planned_on_rank_0, training_batch


def resolve_stage(
    trainer: Any, module: LightningModule, config: ZeroConfig, agreement: Agreement
) -> tuple[ZeroConfig, str]:
    """Plans the run that ``trainer`` is about to start; returns ``config`` with the stage and the offload that the plan
    chooses, and the reason (collective). Raises as :func:`~lightning_zero.planner.planned_on_rank_0` does.

    Offload to host memory is chosen if nothing fits without it, or if the user asked for it. Offload to files is chosen
    only if the user asked for it.
    """
    stage, offload, reason = planned_on_rank_0(
        *(trainer, config, agreement, partial(_answer, trainer, module, config)),
        asked="strategy='zero_auto'",
        other="strategy='zero1', 'zero2' or 'zero3'",
    )
    moved = config.offload if config.offload.target != "none" else OffloadConfig(target=offload)
    return config.with_(stage=stage, offload=moved), f"zero_auto takes {reason}"


def _answer(trainer: Any, module: LightningModule, config: ZeroConfig, memory: float) -> tuple[int, str, str]:
    """Returns stage, offload and the reason."""
    if trainer.state.fn != TrainerFn.FITTING:
        return _answer_without_fit(module, memory)
    # a size of groups is chosen later, once the stage is known
    given = config.with_(shard_size=None) if config.shard_size == "auto" else config
    settings = {"device_memory_gib": memory / GIB, "headroom": HEADROOM, "config": given}
    plan = Planner.of_run(trainer, module, **settings)(training_batch(trainer))
    asked = config.offload.target
    rows = [r for r in plan.rows if r.offload == asked or (asked == "none" and r.offload != "nvme")]
    host = available_host_bytes() / GIB
    recomputes = config.activation_checkpointing.is_on
    name, checkpointing, reason = choose(rows, plan.usable_bytes, host, plan.ranks_per_host, recomputes=recomputes)
    notes = "".join(f" ({note})" for note in plan.notes)
    if name is not None:
        if checkpointing and not recomputes:
            notes += " Use activation_checkpointing='full', or your module's own: without it no stage fits."
        row = plan.row(name)
        return row.stage, row.offload, reason + notes
    wanted = f" {plan.choice} would fit: use strategy={plan.choice!r}." if plan.choice else ""
    return 3, "none", f"zero3, which stores the least, although {reason}{wanted}{notes}"


def _answer_without_fit(module: LightningModule, memory: float) -> tuple[int, str, str]:
    full = sum(p.numel() * p.element_size() for p in module.parameters())
    usable = memory * (1 - HEADROOM)
    sizes = f"parameters take {full / GIB:.4g} of {usable / GIB:.4g} usable GiB"
    return (1, "none", f"full parameters: {sizes}.") if full <= usable else (3, "none", f"zero3: {sizes}.")
