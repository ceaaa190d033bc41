"""``ZeroStrategy``: Lightning's contract on top of an engine.

The class inherits from :class:`~lightning.pytorch.strategies.DDPStrategy`, so Lightning treats it as DDP (launching,
ranks, reductions, samplers, sync BatchNorm, the compile allow-list). To users it is DDP that stores everything once.
This module overrides only what differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.later import leaving_for_later
from lightning_zero.checkpoint.resume import follow, leave_finished_epoch
from lightning_zero.checkpoint.saving import Saving
from lightning_zero.comm.agree import Agreement, set_run_agreement, shared_agreement
from lightning_zero.config import (
    ActivationCheckpointingConfig,
    AfterFit,
    BuildName,
    CheckpointForm,
    CheckpointingTarget,
    CommBuffers,
    CompileConfig,
    CompileTarget,
    EngineName,
    OffloadConfig,
    OffloadTarget,
    ReduceDtype,
    Stage,
    StartMethod,
    TransportName,
    Uneven,
    ZeroConfig,
)
from lightning_zero.engines.after_run import (
    begin_reads,
    has_left_parameters,
    has_left_states,
    left_shards,
)
from lightning_zero.engines.base import Engine, require_device, undetached_state_dict
from lightning_zero.engines.deepspeed.run import DeepSpeedRun
from lightning_zero.engines.elementwise import note_on_full_steps
from lightning_zero.engines.fsdp2.private import FULLY_SHARD
from lightning_zero.engines.fsdp2.run import Fsdp2Run
from lightning_zero.engines.hooks import UserHooks, user_hooks
from lightning_zero.engines.materialize import materialize_all, on_meta
from lightning_zero.engines.optimizer_step import refuse_sharding
from lightning_zero.engines.precision import REDUCE_DTYPES, DtypePolicy, ZeroMixedPrecision, adapt_precision
from lightning_zero.engines.refusals import refuse_uninitialized
from lightning_zero.engines.run import EngineRun
from lightning_zero.host import (
    MAPPED_FROM_BYTES,
    MAPPED_IN_STEPS_FROM_BYTES,
    available_host_bytes,
    return_freed_memory,
)
from lightning_zero.launch.launcher import SAME_DEVICES, Launched
from lightning_zero.launch.step_sync import sync_steps
from lightning_zero.private.check import check
from lightning_zero.private.lightning import (
    LIGHTNING,
    TORCHMETRICS,
    layer_sync,
    set_device,
    sync_module_states,
    unwrapped,
)
from lightning_zero.private.torch import TORCH, VERSION, convert

_NO_COMPILE = CompileConfig()
_KEEP_ALL = ActivationCheckpointingConfig()


class ZeroStrategy(Launched, DDPStrategy):
    """Trains any LightningModule under ZeRO stage 1, 2 or 3.

    Args:
        stage, ..., rank_logs: The fields of :class:`~lightning_zero.config.ZeroConfig`, which documents each.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As for Lightning's own
            strategies; the Trainer sets them.

    Raises:
        ValueError: If a setting is invalid; names the setting, its value and the repair.
    """

    strategy_name = "zero"

    # The keywords are written out so that editors and LightningCLI can complete and check them. A test keeps them equal
    # to the fields of ZeroConfig.
    def __init__(
        self,
        stage: Stage | None = None,
        engine: EngineName = "fsdp2",
        *,
        offload: OffloadTarget | OffloadConfig | None = None,
        deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        units: Sequence[str] | None = None,
        min_unit_numel: int = 100_000,
        compile: CompileTarget | CompileConfig = _NO_COMPILE,
        activation_checkpointing: CheckpointingTarget | Sequence[str] | ActivationCheckpointingConfig = _KEEP_ALL,
        find_unused_parameters: bool = True,
        shard_size: int | Literal["auto"] | None = None,
        transport: TransportName = "auto",
        reduce_dtype: ReduceDtype | None = None,
        comm_buffers: CommBuffers = "torch",
        elementwise_optimizers: Sequence[str] | None = None,
        broadcast_buffers: bool = True,
        build: BuildName = "auto",
        uneven: Uneven = "error",
        after_fit: AfterFit = "auto",
        checkpoint: CheckpointForm = "file",
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800.0,
        auto: bool = False,
        device_memory_gib: float | None = None,
        start_method: StartMethod = "auto",
        rank_logs: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = locals()
        self.config = config = ZeroConfig(**{f.name: given[f.name] for f in fields(ZeroConfig)})
        # Private names of DeepSpeed and Hydra are checked on first use: both take long to import and may be missing.
        for library in (TORCH, LIGHTNING, TORCHMETRICS, *([FULLY_SHARD] if config.engine == "fsdp2" else [])):
            check(library)
        self.start_method, self.rank_logs = config.start_method, config.rank_logs
        DDPStrategy.__init__(
            self,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=config.process_group_backend,
            timeout=timedelta(seconds=config.timeout_seconds),
        )
        self.engine: Engine | None = None
        """The engine that shards the module; ``None`` outside a run."""
        self._given = config  # each run begins with these settings; a plan may then choose some of them
        self._failed = False  # whether this run raised; then other ranks may be anywhere, so no collectives
        self._undo = ExitStack()
        """Undoes what lasts for one run: the view of the engine, and changes to the Trainer's loops."""
        self._saving = Saving(config.checkpoint)
        self._run: EngineRun = (DeepSpeedRun if config.engine == "deepspeed" else Fsdp2Run)(config)

    @classmethod
    def from_config(cls, config: ZeroConfig) -> ZeroStrategy:
        """Makes a strategy from a validated config."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)})

    # -- decisions that Lightning makes by the strategy's type ----------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = adapt_precision(plugin)

    def _configure_launcher(self) -> None:
        num_devices = len(self.parallel_devices or ())
        knows_its_device = type(self).root_device is not ZeroStrategy.root_device  # Ray: a worker sees only its own
        if self.local_rank >= num_devices and not knows_its_device:
            raise ValueError(
                f"Trainer(devices={num_devices}): this process is local rank {self.local_rank} of a run with more"
                f" devices. {SAME_DEVICES}"
            )
        require_device(self.root_device.type, self.config.engine)
        super()._configure_launcher()

    def _get_process_group_backend(self) -> str:
        device = self.root_device.type
        backend = self.config.process_group_backend or dist.get_default_backend_for_device(device)
        # Agreements and offloaded gradients use the CPUs' backend, so that no step waits for the device.
        return backend if device == "cpu" or ":" in backend else f"cpu:gloo,{device}:{backend}"

    # -- set-up and end ------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        module: Any = self.lightning_module
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        sync_steps(trainer, self, self.config.uneven)
        self._failed = False
        self._resolve(trainer)
        self._run.config = self.config
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and (sync := layer_sync(self)):
            module = sync.apply(module)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        if fitting:
            self.optimizers, self.lr_scheduler_configs = [], []  # of an earlier run, which would stay in memory
        if self._shards:
            self._start_engine(trainer)
        else:
            sync_module_states(module)
        if fitting:  # after sharding, so that optimizers get the parameters that the engine trains
            self._make_optimizers(trainer)
        optimizers = list(self.optimizers) if fitting else []
        self._run.check_optimizers(optimizers)
        if self.engine is not None:
            self.engine.attach(optimizers, trainer)
        self.setup_precision_plugin()
        self._saving.follow(trainer)
        self._map_from(MAPPED_IN_STEPS_FROM_BYTES)
        if self.engine is not None:  # after configure_optimizers, so that states created there are sharded as well
            self._undo.enter_context(self.engine.view())

    def _make_optimizers(self, trainer: Any) -> None:
        with self.engine.view() if self.engine is not None else nullcontext():
            self.setup_optimizers(trainer)
            optimizers = [unwrapped(o) for o in self.optimizers]
            refuse_sharding(optimizers)
            declared = self.config.elementwise_optimizers or ()
            on_full = note_on_full_steps(optimizers, declared) if self.world_size > 1 else ""
        for note in filter(None, (self._run.note_on_optimizers(optimizers), on_full)):
            rank_zero_info(note)

    @property
    def _shards(self) -> bool:
        """Whether this run needs an engine: stages 1 and 2 shard only gradients and optimizer states, so only a fit."""
        assert self.lightning_module is not None
        return self.config.stage == 3 or self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    @property
    def _steps_on_host(self) -> bool:
        """Whether gradients and master weights are in host memory while an accelerator computes."""
        return self.config.offloads_optimizer and self.root_device.type != "cpu"

    def model_to_device(self) -> None:
        assert self.model is not None
        if self._shards:
            refuse_uninitialized(self.model)
        if self._shards and (self.config.engine == "fsdp2" or self.config.stage == 3):
            if self.config.build == "whole" and on_meta(self.model):
                on_host = self._run.loads_on_host(self.root_device)
                materialize_all(self.model, torch.device("cpu") if on_host else self.root_device)
            all_but_parameters_to(self.model, self.root_device)
            return
        if on_meta(self.model):
            materialize_all(self.model, self.root_device)
        super().model_to_device()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        if empty_init:  # materialized in setup, at stage 3 unit by unit
            with torch.device("meta"), self.precision_plugin.tensor_init_context():
                yield
            return
        on_host = self._run.loads_on_host(self.root_device)
        with super().tensor_init_context(empty_init), torch.device("cpu") if on_host else nullcontext():
            yield

    def _resolve(self, trainer: Any) -> None:
        """Lets the plan choose what the settings leave to it, the same on every rank (collective)."""
        module, config = self.lightning_module, self._given
        assert module is not None
        if config.auto or config.shard_size == "auto":
            from lightning_zero.auto import resolve  # imports PyTorch's tracing, which takes long

            config, reasons = resolve(trainer, module, config, self.agreement)
            for reason in reasons:
                rank_zero_info(reason)
        self.config = config

    def _start_engine(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not any(p.requires_grad for p in module.parameters()):
            raise ValueError(
                f"{type(module).__name__} has no trainable parameters, so there is nothing to optimize or shard: build"
                " the layers in __init__ or configure_model, or use validate/test/predict."
            )
        plugin = self.precision_plugin
        # A user's own plugin may have no policy; then dtypes stay as they are.
        dtypes = plugin.dtype_policy() if hasattr(plugin, "dtype_policy") else DtypePolicy()
        if self.config.reduce_dtype is not None:
            dtypes = replace(dtypes, reduce_dtype=REDUCE_DTYPES[self.config.reduce_dtype])
        engine = self._run.make_engine(self.root_device, dtypes)
        self._run.prepare(engine, module, trainer, self.agreement)
        engine.shard(module)
        engine.automatic = module.automatic_optimization
        engine.backward_is_users = is_overridden("backward", module)
        # If one rank has a user hook, all ranks treat it as present: the end of a hook is collective.
        engine.hooks = UserHooks.of_any(self.agreement.gather(user_hooks(trainer, module)))
        engine.keep_gathered = fitting and not engine.hooks.between_micro_batches
        self.engine = engine
        self.model = engine.root
        if hasattr(plugin, "engine"):
            plugin.engine = engine
        self._place_scale()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            # A sharded module that ran under inference mode cannot be trained. Lightning handles this for FSDP only.
            self._undo.callback(setattr, loop, "inference_mode", loop.inference_mode)
            loop.inference_mode = False
        if self.world_size == 1:
            rank_zero_info(f"ZeRO stage {self.config.stage} on one process: nothing is sharded, no memory is saved.")

    def _place_scale(self) -> None:
        """Puts the loss scale where the gradients are, because it divides them."""
        plugin = self.precision_plugin
        if self._steps_on_host and isinstance(plugin, ZeroMixedPrecision):
            plugin.scale_on_host()

    def setup_environment(self) -> None:
        if self._steps_on_host and VERSION >= (2, 13):
            # Otherwise PyTorch rounds pinned blocks up to a power of two. It reads this at the first use of the device.
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "pinned_max_round_threshold_mb:1")
        super().setup_environment()
        if self._steps_on_host and self.world_size > 1 and "cpu:" not in dist.get_backend_config():
            raise ValueError(
                f"offload={self.config.offload.target!r}: an earlier Trainer or your code has opened a process group"
                f" without a CPU backend ({dist.get_backend_config()}), which norms of gradients in host memory need:"
                " give that Trainer DDPStrategy(process_group_backend='cpu:gloo,cuda:nccl')."
            )
        self._map_from(MAPPED_FROM_BYTES)
        agreement = shared_agreement(self.config.timeout_seconds)
        set_run_agreement(agreement)
        self._saving.begin(agreement, self.checkpoint_io)
        begin_reads(agreement)

    def _map_from(self, nbytes: int) -> None:
        if self.root_device.type == "cpu":  # with an accelerator, gathered parameters are not in malloc's heap
            return_freed_memory(nbytes)

    def teardown(self) -> None:
        # Saving ends first: it waits for an asynchronous save, whose error must not be lost.
        set_run_agreement(None)
        try:
            self._saving.end(self._failed)
        finally:
            self._map_from(MAPPED_FROM_BYTES)
            self._end_run()
            self._map_from(MAPPED_IN_STEPS_FROM_BYTES)

    def _end_run(self) -> None:
        self._undo.close()
        engine, module = self.engine, self.lightning_module
        try:
            if engine is not None:
                self._end_engine(engine)
        except BaseException:
            self._failed = True
            raise
        finally:
            self._run.end()
        if engine is None and not (module is not None and on_meta(module)):
            super().teardown()
            return
        # All that Lightning's own teardown does, except moving the module: it is on the meta device or has its place.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _end_engine(self, engine: Engine) -> None:
        engine.end_window(waits=engine.hooks.anywhere and not self._failed)
        full = self._becomes_full(engine)
        engine.failed = self._failed
        engine.restore(full)
        self.engine = None
        if hasattr(self.precision_plugin, "engine"):
            self.precision_plugin.engine = None
        if (module := self.lightning_module) is not None:
            sync = layer_sync(self)
            self.model = sync.revert(module) if sync else module
            if full:
                module.cpu()

    def _becomes_full(self, engine: Engine) -> bool:
        """Decides whether the module is unsharded after the run (collective).

        After an error it is not collective: other ranks may be anywhere, and the error must appear at once.
        """
        if self._failed or self.config.after_fit != "auto":
            return not self._failed and self.config.after_fit == "whole"
        # The agreement has a CPU group of its own; the run's process group may have no CPU backend. The smallest room
        # of all ranks counts, so that all decide alike: to unshard is collective.
        room = int(0.8 * available_host_bytes()) // self.num_processes
        full = engine.total_bytes < min(self.agreement.gather(room, "the end of a run"))
        if not full:
            rank_zero_info(
                "after_fit='auto': the module stays sharded, because its full parameters"
                f" ({engine.total_bytes * self.num_processes / 2**30:.1f} GiB for the processes of one host) do not fit"
                " into host memory."
            )
        return full

    def on_train_start(self) -> None:
        if self.engine is not None:
            self.engine.check_parameters()
        assert self.lightning_module is not None
        self._saving.resume(self.lightning_module.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.engine is not None:  # hooks at the epoch's start may have changed it
            self.engine.check_parameters()

    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        training = module is not None and module.trainer.training
        return follow(dataloader) if training else dataloader

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    # -- Lightning's collectives ----------------------------------------------------------------------------------
    #
    # Each first serves the parameter reads of other ranks. Without that, a rank that still reads parameters in its
    # hook would wait for this rank, and this rank for it.

    def serve_reads(self) -> None:
        """Waits for the other ranks' reads of parameters, before ranks wait for each other (collective)."""
        if self.engine is not None and self.engine.hooks.anywhere:
            self.engine.residency.wait_for_reads()

    def end_reads(self) -> None:
        """Ends the time in which rank 0 alone may have read parameters (collective)."""
        if self.engine is not None:
            self.engine.end_window()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.serve_reads()
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.serve_reads()
        return super().broadcast(obj, src)

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        self.serve_reads()
        if isinstance(tensor, Tensor):  # it may be in host memory, and gloo cannot average
            return super().reduce(tensor.to(self.root_device), group, reduce_op).to(tensor.device)
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self.serve_reads()
        return super().all_gather(tensor, group, sync_grads)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _step(self, name: str, context: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with context:
            if self.engine is None:
                return getattr(self.lightning_module, name)(*args, **kwargs)
            return self.engine.run(name, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", self.precision_plugin.train_step_context(), *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", self.precision_plugin.val_step_context(), *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", self.precision_plugin.test_step_context(), *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", self.precision_plugin.predict_step_context(), *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        if self.engine is None:
            yield
        else:
            with self.engine.no_sync():
                yield

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.engine is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        plugin, module = self.precision_plugin, self.lightning_module
        assert module is not None
        loss = plugin.pre_backward(closure_loss, module)
        # The engine completes the gradients before post_backward lets hooks see them.
        retains_graph = any(args[1:3]) or bool(kwargs.get("retain_graph") or kwargs.get("create_graph"))
        self.engine.backward(lambda: plugin.backward(loss, module, optimizer, *args, **kwargs), retains_graph)
        return plugin.post_backward(loss, module)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def agreement(self) -> Agreement:
        """The channel on which ranks agree on everything outside the engine."""
        return self._saving.agreement

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's full state dict on the CPU, with the module's own names, on every rank (collective).

        Raises:
            RuntimeError: If not all ranks make this call within ``timeout_seconds``.
        """
        engine, module = self.engine, self.lightning_module
        assert module is not None
        if engine is None and not has_left_parameters(module):
            return super().lightning_module_state_dict()
        return self._collected(
            "strategy.lightning_module_state_dict()",
            lambda: left_shards(undetached_state_dict(module)) if engine is None else engine.sharded_state_dict(),
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` with full tensors, as under DDP (collective)."""
        optimizer, engine = unwrapped(optimizer), self.engine
        if engine is None and not has_left_states(optimizer):
            return super().optimizer_state(optimizer)
        return self._collected(
            "strategy.optimizer_state()",
            lambda: (
                left_shards(optimizer.state_dict()) if engine is None else engine.sharded_optimizer_state(optimizer)
            ),
        )

    def _collected(self, call: str, of_shards: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the state ``of_shards`` with full tensors (collective), but as it is for a sharded checkpoint."""
        collecting = self._saving.collecting
        self.serve_reads()
        if collecting is None:
            self.agreement.gather(None, call)
        state = of_shards()
        if collecting not in (None, "file"):
            return state
        full: dict[str, Any] = Engine.full(state, on_rank_0=collecting == "file")
        return full

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with leaving_for_later():
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.engine is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.lightning_module is not None
        leave_finished_epoch(self.lightning_module.trainer.fit_loop)
        states, now = checkpoint["optimizer_states"], [type(unwrapped(o)).__name__ for o in self.optimizers]
        if len(states) != len(now):
            raise ValueError(
                f"the checkpoint has the states of {len(states)} optimizers, but configure_optimizers returned"
                f" {len(now)} ({', '.join(now)}): resume with the optimizers that saved it, or load only the weights."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            self.engine.load_optimizer_state(unwrapped(optimizer), state)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes ``checkpoint`` in the form of ``config.checkpoint`` (collective).

        Raises:
            CheckpointError: On every rank, if it cannot be written; the previous checkpoint stays intact.
        """
        assert self.lightning_module is not None
        path = os.fspath(filepath)
        self._saving.save(checkpoint, path, self.lightning_module.trainer, storage_options)
        self.note_checkpoint(checkpoint, path)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._saving.remove(filepath, self.checkpoint_io)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a file or a sharded directory; its tensors stay on disk until they are used (collective).

        Raises:
            FileNotFoundError: On every rank, if the path does not exist.
            CheckpointError: On every rank, if it is incomplete, damaged or no checkpoint, or if ``weights_only``
                forbids part of its content.
        """
        return self._saving.load(checkpoint_path, weights_only, self.checkpoint_io)


def all_but_parameters_to(module: nn.Module, device: torch.device) -> None:
    """Moves buffers and sets devices like ``module.to(device)``, but leaves parameters where they are: the engine moves
    them unit by unit, because the full module may not fit. Meta tensors stay on meta."""
    for each in module.modules():
        set_device(each, device)
    convert(module, lambda t: t if isinstance(t, nn.Parameter) or t.is_meta else t.to(device))
