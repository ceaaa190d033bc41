"""The parts of a run besides its engine: methods added to the module for the run, the folder for files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from lightning_zero.comm.agree import Agreement
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.after_run import Sharded, make_whole
from lightning_zero.engines.base import Engine
from lightning_zero.engines.precision import DtypePolicy


class Place(NamedTuple):
    """This rank's place, as its launcher says: srun and mpirun set none of torchrun's variables."""

    local_rank: int
    """Number among the ranks of its host."""
    local_size: int
    """Ranks of a host."""


class Built(Sharded, Protocol):
    """A module that ``configure_model`` has built sharded."""

    def begin_view(self) -> None:
        """From here to :meth:`end_view` it looks whole."""

    def end_view(self) -> None:
        """See :meth:`begin_view`."""


class EngineRun(ABC):
    """One strategy's runs with an engine; the methods stand in the order of a run. Unless an engine says otherwise
    there is nothing beside it."""

    builds_sharded = False
    """Whether ``configure_model`` makes shards, inside :meth:`building`."""

    def __init__(self, config: ZeroConfig) -> None:
        self.config = config
        """Of the run that comes: ``zero_auto`` picks stage and offload when it is set up."""
        self.built: Built | None = None
        """By ``configure_model``, until the engine has taken it over."""

    def load(self) -> None:  # noqa: B027
        """Imports what :meth:`make_engine` needs, where ranks are about to be forked."""

    def connect(self, module: Any) -> None:  # noqa: B027
        """Before Lightning looks for the module's hooks."""

    def take_over(self, module: Any) -> None:
        """Before anybody looks at ``module``, which an earlier run has left sharded: it is whole now, or becomes so
        where it is touched (collective)."""
        make_whole(module)

    def building(
        self, module: Any, trainer_facts: Mapping[str, Any], device: torch.device
    ) -> AbstractContextManager[None]:
        """Around ``configure_model`` (collective)."""
        return nullcontext()

    def begin_view(self) -> None:
        """From here to :meth:`end_view` the module looks whole, though it may have been built sharded."""
        if self.built is not None:
            self.built.begin_view()

    def end_view(self) -> None:
        """See :meth:`begin_view`."""
        if self.built is not None:
            self.built.end_view()

    def loads_on_host(self, device: torch.device) -> bool:
        """Whether ``configure_model`` builds the module in host memory, from which the engine takes it unit by unit."""
        return False

    @abstractmethod
    def make_engine(self, device: torch.device, dtypes: DtypePolicy) -> Engine:
        """The engine, which holds nothing yet."""

    def prepare(  # noqa: B027
        self,
        engine: Engine,
        module: Any,
        trainer_facts: Mapping[str, Any],
        default_root_dir: str,
        agreement: Agreement,
        place: Place,
    ) -> None:
        """Checks settings against the run and opens the engine's resources, before anything is sharded (collective).

        Raises:
            ValueError: On every rank.
        """

    def whole_for_optimizers(self, engine: Engine) -> AbstractContextManager[Any]:
        """Around ``configure_optimizers``, which looks at whole parameters."""
        return engine.view()

    def note_on_optimizers(self, optimizers: Collection[Optimizer]) -> str:
        """A sentence for the user on how ``optimizers`` step, or nothing."""
        return ""

    def check_optimizers(self, optimizers: Collection[Optimizer]) -> None:  # noqa: B027
        """Raises ``ValueError`` for ones that contradict the settings."""

    def check_batches(  # noqa: B027
        self, module: Any, trainer_facts: Mapping[str, Any], device: torch.device, loaders: Any
    ) -> None:
        """Raises ``ValueError`` for batches that contradict the settings."""

    def take_built(self) -> Sharded | None:
        """The shards that ``configure_model`` has made and no engine has taken over; they are the caller's now."""
        return None

    def end(self) -> None:  # noqa: B027
        """Takes back everything lent to the module."""
