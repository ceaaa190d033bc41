"""The parts of a ``deepspeed`` run outside the engine: its config, recomputation, compiling.

:class:`~lightning_zero.engines.run.EngineRun` defines the order in which a run calls these methods.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.agree import Agreement
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.base import Engine
from lightning_zero.engines.deepspeed.ds_config import RunFacts, ds_config
from lightning_zero.engines.forwards import Forwards
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.run import EngineRun
from lightning_zero.engines.units import ROOT, plan_units
from lightning_zero.host import require_deepspeed

if TYPE_CHECKING:
    from lightning_zero.engines.deepspeed.engine import DeepSpeedEngine


class DeepSpeedRun(EngineRun):
    """Implements :class:`~lightning_zero.engines.run.EngineRun` for DeepSpeed."""

    def __init__(self, config: ZeroConfig) -> None:
        require_deepspeed()
        super().__init__(config)
        self._forwards: Forwards | None = None

    def check_optimizers(self, optimizers: Collection[Optimizer]) -> None:
        """Raises ``ValueError`` for DeepSpeed's compiled optimizers."""
        for name in (type(optimizer).__name__ for optimizer in optimizers):
            if name.startswith("DeepSpeedCPU"):
                raise ValueError(
                    f"{name} from configure_optimizers: its kernel cannot step on views of DeepSpeed's flats; return"
                    " PyTorch's AdamW or Adam, which is fused in host memory."
                )

    def loads_on_host(self, device: torch.device) -> bool:
        return device.type != "cpu" and self.config.stage == 3

    def make_engine(self, device: torch.device, dtypes: DtypePolicy) -> Engine:
        from lightning_zero.engines.deepspeed.engine import DeepSpeedEngine  # imported only when a run starts

        return DeepSpeedEngine(self.config, device, dtypes)

    def prepare(self, engine: Engine, module: nn.Module, trainer: Any, agreement: Agreement) -> None:
        """Checks settings and file against the run, and sets up recomputation and compiling (collective).

        Raises:
            ValueError: On every rank, before anything is sharded.
        """
        facts = RunFacts(
            world_size=dist.get_world_size(),
            device_type=engine.device.type,
            numel=sum(p.numel() for p in module.parameters()),
            precision=str(trainer.precision),
            accumulation=trainer.accumulate_grad_batches,
            clip_value=trainer.gradient_clip_val,
            clip_algorithm=str(trainer.gradient_clip_algorithm or "norm"),
        )
        cast("DeepSpeedEngine", engine).settings = ds_config(self.config, facts)
        if (raw := self.config.raw) is not None and raw.unused:
            rank_zero_warn(
                f"{raw.origin}: {', '.join(raw.unused)} has no effect here, because the module and Lightning control"
                " batches, steps, optimizers and logs."
            )
        self._change_calls(module, engine.device)

    def _change_calls(self, module: nn.Module, device: torch.device) -> None:
        """Makes units recompute and compiles them, as the settings say. DeepSpeed has no units, so those that
        ``fully_shard`` would use are taken."""
        recomputes, compiles = self.config.activation_checkpointing, self.config.compile
        if recomputes.target == compiles.target == "none":
            return
        plan = plan_units(module, self.config.units, self.config.min_unit_numel)
        units = [unit.module for unit in plan.units if unit.name != ROOT]
        self._forwards = Forwards(recomputes, compiles, module, units, device)
        self._forwards.begin()

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        if self._forwards is not None:
            self._forwards.undo()
            self._forwards = None
