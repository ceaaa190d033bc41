"""The parts of a run beside the engine ``fsdp2``: next to nothing."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.optim import Optimizer

from lightning_zero.engines.base import Engine
from lightning_zero.engines.optimizer_step import fusible_groups
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.run import EngineRun


class Fsdp2Run(EngineRun):
    """See :class:`~lightning_zero.engines.run.EngineRun`."""

    def loads_on_host(self, device: torch.device) -> bool:
        return self.config.offload.target != "none" and device.type != "cpu"

    def make_engine(self, device: torch.device, dtypes: DtypePolicy) -> Engine:
        from lightning_zero.engines.fsdp2.engine import Fsdp2Engine  # imported with the first run, not with the package

        return Fsdp2Engine(self.config, device, dtypes)

    def note_on_optimizers(self, optimizers: Collection[Optimizer]) -> str:
        names = sorted({type(o).__name__ for o in optimizers if fusible_groups(o)})
        if self.config.offload.target == "none" or not names:
            return ""
        return (
            f"offload='cpu': {', '.join(names)} steps in host memory with PyTorch's fused kernel, as neither fused"
            " nor foreach was chosen."
        )
