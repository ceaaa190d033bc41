"""``ZeroStrategy``: Lightning's contract on top of an engine.

It is a :class:`~lightning.pytorch.strategies.DDPStrategy` to Lightning (launching, ranks, reductions, samplers, sync
BatchNorm, the compile allow-list), because to users it is DDP that stores everything once. What differs is below.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_zero.checkpoint import directory, file
from lightning_zero.checkpoint.layout import EXTRA
from lightning_zero.checkpoint.resume import Resume, collect, follow, leave_finished_epoch
from lightning_zero.checkpoint.store import BackgroundSaver, Loaded, is_directory, load, remove, together
from lightning_zero.comm.agree import Agreement
from lightning_zero.config import (
    AfterFit,
    CheckpointForm,
    CompileConfig,
    CompileTarget,
    DeepSpeedConfig,
    EngineName,
    OffloadConfig,
    OffloadTarget,
    Stage,
    StartMethod,
    TransportName,
    ZeroConfig,
)
from lightning_zero.engines.base import Engine, require
from lightning_zero.engines.deepspeed.run import DeepSpeedRun, Place
from lightning_zero.engines.elementwise import is_elementwise, is_known
from lightning_zero.engines.fsdp2.private import FULLY_SHARD
from lightning_zero.engines.optimizer_step import fusible_groups, refuse_sharding, whole_state_bytes
from lightning_zero.engines.precision import DtypePolicy, ZeroMixedPrecision, adapt_precision
from lightning_zero.host import available_host_bytes
from lightning_zero.launch.launcher import Launched
from lightning_zero.launch.step_sync import sync_steps
from lightning_zero.private.check import check
from lightning_zero.private.lightning import (
    LIGHTNING,
    TORCHMETRICS,
    checkpoint_connector,
    forget_optimizers,
    given_checkpoint_io,
    layer_sync,
    set_device,
    sync_module_states,
    unwrapped,
)
from lightning_zero.private.torch import TORCH, DisableTorchFunction

if TYPE_CHECKING:
    from typing_extensions import Self

_NOTHING_SET = DeepSpeedConfig()
_AS_THE_USER_DOES = CompileConfig()
_BETWEEN_MICRO_BATCHES = ("on_after_backward", "on_train_batch_end", "on_train_batch_start", "on_before_zero_grad")
"""Hooks that can look at the module after one micro-batch and before the next."""


_LEFT_SHARDED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Modules that a run left sharded, so that the next one, under any strategy object, makes them whole first."""
_LOST: WeakSet[nn.Module] = WeakSet()
"""Modules whose parameters went with the files of a run that failed."""


class ZeroStrategy(Launched, DDPStrategy):
    """Trains any LightningModule under ZeRO stage 1, 2 or 3.

    Args:
        stage, ..., rank_logs: The fields of :class:`~lightning_zero.config.ZeroConfig`, where each is explained.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As for Lightning's own
            strategies; the Trainer sets them.

    Raises:
        ValueError: For an impossible setting, naming it, its value and the repair.
    """

    strategy_name = "zero"

    # Spelled out, so that editors and LightningCLI complete and check them; a test keeps them equal to ZeroConfig.
    def __init__(
        self,
        stage: Stage | None = None,
        engine: EngineName = "fsdp2",
        *,
        offload: OffloadTarget | OffloadConfig | None = None,
        deepspeed: DeepSpeedConfig = _NOTHING_SET,
        deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        units: Sequence[str] | None = None,
        min_unit_numel: int = 100_000,
        compile: CompileTarget | CompileConfig = _AS_THE_USER_DOES,
        find_unused_parameters: bool = True,
        shard_size: int | None = None,
        transport: TransportName = "auto",
        elementwise_optimizers: Sequence[str] | None = None,
        broadcast_buffers: bool = True,
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
        self._take(
            ZeroConfig(**{f.name: given[f.name] for f in fields(ZeroConfig)}),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @classmethod
    def from_config(cls, config: ZeroConfig, **of_lightning: Any) -> Self:
        """The strategy of a config that is valid already; ``of_lightning`` is ``accelerator``, ..., as above."""
        strategy = cls.__new__(cls)
        strategy._take(config, **of_lightning)
        return strategy

    def _take(self, config: ZeroConfig, **of_lightning: Any) -> None:
        """The one way in: what the constructor, the names, LightningCLI and Hydra end in."""
        check_libraries(config.engine)
        self.config = config
        self.start_method, self.rank_logs = config.start_method, config.rank_logs
        DDPStrategy.__init__(
            self,
            **of_lightning,
            process_group_backend=config.process_group_backend,
            timeout=timedelta(seconds=config.timeout_seconds),
        )
        self.engine: Engine | None = None
        """What shards the module; ``None`` outside a run."""
        self._ended: Engine | None = None  # knows the optimizers' shards after the run
        self._view: AbstractContextManager[Any] | None = None
        self._failed = False
        self._loops: list[tuple[Any, bool]] = []
        self._agreement: Agreement | None = None
        self._shards = False
        self._dump_failed = False
        self._dumping = False  # Lightning collects a checkpoint: only rank 0 needs its values
        self._loaded: Loaded | None = None
        self._background: BackgroundSaver | None = None
        self._deepspeed = DeepSpeedRun(self.config) if self.config.engine == "deepspeed" else None
        if self._deepspeed is not None and self.config.stage == 3:
            # On the object only: Trainer.init_module warns of strategies whose class has it
            self.model_sharded_context = self._build_sharded  # type: ignore[method-assign]
        self._refuse_plugin(of_lightning.get("checkpoint_io"))

    # -- what Lightning asks of a strategy by its type ------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Makes Lightning inject a DistributedSampler and honour ``sync_dist``."""
        return True

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = adapt_precision(plugin)

    def _configure_launcher(self) -> None:
        require("accelerator", self.root_device.type, self.config.engine)
        super()._configure_launcher()

    def _get_process_group_backend(self) -> str:
        # Small agreements are made between hosts' CPUs, so that no step waits for the device.
        default = "gloo" if self.root_device.type == "cpu" else f"cpu:gloo,{super()._get_process_group_backend()}"
        if self.root_device.type == "cuda":
            default = "cpu:gloo,cuda:nccl"
        backend = self.config.process_group_backend or default
        unknown = {part.split(":")[-1] for part in backend.split(",")} - set(dist.Backend.backend_list)
        if unknown:
            raise ValueError(
                f"process_group_backend={backend!r}: torch.distributed knows {', '.join(dist.Backend.backend_list)};"
                f" use one of them, or None for {default!r}."
            )
        if self._steps_on_host and "cpu" not in dist.BackendConfig(dist.Backend(backend)).get_device_backend_map():
            raise ValueError(
                f"process_group_backend={backend!r} with offload={self.config.offload.target!r}: gradients lie in host"
                f" memory, and their norms are joined there; use {default!r}, or None for it."
            )
        return backend

    # -- set-up and end ------------------------------------------------------------------------------------------

    def connect(self, model: Any) -> None:
        super().connect(model)
        if self._deepspeed is not None:
            self._deepspeed.connect(model)

    @contextmanager
    def _build_sharded(self) -> Generator[None, None, None]:
        module = self.lightning_module
        assert module is not None
        assert self._deepspeed is not None
        with self._deepspeed.building(module, trainer_facts(module.trainer), self.root_device):
            yield

    def setup(self, trainer: Any) -> None:
        module: Any = self.lightning_module
        if module in _LOST:
            raise ValueError(
                f"{type(module).__name__} was in a run with offload='nvme' that failed, and its parameters went with"
                " that run's files: build the module anew, and continue from a checkpoint with ckpt_path."
            )
        if self._deepspeed is not None:
            self._deepspeed.end_view()
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._step_sync = sync_steps(trainer, self)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._failed = self._dump_failed = False
        if module in _LEFT_SHARDED:
            _LEFT_SHARDED.pop(module).restore(True, [])
            self.engine = None
        self._resolve_stage(trainer)
        if fitting and (sync := layer_sync(self)):
            module = sync.apply(module)
        self.model = self.precision_plugin.convert_module(module)
        self._shards = fitting or self.config.stage == 3  # nothing to shard without gradients and optimizer states
        self.model_to_device()
        if fitting:
            forget_optimizers(self)
        if self._shards:
            self._start_engine(trainer)
        else:
            sync_module_states(module)
        if fitting:
            with self._whole_for_optimizers():
                self.setup_optimizers(trainer)
            refuse_sharding([unwrapped(o) for o in self.optimizers])
            self._tell_what_is_fused()
            self._tell_what_steps_whole()
        optimizers = list(self.optimizers) if fitting else []
        if self._deepspeed is not None:
            self._deepspeed.check_optimizers(optimizers)
            self._deepspeed.built = None  # the engine has it
        if self.engine is not None:
            self.engine.attach(optimizers, trainer_facts(trainer))
        self.setup_precision_plugin()
        self._follow_dumps(trainer)
        if self.engine is not None:  # after configure_optimizers: states made there are shards, like their parameters
            self._view = self.engine.view()
            self._view.__enter__()

    def _whole_for_optimizers(self) -> AbstractContextManager[Any]:
        """``configure_optimizers`` looks at whole parameters, those that were built sharded included."""
        if self.engine is None or self._deepspeed is None or self._deepspeed.built is None:
            return nullcontext()
        return self.engine.view()

    @property
    def _loads_on_host(self) -> bool:
        """Whether the module stays in host memory until the engine takes it from there, unit by unit."""
        return self.config.engine == "fsdp2" and self.config.offload.target != "none" and self.root_device.type != "cpu"

    @property
    def _steps_on_host(self) -> bool:
        """Whether gradients and master weights lie in host memory, away from the device that computes."""
        return self.config.offloads_optimizer and self.root_device.type != "cpu"

    def model_to_device(self) -> None:
        if self._loads_on_host and self._shards:
            assert self.model is not None
            all_but_tensors_to(self.model, self.root_device)
        else:
            super().model_to_device()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with super().tensor_init_context(empty_init), torch.device("cpu") if self._loads_on_host else nullcontext():
            yield

    def _tell_what_is_fused(self) -> None:
        if self.config.engine != "fsdp2" or self.config.offload.target == "none":
            return
        optimizers = list(self.optimizers)
        names = sorted({type(o).__name__ for o in optimizers if fusible_groups(o)})
        if names:
            rank_zero_info(
                f"offload='cpu': {', '.join(names)} steps in host memory with PyTorch's fused kernel, as neither fused"
                " nor foreach was chosen."
            )

    def _tell_what_steps_whole(self) -> None:
        if self.world_size == 1:
            return
        declared = self.config.elementwise_optimizers or ()
        unknown = [o for o in map(unwrapped, self.optimizers) if not is_known(o) and not is_elementwise(o, declared)]
        names = sorted({type(o).__name__ for o in unknown})
        if names:
            rank_zero_info(
                f"{', '.join(names)} steps on whole parameters, gradients and states, which every rank gathers for the"
                " length of a step: PyTorch's own optimizers alone are known to step alike on shards. Where an"
                " element's update depends on nothing but that element's own history,"
                f" elementwise_optimizers={names} saves that memory."
            )

    def _resolve_stage(self, trainer: Any) -> None:
        """``self.config.stage`` is the one to run afterwards, the same on every rank."""
        if self.config.auto:
            raise ValueError("auto=True needs the planner: use strategy='zero_auto', or stage=1, 2 or 3.")

    def _start_engine(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not any(p.requires_grad for p in module.parameters()):
            raise ValueError(
                f"{type(module).__name__} has no trainable parameter, so there is nothing to optimize or shard: build"
                " the layers in __init__ or configure_model, or use validate/test/predict."
            )
        plugin = self.precision_plugin
        dtypes = plugin.dtype_policy() if hasattr(plugin, "dtype_policy") else DtypePolicy()
        engine = _make_engine(self.config, self.root_device, dtypes)
        if self._deepspeed is not None:
            facts = trainer_facts(trainer), self.root_device.type
            place = Place(self.local_rank, self.node_rank, self.num_processes)
            self._deepspeed.prepare(module, *facts, trainer.default_root_dir, self.agreement, place)
            engine.offload_path, engine.cpu_adam = self._deepspeed.offload_path, self._deepspeed.cpu_adam
        engine.shard(module)
        engine.automatic = module.automatic_optimization
        engine.keep_gathered = not user_looks_between_micro_batches(trainer, module)
        self.engine = engine
        self.model = engine.root
        if hasattr(plugin, "engine"):
            plugin.engine = engine
        self._place_scale()
        self._switch_off_inference_mode(trainer)
        if self.world_size == 1:
            rank_zero_info(f"ZeRO stage {self.config.stage} on one process: nothing is shared out, memory is as usual.")

    def _place_scale(self) -> None:
        """The loss scale lies where the gradients do that it divides."""
        plugin = self.precision_plugin
        if self._steps_on_host and isinstance(plugin, ZeroMixedPrecision):
            plugin.scale_on_host()

    def _switch_off_inference_mode(self, trainer: Any) -> None:
        """A module that ran under inference mode can't be trained afterwards; Lightning knows this of FSDP only."""
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            self._loops.append((loop, loop.inference_mode))
            loop.inference_mode = False

    def setup_environment(self) -> None:
        self._refuse_plugin(given_checkpoint_io(self))  # the Trainer's plugins=[...] come after __init__
        super().setup_environment()
        if self._agreement is not None:
            self._agreement.close()
        # Before set-up: checkpoints are loaded into the module while it is still whole.
        self._agreement = Agreement(self.config.timeout_seconds)

    def teardown(self) -> None:
        try:
            self._end_saving()
        finally:
            self._end_run()

    def _end_run(self) -> None:
        for loop, inference_mode in self._loops:
            loop.inference_mode = inference_mode
        self._loops.clear()
        if self._view is not None:
            self._view.__exit__(None, None, None)
            self._view = None
        if self.engine is None:
            self._leave_built()
            self._end_deepspeed()
            super().teardown()
            return
        # After an error the other ranks may be anywhere: no collective here, and the error is seen at once.
        try:
            self._end_engine(whole=not self._failed and self._whole_after_fit())
        except BaseException:
            self._failed = True
            self._end_deepspeed()
            raise
        module = self.lightning_module
        if module is not None and self.engine is None:
            sync = layer_sync(self)
            self.model = sync.revert(module) if sync else module
            module.cpu()
        self._end_deepspeed()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _leave_built(self) -> None:
        """The run ended before its engine started: the next one makes the module whole first."""
        if self._deepspeed is None or self._deepspeed.built is None:
            return
        built, self._deepspeed.built = self._deepspeed.built, None
        built.end_view()
        if built.found:
            _LEFT_SHARDED[built.module] = built

    def _end_deepspeed(self) -> None:
        if self._deepspeed is None:
            return
        stays = self.engine is not None and not self._failed  # a module that stays sharded has parts of itself in files
        if self._deepspeed.folder is not None and not stays and not self._failed:
            self.agreement.gather(None, "the end of a run with offload='nvme'")  # others may still read
        self._deepspeed.end(keep_files=stays)

    def _end_engine(self, whole: bool) -> None:
        assert self.engine is not None
        assert self.lightning_module is not None
        self.engine.restore(whole, list(self.optimizers))
        if not whole and self._failed and self.config.parameters_in_files:  # which end with a failed run
            _LOST.add(self.lightning_module)
        elif not whole:
            _LEFT_SHARDED[self.lightning_module] = self.engine
        if not whole:
            return
        self._ended, self.engine = self.engine, None
        if hasattr(self.precision_plugin, "engine"):
            self.precision_plugin.engine = None

    def _whole_after_fit(self) -> bool:
        """Whether every process of a host can hold the whole module, and beside it the optimizers' states; all ranks
        answer alike."""
        assert self.engine is not None
        if self.config.after_fit != "auto":
            return self.config.after_fit == "whole"
        # Between CPUs: the run's own process group may have no backend for them
        room = min(self.agreement.gather(int(0.8 * available_host_bytes()), "the end of a run")) // self.num_processes
        module_bytes = self.engine.whole_bytes
        if module_bytes >= room:
            rank_zero_info(
                f"after_fit='auto': the module stays sharded, its whole parameters"
                f" ({module_bytes * self.num_processes / 2**30:.1f} GiB for the processes of one host) do not fit into"
                " host memory."
            )
            return False
        states_bytes = whole_state_bytes([unwrapped(o) for o in self.optimizers])
        self.engine.states_whole_after_fit = module_bytes + states_bytes < room
        if not self.engine.states_whole_after_fit:
            rank_zero_info(
                "after_fit='auto': the optimizers' states stay sharded, as whole ones"
                f" ({states_bytes * self.num_processes / 2**30:.1f} GiB for the processes of one host) do not fit into"
                " host memory beside the module."
            )
        return True

    def on_train_start(self) -> None:
        if self.engine is not None:
            self.engine.check_parameters()
        if self._deepspeed is not None:
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            facts = trainer_facts(trainer), self.root_device.type
            self._deepspeed.check_batches(self.lightning_module, *facts, trainer.train_dataloader)
        if self._loaded is not None:
            assert self.lightning_module is not None
            Resume(self._loaded.content, self.agreement).apply(self.lightning_module.trainer)
            self._forget_loaded()

    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        training = module is not None and module.trainer.training
        return follow(dataloader) if training else dataloader

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        text = str(exception)
        hint = ""
        if "mixed torch.Tensor and DTensor" in text:
            hint = "A sharded parameter met a plain tensor where it was not gathered"
        elif "Inplace update to inference tensor" in text:
            hint = "A view of a sharded parameter is read-only: write to the parameter itself"
        note = f"{hint}. ZeroStrategy(units=[]) gathers the whole module for the length of a step." if hint else ""
        if self._dump_failed and "meta" in text:
            note = (
                "While a checkpoint is collected, rank 0 alone has its tensors' values, others their shapes: read"
                " values under `if self.trainer.is_global_zero`."
            )
        elif "Not enough buffers" in text:  # DeepSpeed's assertion
            given = self.config.offload.buffer_count
            note = (
                "More parameters in files were needed at a time than offload.buffer_count has buffers for: raise it"
                f" (now {given or 'what the largest module needs, or the file says'})."
            )
        if note and hasattr(exception, "add_note"):
            exception.add_note(note)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _step(self, name: str, context: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with context:
            if self.engine is None:
                return getattr(self.lightning_module, name)(*args, **kwargs)
            return self.engine.run(name, *args, **kwargs)

    def _require_same_place(self) -> None:
        """All ranks are about to begin the same step; on an accelerator they hear of it while the forward is queued."""
        if self.root_device.type == "cpu":
            self._step_sync.hear()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._require_same_place()
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
        self.engine.backward(lambda: plugin.backward(loss, module, optimizer, *args, **kwargs))
        return plugin.post_backward(loss, module)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        self._require_same_place()  # an optimizer that evaluates its closure itself gathers before
        return Strategy.optimizer_step(self, optimizer, closure, model, **kwargs)

    # -- state ---------------------------------------------------------------------------------------------------

    def _refuse_plugin(self, checkpoint_io: Any) -> None:
        if self.config.checkpoint != "file" and type(checkpoint_io) not in (type(None), TorchCheckpointIO):
            raise ValueError(
                f"checkpoint={self.config.checkpoint!r} with a CheckpointIO plugin ({type(checkpoint_io).__name__}):"
                " plugins write the one-file form; use checkpoint='file' or no plugin."
            )

    @property
    def agreement(self) -> Agreement:
        """Where the ranks agree on what is no engine's business."""
        assert self._agreement is not None
        return self._agreement

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state on the CPU, in its own names, on every rank (collective).

        Raises:
            RuntimeError: If not all ranks make this call within ``timeout_seconds``.
        """
        if self.engine is None:
            return super().lightning_module_state_dict()
        if not self._dumping:
            self.agreement.meet("strategy.lightning_module_state_dict()")
            return self.engine.full(self.engine.sharded_state_dict())
        state = self.engine.sharded_state_dict()
        return state if self._saves_shards else self.engine.full(state, on_rank_0=True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` with whole tensors, as DDP would have it (collective)."""
        engine = self.engine or self._ended
        optimizer = unwrapped(optimizer)
        if engine is None:
            return super().optimizer_state(optimizer)
        if not self._dumping:
            self.agreement.meet("strategy.optimizer_state()")
        state = engine.sharded_optimizer_state(optimizer)
        if self._dumping and self._saves_shards:
            return state
        return engine.full(state, on_rank_0=self._dumping)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.engine is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.lightning_module is not None
        leave_finished_epoch(self.lightning_module.trainer.fit_loop)
        saved, now = len(checkpoint["optimizer_states"]), [type(unwrapped(o)).__name__ for o in self.optimizers]
        if saved != len(now):
            raise ValueError(
                f"the checkpoint holds the states of {saved} optimizers, configure_optimizers returned {len(now)}"
                f" ({', '.join(now)}): resume with the optimizers that saved it, or load the weights alone."
            )
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.engine.load_optimizer_state(unwrapped(optimizer), state)

    @contextmanager
    def full_parameters(self, module: nn.Module | None = None, modify: bool = False) -> Generator[None, None, None]:
        """``module`` holds whole, plain parameters for a while, on every rank (collective).

        Args:
            module: The LightningModule of this run; any other is refused.
            modify: What rank 0 writes to them becomes everybody's. Without it, writing raises.

        Raises:
            RuntimeError: If not all ranks make this call within ``timeout_seconds``; if parameters were written to
                without ``modify``.
        """
        if module is not None and module is not self.lightning_module:
            raise ValueError(
                f"full_parameters({type(module).__name__}): only the LightningModule of this run is sharded; pass it,"
                " and read its submodules inside."
            )
        if self.engine is None:
            yield
            return
        self.agreement.meet("strategy.full_parameters()")
        with self.engine.full_parameters(modify):
            yield

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def _saves_shards(self) -> bool:
        return self.config.checkpoint != "file"

    def _follow_dumps(self, trainer: Any) -> None:
        """Tells Lightning's own collecting of a checkpoint from a user's call of the methods above."""
        connector = checkpoint_connector(trainer)
        dump = type(connector).dump_checkpoint

        def dump_checkpoint(weights_only: bool | None = None) -> dict[str, Any]:
            self.agreement.meet("trainer.save_checkpoint()")
            self._dumping = True
            try:
                return dump(connector, weights_only)
            except BaseException:
                self._dump_failed = True
                raise
            finally:
                self._dumping = False

        connector.dump_checkpoint = dump_checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes ``checkpoint`` in the form that the config says (collective).

        Raises:
            CheckpointError: On every rank, if it cannot be written; the checkpoint before it is untouched.
        """
        assert self.lightning_module is not None
        path = os.fspath(filepath)
        if self._saves_shards and storage_options is not None:
            raise TypeError(
                "save_checkpoint(storage_options=...) is for CheckpointIO plugins, which"
                f" checkpoint={self.config.checkpoint!r} has none of: use checkpoint='file', or leave it out."
            )
        with DisableTorchFunction():
            if "optimizer_states" in checkpoint:  # not save_weights_only
                checkpoint[EXTRA] = collect(self.lightning_module.trainer, self.agreement)
            if not self._saves_shards:
                together(self.agreement, lambda: self._save_file(checkpoint, path, storage_options))
            elif self.config.checkpoint == "sharded" or self.engine is None:  # nothing trains beside it
                directory.write(checkpoint, path, self.agreement)
            else:
                if self._background is None:
                    self._background = BackgroundSaver(Agreement(self.config.timeout_seconds))
                self._background.save(checkpoint, path)
        self.note_checkpoint(checkpoint, path)

    def _save_file(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        if not self.is_global_zero:
            return
        if storage_options is None and type(self.checkpoint_io) is TorchCheckpointIO:
            file.write(checkpoint, path)
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.is_global_zero:
            return

        def remove_it() -> None:
            try:
                if not remove(os.fspath(filepath)):
                    super(ZeroStrategy, self).remove_checkpoint(filepath)
            except OSError as error:  # on this rank alone, and nothing depends on it
                rank_zero_warn(f"{filepath} could not be deleted: {error}")

        if self._background is not None:
            self._background.then(remove_it)
        else:
            remove_it()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The content of a file or a sharded directory, its tensors left on the disk until they are used (collective).

        Raises:
            FileNotFoundError: On every rank, if there is nothing there.
            CheckpointError: On every rank, if it is incomplete, damaged, foreign, or more than ``weights_only`` admits.
        """
        self._forget_loaded()
        path = os.fspath(checkpoint_path)
        path = self.agreement.gather(path)[0]  # what a rank finds for itself, it may find later than others
        if self._background is not None:
            together(self.agreement, self._background.wait)
        ours = type(_innermost(self.checkpoint_io)) is TorchCheckpointIO  # plugins around it change the writing only
        if ours or together(self.agreement, lambda: is_directory(path)):
            self._loaded = load(path, weights_only, self.agreement)
        else:
            safely, io = weights_only is not False, self.checkpoint_io
            content = together(self.agreement, lambda: io.load_checkpoint(path, weights_only=safely))
            self._loaded = Loaded(content)
        if self._deepspeed is not None:
            self._deepspeed.begin_view()  # its tensors go into a module that may have been built sharded
        return self._loaded.content

    def _forget_loaded(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def _end_saving(self) -> None:
        self._forget_loaded()
        if self._background is not None:
            background, self._background = self._background, None
            try:
                background.close()
            except Exception as error:
                if not self._failed:
                    raise
                rank_zero_warn(f"The last checkpoint could not be completed: {error}")  # beside what ended the run

    def units_table(self) -> str:
        """What is gathered together during the current run: unit, class, tensors, elements, bytes."""
        return self.engine.units_table if self.engine is not None else "no run is in progress"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Names are registered by ``lightning_zero.registry``, not by Lightning's scan of its own strategies."""


def check_libraries(engine: str) -> None:
    """Raises ``MovedError`` if a private part of a library that every run uses is not where it was tested.

    DeepSpeed's and Hydra's are checked when they are first used: they take long to import, or may be missing.
    """
    for library in (TORCH, LIGHTNING, TORCHMETRICS, *([FULLY_SHARD] if engine == "fsdp2" else [])):
        check(library)


def _make_engine(config: ZeroConfig, device: torch.device, dtypes: DtypePolicy) -> Engine:
    if config.engine == "deepspeed":
        from lightning_zero.engines.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(config, device, dtypes)
    from lightning_zero.engines.fsdp2.engine import Fsdp2Engine  # imported with the first run, not with the package

    return Fsdp2Engine(config, device, dtypes)


def all_but_tensors_to(module: nn.Module, device: torch.device) -> None:
    """What ``module.to(device)`` does beside moving parameters and buffers: Lightning's ``self.device`` says where
    steps are computed, and metrics keep their states there."""
    for each in module.modules():
        set_device(each, device)
        if isinstance(each, Metric):
            each.to(device)


def trainer_facts(trainer: Any) -> dict[str, Any]:
    """What the Trainer was told and an engine may have to know."""
    return {
        "precision": str(trainer.precision),
        "accumulation": trainer.accumulate_grad_batches,
        "clip_value": trainer.gradient_clip_val,
        "clip_algorithm": str(trainer.gradient_clip_algorithm or "norm"),
    }


def _innermost(checkpoint_io: Any) -> Any:
    return _innermost(checkpoint_io.checkpoint_io) if hasattr(checkpoint_io, "checkpoint_io") else checkpoint_io


def user_looks_between_micro_batches(trainer: Any, module: nn.Module) -> bool:
    """Whether a hook outside Lightning itself runs after one micro-batch and before the next."""
    if any(is_overridden(hook, module) for hook in _BETWEEN_MICRO_BATCHES):
        return True
    foreign = [c for c in trainer.callbacks if not type(c).__module__.startswith(("lightning.", "lightning_zero."))]
    return any(is_overridden(hook, c, parent=Callback) for c in foreign for hook in _BETWEEN_MICRO_BATCHES)
