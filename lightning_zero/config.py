"""Every rule about which settings are valid.

Registered names, keyword arguments of :class:`~lightning_zero.strategy.ZeroStrategy` and Hydra groups all become one
:class:`ZeroConfig`; the rest of the package sees nothing else. An invalid value raises a ``ValueError`` here that names
the setting, the value found and the repair.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

Stage = Literal[1, 2, 3]
EngineName = Literal["fsdp2", "deepspeed"]
OffloadTarget = Literal["none", "cpu", "nvme"]
CheckpointForm = Literal["file", "sharded", "sharded-async"]
AfterFit = Literal["auto", "whole", "sharded"]
Uneven = Literal["error", "shortest"]
TransportName = Literal["auto", "direct", "torch"]
StartMethod = Literal["auto", "popen", "spawn", "fork"]
CompileTarget = Literal["none", "units"]
BuildName = Literal["auto", "whole"]

STAGES: tuple[int, ...] = get_args(Stage)
ENGINES: tuple[str, ...] = get_args(EngineName)
OFFLOAD_TARGETS: tuple[str, ...] = get_args(OffloadTarget)
CHECKPOINTS: tuple[str, ...] = get_args(CheckpointForm)
AFTER_FIT: tuple[str, ...] = get_args(AfterFit)
UNEVEN: tuple[str, ...] = get_args(Uneven)
TRANSPORTS: tuple[str, ...] = get_args(TransportName)
START_METHODS: tuple[str, ...] = get_args(StartMethod)
COMPILE_TARGETS: tuple[str, ...] = get_args(CompileTarget)
BUILDS: tuple[str, ...] = get_args(BuildName)

_Section = TypeVar("_Section", "OffloadConfig", "CompileConfig", "ActivationCheckpointingConfig", "DeepSpeedConfig")
_Targeted = TypeVar("_Targeted", "OffloadConfig", "CompileConfig", "ActivationCheckpointingConfig")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Storage of optimizer states, master weights and (stage 3) parameters between uses."""

    target: OffloadTarget | None = "none"
    """``"none"`` (the accelerator), ``"cpu"`` (host memory) or ``"nvme"`` (files, engine ``fsdp2``);
    ``None`` takes the value of ``deepspeed_config``, else ``"none"``. :class:`ZeroConfig` resolves it."""
    optimizer: bool | None = None
    """Whether optimizer states and master weights are offloaded; ``None`` is yes. ``fully_shard`` offloads nothing
    without them."""
    parameters: bool | None = None
    """Whether parameter shards are offloaded; ``None`` follows engine and stage
    (:meth:`ZeroConfig.offloads_parameters`). Only engine ``deepspeed`` at stage 3 lets you choose."""
    path: str | None = None
    """nvme: folder on the fast disk; ``None`` is ``<default_root_dir>/offload``."""
    pin_memory: bool | None = None
    """Use page-locked host memory, without which copies to the accelerator do not overlap with compute; ``None`` is yes
    if there is an accelerator."""
    ratio: float | None = None
    """cpu, engine ``deepspeed``, stage 3: fraction of the optimizer states to offload, in (0, 1]; ``None`` is 1."""

    def __post_init__(self) -> None:
        _one_of("offload.target", self.target, (*OFFLOAD_TARGETS, None))
        for name in ("optimizer", "parameters", "pin_memory"):
            _boolean_or_none(f"offload.{name}", getattr(self, name))
        if self.path is not None and not (isinstance(self.path, str) and self.path):
            raise ValueError(f"offload.path={self.path!r}: use the name of a folder, or None.")
        ratio = self.ratio
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1):
            raise ValueError(f"offload.ratio={ratio!r}: use a fraction above 0 and up to 1, or None.")
        for name in _given(self):
            if name != "target" and self.target == "none":
                raise ValueError(
                    f"offload.{name}={getattr(self, name)!r} with offload.target='none': use 'cpu' or 'nvme'."
                )
        if self.target == "cpu" and self.path is not None:
            raise ValueError(f"offload.path={self.path!r} with offload.target='cpu': it is for 'nvme'.")
        if self.target == "nvme" and self.ratio is not None:
            raise ValueError(f"offload.ratio={ratio!r} with offload.target='nvme': partial offload is for 'cpu'.")
        if self.target != "none" and self.optimizer is False and self.parameters is False:
            raise ValueError("offload.optimizer=False with offload.parameters=False: use offload.target='none'.")


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Arguments of ``torch.compile``, which compiles each shard unit separately."""

    target: CompileTarget = "none"
    """``"units"`` compiles the forward of every shard unit except the root, in place; equal blocks share graphs."""
    backend: str | None = None
    """A name from ``torch.compiler.list_backends()``; ``None`` is torch's default, ``"inductor"``."""
    mode: str | None = None
    """inductor's ``"default"`` or ``"max-autotune-no-cudagraphs"``; ``None`` is its default. Its other modes record
    CUDA graphs, which need each parameter at the same address in every step."""
    dynamic: bool | None = None
    """Whether sizes are symbolic from the first graph on; ``None`` makes a size symbolic after it has changed once."""
    fullgraph: bool = False
    """Treat a unit that needs more than one graph as one that cannot be compiled."""

    def __post_init__(self) -> None:
        _one_of("compile.target", self.target, COMPILE_TARGETS)
        for name in ("backend", "mode"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"compile.{name}={value!r}: use a name, or None.")
        if self.mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"compile.mode={self.mode!r}: its CUDA graphs need each parameter at the same address in every step,"
                " and each gather uses different memory; use 'max-autotune-no-cudagraphs'."
            )
        if self.mode is not None:
            _one_of("compile.mode", self.mode, COMPILE_MODES)
            if self.backend not in (None, "inductor"):
                raise ValueError(
                    f"compile.mode={self.mode!r} with compile.backend={self.backend!r}: only inductor has modes; leave"
                    " one of them unset."
                )
        _boolean_or_none("compile.dynamic", self.dynamic)
        _boolean("compile.fullgraph", self.fullgraph)
        for name in _given(self):
            if name != "target" and self.target == "none":
                raise ValueError(
                    f"compile.{name}={getattr(self, name)!r} with compile.target='none': use compile.target='units'."
                )


CheckpointingTarget = Literal["none", "full", "selective"]
CHECKPOINTING_TARGETS: tuple[str, ...] = get_args(CheckpointingTarget)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """Which modules recompute their activations in the backward instead of keeping them."""

    target: CheckpointingTarget = "none"
    """``"full"`` keeps only a module's inputs. ``"selective"`` also keeps the outputs of every second matrix product
    and of attention, which takes more memory and less time."""
    units: Sequence[str] | None = None
    """The modules, by class name or name pattern (``"blocks.*"``); ``None`` is every shard unit except the root."""
    offload: bool = False
    """Store the kept inputs in host memory until the backward."""

    def __post_init__(self) -> None:
        _one_of("activation_checkpointing.target", self.target, CHECKPOINTING_TARGETS)
        object.__setattr__(self, "units", _as_names("activation_checkpointing.units", self.units))
        if self.units is not None and not self.units:
            raise ValueError("activation_checkpointing.units=[]: name modules, or use activation_checkpointing='none'.")
        _boolean("activation_checkpointing.offload", self.offload)
        for name in _given(self):
            if name != "target" and self.target == "none":
                raise ValueError(
                    f"activation_checkpointing.{name}={getattr(self, name)!r} with"
                    " activation_checkpointing.target='none': use target='full' or 'selective'."
                )

    @property
    def is_on(self) -> bool:
        """Whether any module recomputes its activations."""
        return self.target != "none"

    def __str__(self) -> str:
        """The setting as a user writes it: ``activation_checkpointing='full'``."""
        what = repr(self.target) if self.units is None else repr(list(self.units))
        return f"activation_checkpointing={what}"


COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """Settings that only the engine ``deepspeed`` has. ``None`` takes the value of ``deepspeed_config``, else a default
    chosen for speed. ``_numel`` counts elements of any dtype."""

    overlap_comm: bool | None = None
    """Overlap the reduction of gradients (stage 3: also the gathering of parameters) with compute; ``None`` is yes on
    an accelerator. Needs the memory of a second reduce bucket."""
    reduce_bucket_numel: int | None = None
    """Gradients reduced in one message; ``None`` scales with the module (:func:`.deepspeed_config.bucket_numel`)."""
    allgather_bucket_numel: int | None = None
    """Stages 1 and 2: parameters gathered in one message after a step; ``None`` scales with the module."""
    prefetch_numel: int | None = None
    """Stage 3: parameters gathered ahead of their use; ``None`` scales with the module."""
    persistence_numel: int | None = None
    """Stage 3: parameters smaller than this stay unsharded on every rank; ``None`` scales with the module."""
    max_live_numel: int | None = None
    """Stage 3: most elements of parameters that are unsharded at a time; ``None`` is 1e9."""
    max_reuse_distance_numel: int | None = None
    """Stage 3: a parameter stays unsharded if it is used again within this many elements of other parameters; ``None``
    is 1e9."""
    sub_group_numel: int | None = None
    """Stage 3: elements in one group of master weights; ``None`` is 1e9, and less with ``offload.ratio``, which
    offloads only complete groups."""
    contiguous_gradients: bool | None = None
    """Copy gradients into one buffer as they are produced, to avoid fragmentation; ``None`` is yes."""
    reduce_scatter: bool | None = None
    """Stages 1 and 2: reduce gradients by reduce-scatter instead of all-reduce; ``None`` is yes."""
    round_robin_gradients: bool | None = None
    """Stages 1 and 2: assign parameters to ranks in turn, so that copies to host memory run in parallel; ``None`` is
    no."""
    communication_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The dtype in which gradients are reduced: ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``None`` follows the
    precision."""
    hpz_partition_size: int | None = None
    """Stage 3, ZeRO++: size of the groups of ranks (those of a host) that hold a second sharded copy of the parameters,
    so that the backward gathers inside the host. Must divide the number of ranks; ``None`` is 1, no second copy."""
    quantized_weights: bool | None = None
    """Stage 3, ZeRO++: gather parameters as int8; needs CUDA."""
    quantized_nontrainable_weights: bool | None = None
    """Stage 3: store and gather frozen parameters as int8; needs CUDA."""
    quantized_gradients: bool | None = None
    """Stage 3, ZeRO++: reduce gradients as int4 between hosts; no effect on one host; needs CUDA."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "communication_dtype":
                if value is not None:
                    _one_of("deepspeed.communication_dtype", value, ("fp32", "bf16", "fp16"))
            elif f.name.endswith("_numel") or f.name == "hpz_partition_size":
                _count_or_none(f"deepspeed.{f.name}", value, least=int(f.name not in _MAY_BE_ZERO))
            else:
                _boolean_or_none(f"deepspeed.{f.name}", value)


_MAY_BE_ZERO = ("prefetch_numel", "persistence_numel", "max_live_numel", "max_reuse_distance_numel")
_ONLY_AT: dict[str, tuple[int, ...]] = {
    "allgather_bucket_numel": (1, 2),
    "round_robin_gradients": (1, 2),
    "reduce_scatter": (1, 2),
    "prefetch_numel": (3,),
    "persistence_numel": (3,),
    "max_live_numel": (3,),
    "max_reuse_distance_numel": (3,),
    "sub_group_numel": (3,),
    "hpz_partition_size": (3,),
    "quantized_weights": (3,),
    "quantized_nontrainable_weights": (3,),
    "quantized_gradients": (3,),
}
"""Setting of DeepSpeedConfig -> the stages at which DeepSpeed reads it."""


@dataclass(frozen=True)
class RawConfig:
    """A DeepSpeed config as the user gave it, read once and never changed; :meth:`content` returns copies."""

    text: str
    """The config as JSON."""
    origin: str = field(default="deepspeed_config", compare=False)
    """The file's path, for messages."""

    @classmethod
    def read(cls, given: str | os.PathLike[str] | Mapping[str, Any]) -> RawConfig:
        """Reads a file by its path, or copies a mapping."""
        if isinstance(given, Mapping):
            return cls(json.dumps(_json(given, "deepspeed_config")))
        path = os.fspath(given)
        try:
            with open(path, encoding="utf-8") as lines:
                text = lines.read()
        except OSError as error:
            raise ValueError(f"deepspeed_config={path!r} cannot be read ({error.strerror}): use a JSON file.") from None
        content = _parse(text, path)
        if not isinstance(content, dict):
            raise ValueError(f"deepspeed_config={path!r} holds {type(content).__name__}: use a JSON object.")
        return cls(json.dumps(_json(content, path)), path)

    def content(self) -> dict[str, Any]:
        """A new copy of the complete config."""
        return json.loads(self.text)

    def section(self, name: str) -> dict[str, Any]:
        """The settings of one section; empty if the config lacks it."""
        found = self.content().get(name)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise ValueError(f"{name}={found!r} in {self.origin}: use a section, {{...}}.")
        return found

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that the config sets; ``None`` if it sets none."""
        stage = self.section("zero_optimization").get("stage", "auto")
        if stage == "auto":
            return None
        if isinstance(stage, bool) or stage not in (0, *STAGES):
            raise ValueError(f"zero_optimization.stage={stage!r} in {self.origin}: use 1, 2 or 3.")
        if stage == 0:
            raise ValueError(
                f"zero_optimization.stage=0 in {self.origin} is plain data parallelism: use strategy='ddp', or stage 1,"
                " 2 or 3."
            )
        return stage

    @property
    def offload(self) -> OffloadConfig | None:
        """The config's offload sections as an :class:`OffloadConfig`; ``None`` if it has none."""
        zero = self.section("zero_optimization")
        parts = {}
        for part in ("optimizer", "param"):
            section = zero.get(f"offload_{part}")
            if section is not None:
                _one_of(f"{self.origin}: offload_{part}.device", section.get("device", "none"), OFFLOAD_TARGETS)
                parts[part] = section
        if not parts:
            return None
        devices = {part: section.get("device", "none") for part, section in parts.items()}
        target = max(devices.values(), key=OFFLOAD_TARGETS.index)
        if target == "none":
            return OffloadConfig()
        moved = {part: devices.get(part, "none") != "none" for part in ("optimizer", "param")}
        return OffloadConfig(target=target, optimizer=moved["optimizer"], parameters=moved["param"])


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Stage, engine and all settings of a strategy; immutable and validated.

    Raises:
        ValueError: naming the setting, the value found and the repair.
    """

    # None means unset. __post_init__ replaces it, so readers always find a stage and an OffloadConfig.
    stage: Stage = None  # type: ignore[assignment]
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters. Unset: the value of
    ``deepspeed_config``, else 3."""
    engine: EngineName = "fsdp2"
    """The runtime that does the sharding: ``"fsdp2"`` is ``torch.distributed.fsdp.fully_shard``, ``"deepspeed"`` is
    ``deepspeed.initialize``."""
    offload: OffloadConfig = None  # type: ignore[assignment]
    """A target (``"none"``, ``"cpu"``, ``"nvme"``), an :class:`OffloadConfig` or a mapping of its fields. Unset: the
    value of ``deepspeed_config``, else ``"none"``."""
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    """Settings that only the engine ``deepspeed`` has: a :class:`DeepSpeedConfig` or a mapping of its fields."""
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | None = None
    """A DeepSpeed config for the engine ``deepspeed``: the path of a JSON file, or a mapping. It supplies values that
    are unset here and in the Trainer; two different values are an error. It is read once; use :attr:`raw`
    afterwards."""
    units: Sequence[str] | None = None
    """Modules that become shard units, by class name or name pattern (``"blocks.*"``). The parameters of a unit are
    gathered together. ``None`` takes repeated blocks: classes in ``_no_split_modules`` of Hugging Face models, and
    children of ``ModuleList`` and ``Sequential`` without public methods besides ``forward``. All other parameters are
    the root unit, which is gathered for the whole step. An empty list makes the entire module one unit."""
    min_unit_numel: int = 100_000
    """An automatically chosen unit with fewer elements than this is merged into the unit around it."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """``"units"`` compiles each shard unit with ``torch.compile``; ``"none"`` leaves compilation to you. A
    :class:`CompileConfig` or a mapping of its fields gives more control."""
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    """``"full"`` recomputes each shard unit's activations in the backward. ``"selective"`` keeps those of every second
    matrix product and of attention. A list of class names or name patterns chooses other modules than the units. An
    :class:`ActivationCheckpointingConfig` or a mapping of its fields gives more control."""
    find_unused_parameters: bool = True
    """After each synchronized backward, ranks agree which parameters no rank used, so that their gradients stay
    ``None`` as under DDP, and after each forward that all ran the same units. ``False`` saves these small all-reduces
    and leaves zeros instead of ``None``; at stage 3 CPU processes agree on units all the same."""
    shard_size: int | Literal["auto"] | None = None
    """Number of consecutive ranks that share one copy of the model, for example the GPUs of a host. The groups are
    replicas of each other (HSDP). ``None`` shards over all ranks. ``"auto"`` takes the smallest group of complete hosts
    in which the run fits according to the plan, and prints the reason."""
    keep_global_batch: bool = False
    """When a run resumes on another number of ranks, keep the number of samples per optimizer step by accumulating more
    or fewer micro-batches. Settings in batches (``val_check_interval``, ...) still count the batches of one rank."""
    transport: TransportName = "auto"
    """Transport of shards and gradients with ``fsdp2``. ``"torch"`` uses the collectives and the schedule of
    ``fully_shard``. ``"direct"``, for CPU processes of one host, reads exactly the bytes needed from the other ranks'
    memory, which is faster and stores less. ``"auto"`` is direct where all ranks that share shards can do so (Linux),
    and torch elsewhere."""
    elementwise_optimizers: Sequence[str] | None = None
    """Class names of third-party optimizers, such as ``["Lion"]``, that update each element from that element's values
    and gradients alone. They step on shards, like PyTorch's element-wise optimizers. All others step on full tensors
    and keep full states."""
    broadcast_buffers: bool = True
    """Broadcast rank 0's buffers before each training forward, as DDP does; under manual optimization only before the
    first one, as Lightning's DDP does."""
    build: BuildName = "auto"
    """Materializing a module on the meta device, at stage 3 and with ``fsdp2``: ``"auto"`` one unit after the other,
    each sharded at once, so that no rank holds the full module; ``"whole"`` all of it on every rank before sharding."""
    uneven: Uneven = "error"
    """Behaviour if the ranks' training dataloaders differ in length. ``"error"`` ends the run on all ranks when
    the first dataloader is exhausted. ``"shortest"`` ends each epoch there, like DDP with dataloaders cut to that
    length."""
    hook_budget_bytes: int | None = None
    """Bytes of full parameters, gradients and optimizer states that user hooks may hold gathered at a time. Beyond them
    those that were gathered first are resharded. ``None`` is an eighth of the free memory of the device when a run
    starts, or of this rank's share of the host on CPUs."""
    after_fit: AfterFit = "auto"
    """``"whole"`` gives every rank plain, full parameters and optimizer states when the run ends. ``"sharded"`` leaves
    the shards. ``"auto"`` gives full parameters if host memory allows it, and full states when they are touched."""
    checkpoint: CheckpointForm = "file"
    """``"file"`` writes the one file that Lightning writes under DDP. ``"sharded"`` writes a directory, each rank its
    own shards. ``"sharded-async"`` does so while training continues. This setting does not matter for reading."""
    process_group_backend: str | None = None
    """``torch.distributed`` backend; ``None`` is the device's default (NCCL on CUDA, gloo on CPU)."""
    timeout_seconds: float = 1800.0
    """Seconds that a collective waits for a missing rank before it raises."""
    auto: bool = False
    """Let the plan choose the stage when a run is set up, and ignore ``stage``; this is ``strategy="zero_auto"``."""
    device_memory_gib: float | None = None
    """Memory of one device, for the plan of ``auto``; ``None`` queries the devices."""
    start_method: StartMethod = "auto"
    """Method that starts the other ranks of a machine. ``"popen"`` executes the program again. ``"spawn"`` and
    ``"fork"`` start processes that return their results. ``"auto"`` is popen for programs, fork in notebooks and spawn
    in pytest. No effect under torchrun, srun and mpirun."""
    rank_logs: str | None = None
    """Folder for one log file per rank (``rank1.log``); ``None`` is ``ranks/`` in the folder of a Hydra job, and the
    terminal without Hydra. Only popen uses it."""

    def __post_init__(self) -> None:
        _one_of("engine", self.engine, ENGINES)
        _boolean("auto", self.auto)
        self._resolve_file()
        if isinstance(self.stage, bool) or not isinstance(self.stage, int):
            raise ValueError(f"stage={self.stage!r}: the ZeRO stage is a whole number; use 1, 2 or 3.")
        _one_of("stage", self.stage, STAGES)
        object.__setattr__(self, "deepspeed", _as_deepspeed(self.deepspeed))
        object.__setattr__(self, "compile", _as_compile(self.compile))
        object.__setattr__(self, "activation_checkpointing", _as_checkpointing(self.activation_checkpointing))
        if self.engine == "fsdp2":
            self._check_fsdp2()
        else:
            self._check_deepspeed()
        object.__setattr__(self, "units", _as_names("units", self.units))
        if isinstance(self.min_unit_numel, bool) or not isinstance(self.min_unit_numel, int) or self.min_unit_numel < 0:
            raise ValueError(f"min_unit_numel={self.min_unit_numel!r}: use a number of elements, 0 or more.")
        size = self.shard_size
        if size not in (None, "auto") and (isinstance(size, bool) or not isinstance(size, int) or size < 2):
            raise ValueError(f"shard_size={size!r}: use a number of ranks, 2 or more, 'auto', or None for all of them.")
        declared = _as_names("elementwise_optimizers", self.elementwise_optimizers, "class names")
        object.__setattr__(self, "elementwise_optimizers", declared or ())
        _boolean("find_unused_parameters", self.find_unused_parameters)
        _boolean("keep_global_batch", self.keep_global_batch)
        _one_of("transport", self.transport, TRANSPORTS)
        _boolean("broadcast_buffers", self.broadcast_buffers)
        _one_of("build", self.build, BUILDS)
        _one_of("uneven", self.uneven, UNEVEN)
        _count_or_none("hook_budget_bytes", self.hook_budget_bytes, least=0)
        _one_of("after_fit", self.after_fit, AFTER_FIT)
        _one_of("checkpoint", self.checkpoint, CHECKPOINTS)
        if self.process_group_backend is not None and not isinstance(self.process_group_backend, str):
            raise ValueError(
                f"process_group_backend={self.process_group_backend!r}: use a name such as 'gloo' or 'nccl', or None."
            )
        _one_of("start_method", self.start_method, START_METHODS)
        if self.rank_logs is not None and not isinstance(self.rank_logs, str):
            raise ValueError(f"rank_logs={self.rank_logs!r}: use the name of a folder, or None.")
        timeout = self.timeout_seconds
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(f"timeout_seconds={timeout!r}: use a number of seconds above 0.")
        _gib_or_none("device_memory_gib", self.device_memory_gib)

    @property
    def raw(self) -> RawConfig | None:
        """The content of ``deepspeed_config``; ``None`` if it is unset."""
        return self.deepspeed_config  # type: ignore[return-value]

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states and master weights are stored off the accelerator."""
        return self.offload.target != "none" and self.offload.optimizer is not False

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameter shards are stored off the accelerator between uses: with ``fully_shard`` at every stage (at
        stages 1 and 2 between steps), with DeepSpeed at stage 3."""
        if self.offload.target == "none":
            return False
        if self.offload.parameters is not None:
            return self.offload.parameters
        return self.engine == "fsdp2" or self.stage == 3

    # The three methods below run inside __post_init__ of a frozen dataclass, hence object.__setattr__.

    def _resolve_file(self) -> None:
        """Resolves ``stage`` and ``offload``: the given value, else that of ``deepspeed_config``, else the default."""
        given = self.deepspeed_config
        raw = given if given is None or isinstance(given, RawConfig) else RawConfig.read(_file_or_mapping(given))
        object.__setattr__(self, "deepspeed_config", raw)
        offload = None if self.offload is None else _as_offload(self.offload)
        if raw is not None:
            if self.engine != "deepspeed":
                raise ValueError(
                    f"deepspeed_config={raw.origin!r} with engine={self.engine!r}: use engine='deepspeed'."
                )
            if self.auto:
                raise ValueError("auto=True with deepspeed_config: use stage=1, 2 or 3, or leave both unset.")
            if self.stage is not None and raw.stage not in (None, self.stage):
                raise ValueError(
                    f"stage={self.stage!r}, but zero_optimization.stage={raw.stage} in {raw.origin}: leave stage unset"
                    f" (on the command line strategy=zero_default), or use stage={raw.stage}."
                )
            if offload is not None:
                offload = _merged(offload, raw)
        if self.stage is None:
            object.__setattr__(self, "stage", (raw and raw.stage) or 3)
        if offload is None:
            offload = (raw and raw.offload) or OffloadConfig()
        elif offload.target is None:
            offload = replace(offload, target="none")
        object.__setattr__(self, "offload", offload)

    def _check_fsdp2(self) -> None:
        offload = self.offload
        if offload.target == "nvme" and offload.pin_memory:
            raise ValueError(
                "offload.pin_memory=True with offload.target='nvme' and engine='fsdp2': pages of a file cannot be"
                " pinned; leave it unset, or use offload.target='cpu'."
            )
        for name in ("optimizer", "parameters"):
            if getattr(offload, name) is False:
                raise ValueError(
                    f"offload.{name}=False with engine='fsdp2': fully_shard moves parameters and optimizer states"
                    " together; leave it unset, or use engine='deepspeed'."
                )
        if offload.ratio is not None:
            raise ValueError(f"offload.ratio={offload.ratio!r} with engine='fsdp2': use engine='deepspeed' at stage 3.")
        for name in _given(self.deepspeed):
            raise ValueError(
                f"deepspeed.{name}={getattr(self.deepspeed, name)!r} with engine='fsdp2': use engine='deepspeed', or"
                " leave it unset."
            )

    def _check_deepspeed(self) -> None:
        offload = self.offload
        if self.auto:
            raise ValueError("auto=True with engine='deepspeed': the plan covers fsdp2 only; use stage=1, 2 or 3.")
        if offload.target == "nvme":
            origin = "" if self.raw is None or self.raw.offload is None else f" of {self.raw.origin}"
            raise ValueError(
                f"offload='nvme'{origin} with engine='deepspeed', which cannot keep shards in files: use engine='fsdp2'"
                " (strategy='zero3_nvme'), or offload='cpu'."
            )
        if offload.parameters and self.stage != 3:
            raise ValueError(
                f"offload.parameters=True with stage={self.stage} and engine='deepspeed': use stage=3,"
                " engine='fsdp2', or leave it unset."
            )
        if offload.optimizer is False and self.stage != 3:
            raise ValueError(
                f"offload.optimizer=False with stage={self.stage}: nothing else is offloaded there; use"
                " offload.target='none'."
            )
        if offload.ratio not in (None, 1) and self.stage != 3:
            raise ValueError(
                f"offload.ratio={offload.ratio!r} with stage={self.stage}: use stage=3, or leave it unset."
            )
        if self.shard_size is not None:
            raise ValueError(
                f"shard_size={self.shard_size!r} with engine='deepspeed': it shards over all ranks; use engine='fsdp2',"
                " leave it unset, or set deepspeed.hpz_partition_size, which gathers inside a host in the backward."
            )
        if self.compile.target != "none" and self.stage == 3:
            raise ValueError(
                f"compile={self.compile.target!r} with engine='deepspeed' at stage 3, which gathers inside units and so"
                " breaks the graph: use stage=2, or engine='fsdp2'."
            )
        if self.activation_checkpointing.target == "selective" and self.stage == 3:
            raise ValueError(
                "activation_checkpointing='selective' with engine='deepspeed' at stage 3, which must recompute all of a"
                " unit to know when to gather: use 'full', stage 1 or 2, or engine='fsdp2'."
            )
        if self.transport != "auto":
            raise ValueError(
                f"transport={self.transport!r} with engine='deepspeed': DeepSpeed has its own; leave it unset, or"
                " use engine='fsdp2'."
            )
        for f in fields(self):
            given, by_unit = getattr(self, f.name), {self.activation_checkpointing.target, self.compile.target}
            if f.name in ("units", "min_unit_numel") and given != f.default and by_unit == {"none"}:
                raise ValueError(
                    f"{f.name}={given!r} with engine='deepspeed': DeepSpeed gathers each module separately, and uses"
                    " units only to recompute or compile; set activation_checkpointing='full' or compile='units', leave"
                    " it unset, or use engine='fsdp2'."
                )
        for name in _given(self.deepspeed):
            if self.stage not in _ONLY_AT.get(name, STAGES):
                raise ValueError(
                    f"deepspeed.{name}={getattr(self.deepspeed, name)!r} with stage={self.stage}: it is for"
                    f" stage={' and '.join(map(str, _ONLY_AT[name]))}; leave it unset."
                )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ZeroConfig:
        """Makes a config from keywords; the error for an unknown keyword names the closest field."""
        _known_only(cls, kwargs)
        return cls(**kwargs)

    def with_(self, **changes: Any) -> ZeroConfig:
        """Returns a copy with ``changes`` applied, validated again."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Settings of the command ``lightning-zero plan`` that do not belong to the run."""

    device_memory_gib: float | None = None
    """Memory of one device; ``None`` queries the device of this machine."""
    headroom: float = 0.1
    """Fraction of that memory kept free for the driver, fragmentation and allocations that a trace cannot see."""
    host_memory_gib: float | None = None
    """Host memory of one node, for offload; ``None`` queries this machine."""
    batch: Any = None
    """Shape of a micro-batch, ``[8, 129]``, or shapes by name, ``{input_ids: [8, 128]}``; ``None`` takes the first
    batch of the data."""
    batch_dtype: str = "int64"
    """Dtype of the micro-batch."""
    plot: str | None = None
    """File for a bar chart of the rows (PNG); needs matplotlib."""
    json: str | None = None
    """File for the plan as JSON; ``"-"`` prints it instead of the table."""

    def __post_init__(self) -> None:
        _gib_or_none("plan.device_memory_gib", self.device_memory_gib)
        _gib_or_none("plan.host_memory_gib", self.host_memory_gib)
        if isinstance(self.headroom, bool) or not isinstance(self.headroom, (int, float)) or not 0 <= self.headroom < 1:
            raise ValueError(f"plan.headroom={self.headroom!r}: use a fraction, 0 or more and below 1.")


def _gib_or_none(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise ValueError(f"{name}={value!r}: use a number of GiB above 0, or None.")


def _as_offload(value: Any) -> OffloadConfig:
    return _by_target(OffloadConfig, "offload", value, OFFLOAD_TARGETS)


def _as_checkpointing(value: Any) -> ActivationCheckpointingConfig:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ActivationCheckpointingConfig(target="full", units=_as_names("activation_checkpointing", value))
    return _by_target(ActivationCheckpointingConfig, "activation_checkpointing", value, CHECKPOINTING_TARGETS)


def _as_compile(value: Any) -> CompileConfig:
    return _by_target(CompileConfig, "compile", value, COMPILE_TARGETS)


def _by_target(cls: type[_Targeted], name: str, value: Any, targets: tuple[str, ...]) -> _Targeted:
    """Makes a section from an instance, from its ``target`` alone, or from a mapping of its fields."""
    if isinstance(value, cls):
        return value
    if isinstance(value, str):
        _one_of(name, value, targets)
        return cls(target=value)  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return _section(cls, name, value)
    raise ValueError(
        f"{name}={value!r}: use one of {', '.join(map(repr, targets))}, {_article(cls.__name__)} or a mapping."
    )


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOU' else 'a'} {noun}"


def _as_deepspeed(value: Any) -> DeepSpeedConfig:
    if isinstance(value, DeepSpeedConfig):
        return value
    if isinstance(value, Mapping):
        return _section(DeepSpeedConfig, "deepspeed", value)
    raise ValueError(f"deepspeed={value!r}: use a DeepSpeedConfig or a mapping of its fields.")


def _section(config: type[_Section], where: str, values: Mapping[str, Any]) -> _Section:
    _known_only(config, values, f"{where}.")
    return config(**values)


def _known_only(config: type, values: Mapping[str, Any], where: str = "") -> None:
    known = [f.name for f in fields(config)]
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{where}{name}={value!r} is not a setting of {config.__name__}.{closest(name, known)}")


def _merged(offload: OffloadConfig, raw: RawConfig) -> OffloadConfig:
    """Fills the unset fields of ``offload`` from the file."""
    filed = raw.offload
    filled: dict[str, Any] = {}
    for name in ("target", "optimizer", "parameters") if filed is not None else ():
        given, in_file = getattr(offload, name), getattr(filed, name)
        if given is None:
            filled[name] = in_file
        elif in_file is not None and given != in_file:
            raise ValueError(
                f"offload.{name}={given!r}, but {raw.origin} has {in_file!r}: leave it unset or make them equal."
            )
    return replace(offload, **filled)


def _file_or_mapping(value: Any) -> str | os.PathLike[str] | Mapping[str, Any]:
    if isinstance(value, (str, os.PathLike, Mapping)):
        return value
    raise ValueError(f"deepspeed_config={value!r}: use the path of a JSON file, a mapping, or None.")


def _parse(text: str, path: str) -> Any:
    """Parses JSON, or Hjson (JSON with comments) if its parser is installed; DeepSpeed reads both."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        try:
            import hjson  # a dependency of deepspeed
        except ImportError:
            hjson = None
        try:
            if hjson is not None:
                return _json(hjson.loads(text, object_pairs_hook=_unique), path)
        except hjson.HjsonDecodeError:
            pass
        raise ValueError(
            f"deepspeed_config={path!r} is not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}."
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    for name in content:
        values = [value for key, value in pairs if key == name]
        if len(values) > 1:
            raise ValueError(f"deepspeed_config: {name!r} occurs {len(values)} times, with values {values}; keep one.")
    return content


def _json(value: Any, where: str) -> Any:
    """Copies ``value`` into plain dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _json(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_json(inner, f"{where}[{number}]") for number, inner in enumerate(value)]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError(f"{where}={value!r}: a DeepSpeed config contains only numbers, strings, lists and sections.")


def _given(config: Any) -> list[str]:
    """The settings of ``config`` that differ from their default."""
    return [f.name for f in fields(config) if getattr(config, f.name) != f.default]


def _as_names(name: str, value: Any, of: str = "class names or name patterns") -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) and v for v in value):
        raise ValueError(f"{name}={value!r}: use a list of {of}, or None.")
    return tuple(value)


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: use True or False.")


def _boolean_or_none(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: use True, False or None.")


def _count_or_none(name: str, value: Any, least: int = 1) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name}={value!r}: use a whole number, {least} or more, or None.")


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        hint = closest(value, allowed) if isinstance(value, str) else ""
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, allowed))}.{hint}")


def closest(word: str, known: Sequence[Any]) -> str:
    """The end of an error message: the known word that was probably meant, or all of them."""
    from difflib import get_close_matches

    match = get_close_matches(str(word), [str(k) for k in known], n=1)
    return f" Did you mean {match[0]!r}?" if match else f" Known: {', '.join(map(str, known))}."
