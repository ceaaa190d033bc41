"""``zero_auto``: the plan chooses stage and offload when a run is set up."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.host import available_host_bytes
from lightning_zero.planner import GIB, HEADROOM, Plan, Planner, choose, planned_on_rank_0, training_batch
from lightning_zero.strategy import ZeroStrategy


def make_strategy(config: ZeroConfig) -> ZeroStrategy:
    """Makes the strategy for ``config``: an :class:`AutoStrategy` if ``config.auto``, else a :class:`ZeroStrategy`."""
    settings: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(config)}
    return (AutoStrategy if config.auto else ZeroStrategy)(**settings)


class AutoStrategy(ZeroStrategy):
    """Plans the run on rank 0, broadcasts stage and offload to all ranks, and logs both with the reason.

    Offload to host memory is chosen if nothing fits without it, or if the user asked for it. Offload to files is chosen
    only if the user asked for it.
    """

    strategy_name = "zero_auto"

    plan: Plan | None = None
    """The plan of the last fit, on rank 0 only."""
    _asked: OffloadConfig | None = None  # the user's setting; config has the last choice

    def _resolve_stage(self, trainer: Any) -> None:
        self._asked = self._asked or self.config.offload
        # Ranks with different stages would deadlock
        stage, offload, line = planned_on_rank_0(
            *(trainer, self.config, self.agreement, partial(self._answer, trainer)),
            asked="strategy='zero_auto'",
            other="strategy='zero1', 'zero2' or 'zero3'",
        )
        moved = self._asked if self._asked.target != "none" else OffloadConfig(target=offload)
        self.config = self.config.with_(stage=stage, offload=moved)
        rank_zero_info(f"zero_auto takes {line}")

    def _answer(self, trainer: Any, memory: float) -> tuple[int, str, str]:
        """Returns stage, offload and the reason."""
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn != TrainerFn.FITTING:
            return self._answer_without_fit(module, memory)
        given = self.config
        if given.shard_size == "auto":  # chosen later, once the stage is known
            given = given.with_(shard_size=None)
        settings = {"device_memory_gib": memory / GIB, "headroom": HEADROOM, "config": given}
        plan = self.plan = Planner.of_run(trainer, module, **settings)(training_batch(trainer))
        assert self._asked is not None
        asked = self._asked.target
        rows = [r for r in plan.rows if r.offload == asked or (asked == "none" and r.offload != "nvme")]
        host = available_host_bytes() / GIB
        name, checkpointing, reason = choose(
            rows,
            plan.usable_bytes,
            host,
            plan.ranks_per_host,
            recomputes=self.config.activation_checkpointing.is_on,
        )
        notes = "".join(f" ({note})" for note in plan.notes)
        if name is not None:
            if checkpointing and not self.config.activation_checkpointing.is_on:
                notes += " Use activation_checkpointing='full', or your module's own: without it no stage fits."
            row = plan.row(name)
            return row.stage, row.offload, reason + notes
        wanted = f" {plan.choice} would fit: use strategy={plan.choice!r}." if plan.choice else ""
        return 3, "none", f"zero3, which stores the least, although {reason}{wanted}{notes}"

    def _answer_without_fit(self, module: nn.Module, memory: float) -> tuple[int, str, str]:
        full = sum(p.numel() * p.element_size() for p in module.parameters())
        usable = memory * (1 - HEADROOM)
        sizes = f"parameters take {full / GIB:.4g} of {usable / GIB:.4g} usable GiB"
        return (1, "none", f"full parameters: {sizes}.") if full <= usable else (3, "none", f"zero3: {sizes}.")
