"""Every rule about which settings are valid.

A :class:`ZeroConfig` is the single form that settings take past the entrance: registered names, keyword arguments
of :class:`~lightning_zero.strategy.ZeroStrategy` and Hydra's groups all become one. What is wrong with a value is
said here, in a ``ValueError`` that names the setting, the value found and the repair.
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
    """Place of optimizer states, master weights and (stage 3) parameters between uses."""

    target: OffloadTarget | None = "none"
    """``"none"`` (the accelerator), ``"cpu"`` (host memory) or ``"nvme"`` (files, engine ``fsdp2``);
    ``None`` is what ``deepspeed_config`` says, else none. A :class:`ZeroConfig` holds it resolved."""
    optimizer: bool | None = None
    """Whether optimizer states and master weights move; ``None`` is yes. ``fully_shard`` moves nothing without them."""
    parameters: bool | None = None
    """Whether parameter shards move; ``None`` is what the engine and stage do (:meth:`ZeroConfig.offloads_parameters`).
    Engine ``deepspeed`` only lets it be chosen, at stage 3."""
    path: str | None = None
    """nvme: folder on the fast disk; ``None`` is ``<default_root_dir>/offload``."""
    pin_memory: bool | None = None
    """Page-locked host memory, which copies to the accelerator need to overlap; ``None`` is yes where there is one."""
    ratio: float | None = None
    """cpu, engine ``deepspeed``, stage 3: share of the optimizer states that moves, above 0 to 1; ``None`` is 1."""

    def __post_init__(self) -> None:
        _one_of("offload.target", self.target, (*OFFLOAD_TARGETS, None))
        for name in ("optimizer", "parameters", "pin_memory"):
            _boolean_or_none(f"offload.{name}", getattr(self, name))
        if self.path is not None and not (isinstance(self.path, str) and self.path):
            raise ValueError(f"offload.path={self.path!r}: use the name of a folder, or None.")
        ratio = self.ratio
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1):
            raise ValueError(f"offload.ratio={ratio!r}: use a share above 0, up to 1, or None.")
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
    """Arguments of ``torch.compile`` for each shard unit by itself."""

    target: CompileTarget = "none"
    """``"units"`` compiles the forward of every shard unit but the root, in place; equal blocks share their graphs."""
    backend: str | None = None
    """A name that ``torch.compiler.list_backends()`` knows; ``None`` is torch's default, ``"inductor"``."""
    mode: str | None = None
    """``"default"`` or ``"max-autotune-no-cudagraphs"``, of inductor; ``None`` is its default. The others record CUDA
    graphs, which want each parameter at one address in all steps."""
    dynamic: bool | None = None
    """Whether sizes are variables from the first graph on; ``None`` makes those that have changed once variable."""
    fullgraph: bool = False
    """A unit that takes more than one graph counts as one that cannot be compiled."""

    def __post_init__(self) -> None:
        _one_of("compile.target", self.target, COMPILE_TARGETS)
        for name in ("backend", "mode"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"compile.{name}={value!r}: use a name, or None.")
        if self.mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"compile.mode={self.mode!r}: its CUDA graphs want each parameter at one address in all steps, and"
                " parameters are gathered into other memory each time; use 'max-autotune-no-cudagraphs'."
            )
        if self.mode is not None:
            _one_of("compile.mode", self.mode, COMPILE_MODES)
            if self.backend not in (None, "inductor"):
                raise ValueError(
                    f"compile.mode={self.mode!r} with compile.backend={self.backend!r}: modes are inductor's; leave one"
                    " of them unset."
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
    """Selection of the modules that compute their activations again in the backward instead of keeping them."""

    target: CheckpointingTarget = "none"
    """``"full"``: nothing but a module's inputs is kept; ``"selective"``: every second matrix product and attention
    are kept, too, which takes more memory and less time."""
    units: Sequence[str] | None = None
    """The modules, by class name or by name pattern (``"blocks.*"``); ``None`` is every shard unit but the root."""
    offload: bool = False
    """Kept inputs wait in host memory."""

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
        """Whether anything is computed again."""
        return self.target != "none"

    def __str__(self) -> str:
        """As it is set."""
        what = repr(self.target) if self.units is None else repr(list(self.units))
        return f"activation_checkpointing={what}"


COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """Settings of the engine ``deepspeed`` alone. ``None`` everywhere is a default chosen for speed, or the
    ``deepspeed_config`` file's value; ``_numel`` counts elements, whatever their dtype."""

    overlap_comm: bool | None = None
    """Reduce gradients (stage 3: also gather parameters) while computing goes on; ``None`` is yes on an accelerator.
    Takes the memory of a second reduce bucket."""
    reduce_bucket_numel: int | None = None
    """Gradients reduced in one message; ``None`` scales with the module (:func:`.deepspeed_config.bucket_numel`)."""
    allgather_bucket_numel: int | None = None
    """Stages 1 and 2: parameters gathered in one message after a step; ``None`` as above."""
    prefetch_numel: int | None = None
    """Stage 3: parameters gathered ahead of their use; ``None`` scales with the module."""
    persistence_numel: int | None = None
    """Stage 3: parameters smaller than this stay whole on every rank; ``None`` scales with the module."""
    max_live_numel: int | None = None
    """Stage 3: whole parameters kept at a time; ``None`` is 1e9."""
    max_reuse_distance_numel: int | None = None
    """Stage 3: a parameter used again within so many others' elements stays whole; ``None`` is 1e9."""
    sub_group_numel: int | None = None
    """Stage 3: parameters of one group of masters; ``None`` is 1e9, and less with ``offload.ratio``, which moves whole
    groups."""
    contiguous_gradients: bool | None = None
    """Gradients are copied into one buffer as they appear, so that memory does not fragment; ``None`` is yes."""
    reduce_scatter: bool | None = None
    """Stages 1 and 2: each rank receives its share of a reduction only; ``None`` is yes."""
    round_robin_gradients: bool | None = None
    """Stages 1 and 2: ranks take turns per parameter, so that copies to host memory go in parallel; ``None`` is
    no."""
    communication_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """``"fp32"``, ``"bf16"`` or ``"fp16"``: what gradients are reduced in; ``None`` is what the precision says."""
    hpz_partition_size: int | None = None
    """Stage 3, ZeRO++: so many ranks (those of a host) hold a second copy of the parameters, so that the backward
    gathers inside the host; divides the number of ranks; ``None`` is 1, none."""
    quantized_weights: bool | None = None
    """Stage 3, ZeRO++: parameters are gathered as int8; needs CUDA."""
    quantized_nontrainable_weights: bool | None = None
    """Stage 3: frozen parameters are stored and gathered as int8; needs CUDA."""
    quantized_gradients: bool | None = None
    """Stage 3, ZeRO++: gradients are reduced as int4 between hosts; without effect on one host; needs CUDA."""

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
"""Setting of DeepSpeedConfig -> the stages at which DeepSpeed looks at it."""


@dataclass(frozen=True)
class RawConfig:
    """A DeepSpeed config as it was given, read once and never changed; :meth:`content` hands out copies."""

    text: str
    """As JSON."""
    origin: str = field(default="deepspeed_config", compare=False)
    """The file, for messages."""

    @classmethod
    def read(cls, given: str | os.PathLike[str] | Mapping[str, Any]) -> RawConfig:
        """The file of that name, or the mapping."""
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
        """The whole config; the caller's own copy."""
        return json.loads(self.text)

    def section(self, name: str) -> dict[str, Any]:
        """One section's settings; empty if there is none."""
        found = self.content().get(name)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise ValueError(f"{name}={found!r} in {self.origin}: use a section, {{...}}.")
        return found

    @property
    def stage(self) -> int | None:
        """The ZeRO stage it asks for; ``None`` where it doesn't."""
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
        """The coarse form of its offload sections; ``None`` where it has none."""
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

    # Unset is None here; what is read afterwards is always a stage and an OffloadConfig.
    stage: Stage = None  # type: ignore[assignment]
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters. Unset: what ``deepspeed_config``
    says, else 3."""
    engine: EngineName = "fsdp2"
    """The runtime that does the sharding: ``"fsdp2"`` is ``torch.distributed.fsdp.fully_shard``, ``"deepspeed"`` is
    ``deepspeed.initialize``."""
    offload: OffloadConfig = None  # type: ignore[assignment]
    """A target (``"none"``, ``"cpu"``, ``"nvme"``), an :class:`OffloadConfig` or a mapping of its fields. Unset: what
    ``deepspeed_config`` says, else none."""
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    """Settings that only the engine ``deepspeed`` has: a :class:`DeepSpeedConfig` or a mapping of its fields."""
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | None = None
    """A DeepSpeed config, as the path of a JSON file or a mapping, for the engine ``deepspeed``. It fills what is unset
    here and in the Trainer; where both say something else, that is an error. Read once; afterwards :attr:`raw`."""
    units: Sequence[str] | None = None
    """Modules gathered together, by class name or by name pattern (``"blocks.*"``); ``None`` chooses from the module,
    an empty list makes the whole module one unit."""
    min_unit_numel: int = 100_000
    """Automatic units smaller than this many elements are left to the unit around them."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """``"units"`` compiles each shard unit with ``torch.compile``, ``"none"`` what you compile yourself and nothing
    else; a :class:`CompileConfig` or a mapping of its fields says how."""
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    """``"full"`` computes each shard unit's activations again in the backward, ``"selective"`` keeps those of every
    second matrix product and of attention, a list of class names or name patterns says which modules instead; an
    :class:`ActivationCheckpointingConfig` or a mapping of its fields says more."""
    find_unused_parameters: bool = True
    """Agree after each synchronized backward which parameters no rank used, so that their gradients stay ``None`` as
    under DDP, and after each forward that all ranks ran the same units. ``False`` saves these small all-reduces and
    leaves zeros there instead; stage 3 between CPU processes agrees on units all the same."""
    shard_size: int | Literal["auto"] | None = None
    """Ranks that share one copy of the model: shards lie inside groups of this many consecutive ranks (the GPUs of a
    host, say), and the groups are replicas of each other (HSDP). ``None`` shards over all ranks; ``"auto"`` takes the
    smallest group of whole hosts in which the plan says that the run fits, and says why."""
    keep_global_batch: bool = False
    """Resume on another number of ranks with as many samples per optimizer step as before, by accumulating more or
    fewer micro-batches. What the Trainer counts in batches (``val_check_interval``, ...) stays in those of one rank."""
    transport: TransportName = "auto"
    """Transport of shards and gradients with ``fsdp2``: ``"torch"`` is ``fully_shard``'s own collectives and schedule,
    ``"direct"`` an exchange between CPU processes over gloo, which sends and holds less; ``"auto"`` is direct there,
    torch elsewhere."""
    elementwise_optimizers: Sequence[str] | None = None
    """Class names of optimizers other than PyTorch's own, ``["Lion"]``, whose update of an element depends on nothing
    but that element's own values and gradients: they step on shards. All others step on full tensors and keep full
    states."""
    broadcast_buffers: bool = True
    """Rank 0's buffers become everybody's at each training forward, as under DDP; under manual optimization before the
    first one alone, as under Lightning's DDP."""
    build: BuildName = "auto"
    """``"auto"`` shards what ``configure_model`` builds at stage 3 as it comes, so that no rank holds all of it;
    ``"whole"`` builds the whole module on every rank first. ``deepspeed`` shards at stage 3 whatever is set here."""
    uneven: Uneven = "error"
    """Training loaders of which some ranks' have fewer batches: ``"error"`` ends the run on all ranks where the first
    runs dry, ``"shortest"`` ends each epoch on all ranks with the shortest, as DDP does with loaders cut to it."""
    hook_budget_bytes: int | None = None
    """Bytes of full parameters, gradients and optimizer states that user hooks may hold gathered at a time; beyond them
    those that were gathered first are resharded. ``None`` is an eighth of what is free on the device when a run
    starts, or of this rank's share of the host on CPUs."""
    after_fit: AfterFit = "auto"
    """``"whole"`` gives every rank plain full parameters and optimizer states when the run ends, ``"sharded"`` leaves
    the shards, ``"auto"`` gives full parameters where host memory allows, and states as they are touched."""
    checkpoint: CheckpointForm = "file"
    """``"file"`` writes what Lightning writes under DDP, ``"sharded"`` a directory that each rank writes its part of,
    ``"sharded-async"`` the same while training goes on. All are read whatever is set here."""
    process_group_backend: str | None = None
    """``torch.distributed`` backend; ``None`` is the device's own (NCCL on CUDA, gloo on CPU)."""
    timeout_seconds: float = 1800.0
    """Seconds that a collective waits for a missing rank before it raises."""
    auto: bool = False
    """The plan picks the stage when a run is set up, whatever ``stage`` says; the name ``zero_auto``."""
    device_memory_gib: float | None = None
    """Memory of one device that ``auto`` plans for; ``None`` asks the devices."""
    start_method: StartMethod = "auto"
    """Start of the other ranks of a machine: ``"popen"`` executes the program again, ``"spawn"`` and ``"fork"``
    make processes that bring their results back; ``"auto"`` is popen for programs, fork in notebooks, spawn in pytest.
    Without effect under torchrun, srun and mpirun."""
    rank_logs: str | None = None
    """Folder for one log file per rank (``rank1.log``); ``None`` is ``ranks/`` in a Hydra job's folder, and the
    terminal outside of Hydra. Used by popen."""

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
        """The ``deepspeed_config``, read."""
        return self.deepspeed_config  # type: ignore[return-value]

    @property
    def builds_sharded(self) -> bool:
        """Whether ``fsdp2`` shards what ``configure_model`` builds as it comes."""
        return self.engine == "fsdp2" and self.stage == 3 and self.build == "auto" and not self.auto

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states and master weights leave the accelerator."""
        return self.offload.target != "none" and self.offload.optimizer is not False

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameter shards leave the accelerator between uses: with ``fully_shard`` always (at stages 1 and 2
        between steps), with DeepSpeed at stage 3."""
        if self.offload.target == "none":
            return False
        if self.offload.parameters is not None:
            return self.offload.parameters
        return self.engine == "fsdp2" or self.stage == 3

    def _resolve_file(self) -> None:
        """``stage`` and ``offload`` are what was given, what the file says, or the default, in this order."""
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
                raise ValueError("auto=True with deepspeed_config: use stage=1, 2 or 3, or what the file says.")
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
            raise ValueError("auto=True with engine='deepspeed': the plan picks among fsdp2's; use stage=1, 2 or 3.")
        if offload.target == "nvme":
            origin = "" if self.raw is None or self.raw.offload is None else f" of {self.raw.origin}"
            raise ValueError(
                f"offload='nvme'{origin} with engine='deepspeed', which keeps no shards in files: use engine='fsdp2'"
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
                f"compile={self.compile.target!r} with engine='deepspeed' at stage 3, which gathers inside units, where"
                " a graph would end: use stage=2, or engine='fsdp2'."
            )
        if self.activation_checkpointing.target == "selective" and self.stage == 3:
            raise ValueError(
                "activation_checkpointing='selective' with engine='deepspeed' at stage 3, which has to compute all of a"
                " unit again to know when to gather: use 'full', stage 1 or 2, or engine='fsdp2'."
            )
        if self.transport != "auto":
            raise ValueError(
                f"transport={self.transport!r} with engine='deepspeed': DeepSpeed has its own; leave it unset, or use"
                " engine='fsdp2'."
            )
        for f in fields(self):
            given, by_unit = getattr(self, f.name), {self.activation_checkpointing.target, self.compile.target}
            if f.name in ("units", "min_unit_numel") and given != f.default and by_unit == {"none"}:
                raise ValueError(
                    f"{f.name}={given!r} with engine='deepspeed': DeepSpeed gathers each module by itself, and units"
                    " are what is recomputed or compiled; set activation_checkpointing='full' or compile='units', leave"
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
        """A config from keywords, naming the closest field when one is unknown."""
        _known_only(cls, kwargs)
        return cls(**kwargs)

    def with_(self, **changes: Any) -> ZeroConfig:
        """A copy with ``changes``, validated again."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Settings of ``lightning-zero plan`` beside the run itself."""

    device_memory_gib: float | None = None
    """Memory of one device; ``None`` asks the device that is there."""
    headroom: float = 0.1
    """Share of it left for the driver, the allocator's gaps and what a trace cannot see."""
    host_memory_gib: float | None = None
    """Host memory of one node, for offload; ``None`` asks this machine."""
    batch: Any = None
    """Shape of a micro-batch, ``[8, 129]``, or shapes by name, ``{input_ids: [8, 128]}``; ``None`` takes the data's
    first."""
    batch_dtype: str = "int64"
    """Its dtype."""
    plot: str | None = None
    """A PNG with a bar for every row is written here; needs matplotlib."""
    json: str | None = None
    """The plan is written here as JSON; ``"-"`` prints it instead of the table."""

    def __post_init__(self) -> None:
        _gib_or_none("plan.device_memory_gib", self.device_memory_gib)
        _gib_or_none("plan.host_memory_gib", self.host_memory_gib)
        if isinstance(self.headroom, bool) or not isinstance(self.headroom, (int, float)) or not 0 <= self.headroom < 1:
            raise ValueError(f"plan.headroom={self.headroom!r}: use a share from 0 to below 1.")


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
    """A section from itself, from its ``target`` alone, or from a mapping of its fields."""
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
    """``offload`` filled from the file where it is unset."""
    filed = raw.offload
    filled: dict[str, Any] = {}
    for name in ("target", "optimizer", "parameters") if filed is not None else ():
        mine, its = getattr(offload, name), getattr(filed, name)
        if mine is None:
            filled[name] = its
        elif its is not None and mine != its:
            raise ValueError(
                f"offload.{name}={mine!r}, but {raw.origin} says {its!r}: leave it unset or make them equal."
            )
    return replace(offload, **filled)


def _file_or_mapping(value: Any) -> str | os.PathLike[str] | Mapping[str, Any]:
    if isinstance(value, (str, os.PathLike, Mapping)):
        return value
    raise ValueError(f"deepspeed_config={value!r}: use the path of a JSON file, a mapping, or None.")


def _parse(text: str, path: str) -> Any:
    """JSON, or Hjson (JSON with comments), which DeepSpeed itself reads, where its reader is installed."""
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
            f"deepspeed_config={path!r} is no JSON: {error.msg} in line {error.lineno}, column {error.colno}."
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    for name in content:
        values = [value for key, value in pairs if key == name]
        if len(values) > 1:
            raise ValueError(f"deepspeed_config: {name!r} stands there {len(values)} times, with {values}; keep one.")
    return content


def _json(value: Any, where: str) -> Any:
    """``value`` in plain dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _json(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_json(inner, f"{where}[{number}]") for number, inner in enumerate(value)]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError(f"{where}={value!r}: a DeepSpeed config holds numbers, words, lists and sections only.")


def _given(config: Any) -> list[str]:
    """The settings of ``config`` that are not at their default."""
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
    """The end of an error: the known word that was probably meant, or all of them."""
    from difflib import get_close_matches

    match = get_close_matches(str(word), [str(k) for k in known], n=1)
    return f" Did you mean {match[0]!r}?" if match else f" Known: {', '.join(map(str, known))}."
