"""Private parts of Lightning (and ``_device`` of its torchmetrics), read in Lightning 2.6.0-2.6.6.

None of them has a public name: Lightning's strategies, loops and launchers are meant to be subclassed, and the steps
between two of their public methods are private.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchmetrics import Metric

from lightning_zero.private.check import Library, importing

TESTED = ">=2.6,<2.7"
_LOOPS = "lightning.pytorch.loops"
_LAUNCHERS = "lightning.pytorch.strategies.launchers"
_STRATEGIES = "lightning.pytorch.strategies"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
LIGHTNING = Library(
    "lightning",
    TESTED,
    {
        # loops
        f"{_LOOPS}.loop": "_Loop.restarting.fset",
        f"{_LOOPS}.fit_loop:_FitLoop": "_data_source _combined_loader _data_fetcher",
        f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop": "_broadcast_sigterm_tensor advance reset",
        f"{_CONNECTORS}.data_connector:_DataLoaderSource": "instance dataloader",
        f"{_CONNECTORS}.data_connector:_request_dataloader": "dataloader",
        # the trainer's connectors
        f"{_CONNECTORS}.signal_connector:_SignalConnector": "_sigterm_notifier_fn _slurm_sigusr_handler_fn",
        f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector": "dump_checkpoint weights_only",
        "lightning.pytorch:Trainer": "_checkpoint_connector dump_checkpoint _signal_connector",
        "lightning.pytorch.utilities.exceptions": "_TunerExitException",
        # launching
        f"{_LAUNCHERS}.subprocess_script:_SubprocessScriptLauncher": "cluster_environment num_processes num_nodes",
        f"{_LAUNCHERS}.multiprocessing:_MultiProcessingLauncher": "_already_fit _start_method _strategy procs"
        " _wrapping_function _recover_results_in_main_process tempfile mkdtemp",
        f"{_LAUNCHERS}.multiprocessing:_GlobalStateSnapshot": "capture",
        "lightning.fabric.utilities.distributed": "_set_num_threads_if_needed",
        # strategies
        f"{_STRATEGIES}:Strategy": "_launcher _precision_plugin",
        f"{_STRATEGIES}:ParallelStrategy": "_layer_sync",
        f"{_STRATEGIES}:DDPStrategy": "_timeout _start_method _configure_launcher _get_process_group_backend",
        "lightning.pytorch.overrides.distributed": "_sync_module_states",
        # modules, optimizers, precision
        "lightning.pytorch.plugins.precision:Precision": "_after_closure",
        "lightning.pytorch:LightningModule": "_trainer",
        "lightning.fabric.utilities.device_dtype_mixin:_DeviceDtypeModuleMixin": "_device",
    },
)
TUNERS_FILES = (".lr_find_", ".scale_batch_size_")
"""Prefixes of the files to which Lightning's tuners save the state before their trial steps. Nothing else marks such a
file; ``tests/unit/test_private.py`` compares the prefixes with Lightning's sources."""
TORCHMETRICS = Library("torchmetrics", ">=1.4,<1.10", {"torchmetrics:Metric": "_device"})

with importing(LIGHTNING):
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.overrides.distributed import _sync_module_states as sync_module_states  # as DDP begins
    from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot as GlobalStateSnapshot
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
    from lightning.pytorch.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,  # Lightning recognizes a launcher by this class
    )
    from lightning.pytorch.utilities.exceptions import (
        _TunerExitException as TunerExit,
    )  # ends a tuner's run on all ranks

__all__ = [
    "GlobalStateSnapshot",
    "SubprocessScriptLauncher",
    "TunerExit",
    "set_num_threads_if_needed",
    "sync_module_states",
]
"""Names that Lightning has with an underscore."""


def set_on_instance(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute that hides the one of the class; returns a function that removes it."""
    setattr(owner, name, value)

    def undo() -> None:
        vars(owner).pop(name, None)

    return undo


# -- loops -----------------------------------------------------------------------------------------------------------


def set_restarting(fit_loop: Any, value: bool) -> None:
    """Sets ``fit_loop.restarting`` without ``_FitLoop``'s own setter, which treats every resumed run with ``max_steps``
    as one in mid-epoch."""
    _Loop.restarting.fset(fit_loop, value)  # type: ignore[attr-defined]


def combined_loader(trainer: Any) -> Any:
    """Returns the training loaders with their limits and cycles; ``None`` before the loop's set-up. The public
    ``trainer.train_dataloader`` is only the user's own nesting of them."""
    return trainer.fit_loop._combined_loader


def data_fetcher(trainer: Any) -> Any:
    """Returns the fetcher that reads ahead of the training loop; ``None`` before the loop's set-up."""
    return trainer.fit_loop._data_fetcher


def training_source(trainer: Any) -> Any:
    """Returns the source of the training loader: a LightningModule, a DataModule, or the loader itself. Public names
    give it only after the loop's set-up, which comes after the strategy's."""
    return trainer.fit_loop._data_source.instance


def change_training_loader(trainer: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Lets the training loop use ``change(loader)`` of the user's loader; returns a function that undoes this."""
    source = trainer.fit_loop._data_source
    given = source.dataloader
    return set_on_instance(source, "dataloader", lambda: change(given()))


def without_sigterm_broadcast(loop: Any) -> Callable[[], None]:
    """Skips the broadcast before each batch, which waits for the device; returns a function that undoes this."""
    return set_on_instance(loop, "_broadcast_sigterm_tensor", lambda: None)


def checkpoint_connector(trainer: Any) -> Any:
    """Returns the connector whose ``dump_checkpoint`` collects a checkpoint; Lightning gives a strategy no hook for
    that."""
    return trainer._checkpoint_connector


# -- launching -------------------------------------------------------------------------------------------------------


class MultiProcessingLauncher(_MultiProcessingLauncher):
    """Lightning's launcher, of whose parts the subclass makes a :meth:`launch` of its own."""

    folder = ""
    """For files that are removed after the run."""

    @property
    def strategy(self) -> Any:
        return self._strategy

    @property
    def start_method(self) -> str:
        return self._start_method

    def refuse_second_fit(self, trainer: Any) -> None:
        """Refuses the second fit of a Trainer: it would start from the beginning with the weights of the first."""
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                f"start_method={self._start_method!r}: a second fit with the same Trainer would start from the"
                " beginning with the weights of the first: make a new Trainer and pass fit(ckpt_path=...)."
            )

    def run_rank(self, index: int, trainer: Any, function: Any, args: Any, kwargs: Any, state: Any) -> Any:
        """Calls ``function`` in rank ``index``, and returns what rank 0 sends back; ``None`` on other ranks."""
        box: Any = SimpleQueue()
        tempfile.tempdir = self.folder  # of a rank that has nothing else to do; rank 0 stores the weights there
        self._wrapping_function(index, trainer, function, args, kwargs, box, state)
        return None if box.empty() else box.get()

    def recover(self, output: Any, trainer: Any) -> Any:
        """Passes weights and metrics of rank 0 to ``trainer``, and returns the result of its function."""
        self._recover_results_in_main_process(output, trainer)
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        return output.trainer_results


def answer_signals_by(trainer: Any, handler: Callable[[int, Any], None]) -> None:
    """Replaces Lightning's handlers of SIGTERM and of SLURM's signal before the time limit, which run collectives.

    Lightning registers ``handler`` before training begins, together with a user's own, and restores the earlier ones.
    """
    trainer._signal_connector._sigterm_notifier_fn = handler
    trainer._signal_connector._slurm_sigusr_handler_fn = handler


# -- strategies ------------------------------------------------------------------------------------------------------
# ZeroStrategy and Launched override _configure_launcher and _get_process_group_backend, which Lightning calls.


def set_launcher(strategy: Any, launcher: Any) -> None:
    """Sets ``strategy.launcher``, which has no public setter."""
    strategy._launcher = launcher


def timeout_of(strategy: DDPStrategy) -> timedelta | None:
    """Returns the time-out of the process group, as it was passed to the strategy."""
    return strategy._timeout


def backend_of(strategy: Any) -> str:
    """Returns the backend that was passed to the strategy, or the one for its device."""
    return str(strategy._get_process_group_backend())


def start_method(strategy: DDPStrategy) -> str:
    """Returns how processes are started: ``"popen"``, or a start method of ``multiprocessing``."""
    return strategy._start_method


def layer_sync(strategy: Any) -> Any:
    """Returns the plugin that converts BatchNorm to its synchronized kind and back; ``None`` without
    ``sync_batchnorm``."""
    return strategy._layer_sync


# -- modules, optimizers, precision ----------------------------------------------------------------------------------


def after_closure(precision: Any, model: Any, optimizer: Any) -> None:
    """Runs the hooks and the clipping that come between a closure and the step."""
    precision._after_closure(model, optimizer)


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside a result of ``self.optimizers()``."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def trainer_of(module: nn.Module) -> Any:
    """Returns the module's trainer; ``None`` before a run, when the public property raises."""
    return module._trainer if isinstance(module, LightningModule) else None


def set_device(module: nn.Module, device: torch.device) -> None:
    """Sets ``module.device``, on which steps are computed, or that of a metric. The property has no setter, and ``to``
    moves tensors."""
    if isinstance(module, (_DeviceDtypeModuleMixin, Metric)):
        module._device = device
