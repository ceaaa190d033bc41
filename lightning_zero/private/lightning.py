"""Private parts of Lightning (and ``_device`` of its torchmetrics). Read in Lightning 2.6.0-2.6.6.

None of them has a public name: Lightning's strategies, loops and launchers are meant to be subclassed, and what they
do between two of their public methods is private.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torchmetrics import Metric

from lightning_zero.private.check import Library, Needed, importing

TESTED = ">=2.6,<2.7"
_LOOPS = "lightning.pytorch.loops"
_LAUNCHERS = "lightning.pytorch.strategies.launchers"
_STRATEGIES = "lightning.pytorch.strategies"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
LIGHTNING = Library(
    "lightning",
    TESTED,
    (
        # loops
        Needed(f"{_LOOPS}.loop:_Loop.restarting.fset", takes="self, restarting"),
        Needed(f"{_LOOPS}.fit_loop:_FitLoop.__init__", stores="_data_source _combined_loader _data_fetcher"),
        Needed(f"{_LOOPS}.fit_loop:_FitLoop.setup_data", stores="_data_source _combined_loader"),
        Needed(f"{_CONNECTORS}.data_connector:_DataLoaderSource.__init__", takes="self, instance, name"),
        Needed(f"{_CONNECTORS}.data_connector:_DataLoaderSource.dataloader", takes="self"),
        Needed(f"{_CONNECTORS}.data_connector:_request_dataloader", takes="data_source", stores="dataloader"),
        Needed(f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor", takes="self"),
        Needed(f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop.advance", takes="self, data_fetcher"),
        Needed(f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop.reset", takes="self"),
        Needed(f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop.run", stores="reset"),
        # the trainer's connectors
        Needed(f"{_CONNECTORS}.signal_connector:_HandlersCompose.__init__", stores="signal_handlers"),
        Needed(f"{_CONNECTORS}.signal_connector:_SignalConnector._sigterm_notifier_fn", takes="self, signum, _"),
        Needed(f"{_CONNECTORS}.signal_connector:_SignalConnector._slurm_sigusr_handler_fn", takes="self, signum, _"),
        Needed(f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector.dump_checkpoint", takes="self, weights_only"),
        Needed("lightning.pytorch:Trainer.__init__", stores="_checkpoint_connector _signal_connector"),
        Needed("lightning.pytorch:Trainer.save_checkpoint", stores="_checkpoint_connector dump_checkpoint"),
        # launching
        Needed(f"{_LAUNCHERS}.launcher:_Launcher"),
        Needed(
            f"{_LAUNCHERS}.subprocess_script:_SubprocessScriptLauncher.__init__",
            takes="self, cluster_environment, num_processes, num_nodes",
        ),
        Needed(f"{_LAUNCHERS}.multiprocessing:_MultiProcessingLauncher.__init__", takes="self, strategy, start_method"),
        Needed(
            f"{_LAUNCHERS}.multiprocessing:_MultiProcessingLauncher._wrapping_function",
            takes="self, process_idx, trainer, function, args, kwargs, return_queue, global_states",
            stores="_collect_rank_zero_results put",
        ),
        Needed(
            f"{_LAUNCHERS}.multiprocessing:_MultiProcessingLauncher._recover_results_in_main_process",
            takes="self, worker_output, trainer",
        ),
        Needed(
            f"{_LAUNCHERS}.multiprocessing:_MultiProcessingLauncher._collect_rank_zero_results",
            takes="self, trainer, results",
            stores="tempfile mkdtemp",
        ),
        Needed(f"{_LAUNCHERS}.multiprocessing:_GlobalStateSnapshot.capture", takes=""),
        Needed("lightning.fabric.utilities.distributed:_set_num_threads_if_needed", takes="num_processes"),
        Needed("lightning.fabric.plugins.environments:LightningEnvironment.__init__", stores="_main_port"),
        Needed("lightning.fabric.plugins.environments:LightningEnvironment.main_port.fget", stores="_main_port"),
        # strategies
        Needed(f"{_STRATEGIES}:Strategy.__init__", stores="_checkpoint_io _launcher _precision_plugin"),
        Needed(f"{_STRATEGIES}:Strategy.launcher.fget", stores="_launcher"),
        Needed(f"{_STRATEGIES}:Strategy._reset_optimizers_and_schedulers", takes="self"),
        Needed(f"{_STRATEGIES}:ParallelStrategy.__init__", stores="_layer_sync"),
        Needed(f"{_STRATEGIES}:DDPStrategy.__init__", stores="_timeout _start_method _ddp_comm_hook"),
        Needed(f"{_STRATEGIES}:DDPStrategy._configure_launcher", takes="self"),
        Needed(f"{_STRATEGIES}:DDPStrategy._get_process_group_backend", takes="self"),
        Needed("lightning.pytorch.overrides.distributed:_sync_module_states", takes="module"),
        # modules, optimizers, precision
        Needed("lightning.pytorch.plugins.precision:Precision._after_closure", takes="self, model, optimizer"),
        Needed("lightning.pytorch.core.optimizer:_MockOptimizer"),
        Needed("lightning.pytorch:LightningModule.__init__", stores="_trainer"),
        Needed("lightning.fabric.utilities.device_dtype_mixin:_DeviceDtypeModuleMixin.__init__", stores="_device"),
        Needed("lightning.fabric.utilities.device_dtype_mixin:_DeviceDtypeModuleMixin.device.fget", stores="_device"),
    ),
)
TUNERS_FILES = (".lr_find_", ".scale_batch_size_")
"""Begins of the names under which Lightning's tuners save what they go back to after their trial steps. There is no
other sign of it; ``tests/unit/test_private.py`` looks them up in its sources."""
TORCHMETRICS = Library(
    "torchmetrics",
    ">=1.4,<1.10",
    (
        Needed("torchmetrics:Metric.__init__", stores="_device"),
        Needed("torchmetrics:Metric.device.fget", stores="_device"),
    ),
)

with importing(LIGHTNING):
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
    from lightning.pytorch.core.optimizer import _MockOptimizer as MockOptimizer  # for configure_optimizers -> None
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.overrides.distributed import _sync_module_states as sync_module_states  # as DDP begins
    from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
    from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot as GlobalStateSnapshot
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
    from lightning.pytorch.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,  # Lightning tells it from others by this class
    )
    from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose as HandlersCompose

__all__ = [
    "LIGHTNING",
    "TORCHMETRICS",
    "TUNERS_FILES",
    "Collector",
    "GlobalStateSnapshot",
    "HandlersCompose",
    "Launcher",
    "MockOptimizer",
    "SubprocessScriptLauncher",
    "after_closure",
    "answer_signals_by",
    "backend_of",
    "change_training_loader",
    "checkpoint_connector",
    "choose_port_again",
    "combined_loader",
    "comm_hook",
    "data_fetcher",
    "forget_optimizers",
    "given_checkpoint_io",
    "layer_sync",
    "pretend_device",
    "set_device",
    "set_launcher",
    "set_num_threads_if_needed",
    "set_restarting",
    "start_method",
    "sync_module_states",
    "timeout_of",
    "trainer_of",
    "training_source",
    "unwrapped",
    "without_sigterm_broadcast",
    "without_warning_on_reset",
]  # fmt: skip


# -- loops -----------------------------------------------------------------------------------------------------------


def set_restarting(fit_loop: Any, value: bool) -> None:
    """Past ``_FitLoop``'s own setter, which takes every resumed run with ``max_steps`` for one in mid-epoch."""
    _Loop.restarting.fset(fit_loop, value)  # type: ignore[attr-defined]


def combined_loader(trainer: Any) -> Any:
    """The training loaders with their limits and cycles, ``None`` before the loop's set-up;
    ``trainer.train_dataloader`` is the user's own nesting of them."""
    return trainer.fit_loop._combined_loader


def data_fetcher(trainer: Any) -> Any:
    """The fetcher that reads ahead of the training loop; ``None`` before its set-up."""
    return trainer.fit_loop._data_fetcher


def training_source(trainer: Any) -> Any:
    """Source of the training loader: a LightningModule, a DataModule, or the loader itself. Lightning shows
    it when the loop has set it up, after the strategy."""
    return trainer.fit_loop._data_source.instance


def change_training_loader(trainer: Any, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Lets the training loop take ``change`` of what the user gives it; call what is returned to undo it."""
    source = trainer.fit_loop._data_source
    given = source.dataloader
    source.dataloader = lambda: change(given())

    def undo() -> None:
        vars(source).pop("dataloader", None)

    return undo


def without_sigterm_broadcast(loop: Any) -> Callable[[], None]:
    """Leaves out the broadcast before each batch, which waits for the device; call what is returned to undo it."""
    loop._broadcast_sigterm_tensor = lambda: None

    def undo() -> None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)

    return undo


def without_warning_on_reset(loop: Any, message: str) -> Callable[[], None]:
    """Leaves out warnings that begin with ``message`` when the epoch loop is reset next, and no others at any other
    time; call what is returned to undo it before."""

    def undo() -> None:
        vars(loop).pop("reset", None)

    def reset() -> None:
        undo()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=re.escape(message))
            loop.reset()

    loop.reset = reset
    return undo


def checkpoint_connector(trainer: Any) -> Any:
    """Has ``dump_checkpoint``, with which Lightning collects a checkpoint; it tells a strategy nothing of it."""
    return trainer._checkpoint_connector


# -- launching -------------------------------------------------------------------------------------------------------


class Collector(_MultiProcessingLauncher):
    """Lightning's way of bringing results back from processes, without the empty folder that it leaves behind."""

    def __init__(self, strategy: Any, start_method: Any, folder: str) -> None:
        super().__init__(strategy, start_method)
        self.folder = folder

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        tempfile.tempdir = self.folder  # of a rank that has nothing else to do
        # a whole state_dict is collective for shards: all ranks come here
        return super()._collect_rank_zero_results(trainer, results)

    def run_rank(self, index: int, trainer: Any, function: Any, args: Any, kwargs: Any, state: Any) -> Any:
        """Calls ``function`` in rank ``index``; what rank 0 sends back, ``None`` from others."""
        box: Any = SimpleQueue()
        self._wrapping_function(index, trainer, function, args, kwargs, box, state)
        return None if box.empty() else box.get()

    def recover(self, output: Any, trainer: Any) -> None:
        """Gives what rank 0 has sent back to the trainer of this process."""
        self._recover_results_in_main_process(output, trainer)


def choose_port_again(environment: Any) -> None:
    """Lightning's own environment remembers the free port that it has found; others are told theirs."""
    if isinstance(environment, LightningEnvironment):
        set_main_port(environment, -1)


def set_main_port(environment: LightningEnvironment, port: int) -> None:
    """The port of the store, which has no setter; -1: it finds a free one when it is asked."""
    environment._main_port = port


def answer_signals_by(trainer: Any, handler: Callable[[int, Any], None]) -> None:
    """Lightning's own answers to SIGTERM, and to SLURM's signal before the time limit, are collectives inside the
    handler, and come before training begins."""
    trainer._signal_connector._sigterm_notifier_fn = handler
    trainer._signal_connector._slurm_sigusr_handler_fn = handler


# -- strategies ------------------------------------------------------------------------------------------------------
# ZeroStrategy and Launched override _configure_launcher and _get_process_group_backend, which Lightning calls.


def set_launcher(strategy: Any, launcher: Any) -> None:
    """Sets ``strategy.launcher``, which has no setter."""
    strategy._launcher = launcher


def timeout_of(strategy: DDPStrategy) -> timedelta | None:
    """Of the process group, as it was given to the strategy."""
    return strategy._timeout


def backend_of(strategy: Any) -> str:
    """The backend that the strategy has been given, or the one for its device."""
    return str(strategy._get_process_group_backend())


def start_method(strategy: DDPStrategy) -> str:
    """``"popen"``, or what processes are forked or spawned with."""
    return strategy._start_method


def comm_hook(strategy: Any) -> Any:
    """The communication hook that DDP was given; other strategies that wrap into DDP know none."""
    return strategy._ddp_comm_hook if isinstance(strategy, DDPStrategy) else None


def layer_sync(strategy: Any) -> Any:
    """Turns BatchNorm into its synchronized kind and back; ``None`` without ``sync_batchnorm``."""
    return strategy._layer_sync


def forget_optimizers(strategy: Any) -> None:
    """Drops the optimizers of an earlier run, as DDP does before it makes others; they would be kept beside them."""
    strategy._reset_optimizers_and_schedulers()


def given_checkpoint_io(strategy: Any) -> Any:
    """As it was given: the public property puts one there if there is none."""
    return strategy._checkpoint_io


# -- modules, optimizers, precision ----------------------------------------------------------------------------------


def after_closure(precision: Any, model: Any, optimizer: Any) -> None:
    """The hooks and the clipping that come between a closure and the step."""
    precision._after_closure(model, optimizer)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer in what ``self.optimizers()`` returns."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def trainer_of(module: nn.Module) -> Any:
    """As it is kept, ``None`` before a run, when the public property raises."""
    return module._trainer if isinstance(module, LightningModule) else None


def set_device(module: nn.Module, device: torch.device) -> None:
    """Sets ``module.device``, on which steps are computed. The property has no setter, ``to`` moves tensors."""
    if isinstance(module, _DeviceDtypeModuleMixin):
        module._device = device


def pretend_device(module: nn.Module, device: torch.device) -> None:
    """The same of metrics, too, whose ``to`` moves their states."""
    if isinstance(module, (_DeviceDtypeModuleMixin, Metric)):
        module._device = device
