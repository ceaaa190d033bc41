"""Parts of a run other than its engine: where modules are built, checks of settings, recomputation, files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.comm.agree import Agreement
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.base import Engine
from lightning_zero.engines.precision import DtypePolicy


class EngineRun(ABC):
    """Runs of one strategy with an engine. The methods are listed in the order of a run; by default they do nothing
    beyond the engine."""

    def __init__(self, config: ZeroConfig) -> None:
        self.config = config
        """Settings of the next run: ``zero_auto`` chooses stage and offload in the set-up."""

    def loads_on_host(self, device: torch.device) -> bool:
        """Whether ``configure_model`` builds the module in host memory, from which the engine takes it unit by unit."""
        return False

    @abstractmethod
    def make_engine(self, device: torch.device, dtypes: DtypePolicy) -> Engine:
        """Creates an engine without a module."""

    def prepare(self, engine: Engine, module: Any, trainer: Any, agreement: Agreement) -> None:  # noqa: B027
        """Checks settings against the run and opens the engine's resources, before anything is sharded (collective).

        Raises:
            ValueError: On every rank, for settings that contradict the run.
        """

    def note_on_optimizers(self, optimizers: Collection[Optimizer]) -> str:
        """Returns a sentence for the user on how ``optimizers`` step, or an empty string."""
        return ""

    def check_optimizers(self, optimizers: Collection[Optimizer]) -> None:  # noqa: B027
        """Raises ``ValueError`` for optimizers that contradict the settings."""

    def end(self) -> None:  # noqa: B027
        """Removes everything that was added to the module for the run."""
