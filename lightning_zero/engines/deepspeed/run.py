"""The parts of a ``deepspeed`` run outside the engine: a file's optimizer, recomputation, compiling.

:class:`~lightning_zero.engines.run.EngineRun` defines the order in which a run calls these methods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.agree import Agreement
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.base import Engine
from lightning_zero.engines.compiled import CompiledUnits
from lightning_zero.engines.deepspeed.ds_config import RunFacts, batches, ds_config, inert_settings
from lightning_zero.engines.deepspeed.file_optimizer import make_optimizer, make_scheduler
from lightning_zero.engines.deepspeed.known_keys import check_keys
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.recompute import Recomputed
from lightning_zero.engines.run import EngineRun, Place
from lightning_zero.engines.units import ROOT, plan_units
from lightning_zero.host import require_deepspeed
from lightning_zero.private.torch import pytree

if TYPE_CHECKING:
    from lightning_zero.engines.deepspeed.engine import DeepSpeedEngine

_HOOK = "configure_optimizers"


class DeepSpeedRun(EngineRun):
    """Implements :class:`~lightning_zero.engines.run.EngineRun` for DeepSpeed."""

    def __init__(self, config: ZeroConfig) -> None:
        require_deepspeed()
        if config.raw is not None:
            check_keys(config.raw)
        super().__init__(config)
        self._supplied: LightningModule | None = None
        self._recomputed: Recomputed | None = None
        self._compiled: CompiledUnits | None = None

    # -- the file's optimizer ------------------------------------------------------------------------------------

    def connect(self, module: LightningModule) -> None:
        """Gives ``module`` a ``configure_optimizers`` for the run, if it has none and the file has an optimizer."""
        self._take_back()
        raw = self.config.raw
        if raw is None or not raw.section("optimizer") or is_overridden(_HOOK, module):
            return

        def configure_optimizers() -> Any:
            optimizer = make_optimizer(raw, module.parameters())
            schedule = make_scheduler(raw, optimizer)
            if schedule is None:
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        # Set on the object, where Lightning looks it up; removed when the run ends.
        setattr(module, _HOOK, configure_optimizers)
        self._supplied = module

    def _take_back(self) -> None:
        if self._supplied is not None:
            self._supplied.__dict__.pop(_HOOK, None)
            self._supplied = None

    def check_optimizers(self, optimizers: Collection[Optimizer]) -> None:
        """Raises ``ValueError`` for DeepSpeed's compiled optimizers."""
        for name in (type(optimizer).__name__ for optimizer in optimizers):
            if name.startswith("DeepSpeedCPU"):
                raise ValueError(
                    f"{name} from configure_optimizers: its kernel cannot step on views of DeepSpeed's flats; return"
                    " PyTorch's AdamW or Adam, which is fused in host memory."
                )

    # -- before the engine starts --------------------------------------------------------------------------------

    def loads_on_host(self, device: torch.device) -> bool:
        return device.type != "cpu" and self.config.stage == 3

    def make_engine(self, device: torch.device, dtypes: DtypePolicy) -> Engine:
        from lightning_zero.engines.deepspeed.engine import DeepSpeedEngine  # imported only when a run starts

        return DeepSpeedEngine(self.config, device, dtypes)

    def prepare(
        self,
        engine: Engine,
        module: nn.Module,
        trainer_facts: Mapping[str, Any],
        default_root_dir: str,
        agreement: Agreement,
        place: Place,
    ) -> None:
        """Checks settings and file against the run, and sets up recomputation and compilation (collective).

        Raises:
            ValueError: On every rank, before anything is sharded.
        """
        cast("DeepSpeedEngine", engine).settings = ds_config(
            self.config, self.facts(module, trainer_facts, engine.device.type)
        )
        self._warn_of_the_file()
        self._change_calls(module, engine.device)

    def _change_calls(self, module: nn.Module, device: torch.device) -> None:
        """Makes units recompute and compiles them, as the settings say. DeepSpeed has no units, so those that
        ``fully_shard`` would use are taken."""
        recomputes, compiles = self.config.activation_checkpointing, self.config.compile
        if recomputes.target == compiles.target == "none":
            return
        plan = plan_units(module, self.config.units, self.config.min_unit_numel)
        units = {unit.name: unit.module for unit in plan.units if unit.name != ROOT}
        self._recomputed = Recomputed(recomputes, module, [*units.values()], device)
        if compiles.target == "units":
            self._compiled = CompiledUnits(compiles, units.items(), self._recomputed)
        self._recomputed.begin(but=self._compiled.modules if self._compiled is not None else ())

    def _warn_of_the_file(self) -> None:
        if (raw := self.config.raw) is None:
            return
        if inert := inert_settings(raw, own_optimizer=self._supplied is None):
            rank_zero_warn(
                f"{raw.origin}: {', '.join(inert)} has no effect here, because the module and Lightning control"
                " batches, steps, optimizers and logs."
            )

    def facts(self, module: nn.Module, trainer_facts: Mapping[str, Any], device_type: str) -> RunFacts:
        """Makes the :class:`RunFacts`. ``trainer_facts`` are the Trainer's settings under the same names."""
        return RunFacts(
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            device_type=device_type,
            numel=sum(p.numel() for p in module.parameters()),
            **trainer_facts,
        )

    def check_batches(
        self, module: nn.Module, trainer_facts: Mapping[str, Any], device: torch.device, loaders: Any
    ) -> None:
        """Raises ``ValueError`` if a dataloader's batch size differs from the file's."""
        if self.config.raw is None:
            return
        facts = self.facts(module, trainer_facts, device.type)
        for loader in pytree.tree_leaves(loaders):
            sampler = getattr(loader, "batch_sampler", None)
            size = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
            batches(self.config.raw, facts, size if isinstance(size, int) else None)

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        self._take_back()
        if self._compiled is not None:
            self._compiled.undo()
            self._compiled = None
        if self._recomputed is not None:
            self._recomputed.undo()
            self._recomputed = None
