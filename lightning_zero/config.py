"""Every rule about which settings are valid.

Registered names, keyword arguments of :class:`~lightning_zero.strategy.ZeroStrategy` and Hydra groups all become one
:class:`ZeroConfig`; the rest of the package sees nothing else. An invalid value raises a ``ValueError`` here that names
the setting, the value found and the repair.
"""

from __future__ import annotations

import functools
import json
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Stage = Literal[1, 2, 3]
EngineName = Literal["fsdp2", "deepspeed"]
OffloadTarget = Literal["none", "cpu", "nvme"]
CheckpointForm = Literal["file", "sharded", "sharded-async"]
AfterFit = Literal["auto", "whole", "sharded"]
Uneven = Literal["error", "shortest"]
TransportName = Literal["auto", "direct", "torch"]
ReduceDtype = Literal["fp32", "bf16", "fp16"]
CommBuffers = Literal["torch", "process_group", "symmetric"]
StartMethod = Literal["auto", "popen", "spawn", "fork"]
CompileTarget = Literal["none", "units"]
BuildName = Literal["auto", "whole"]
CheckpointingTarget = Literal["none", "full", "selective"]

STAGES: tuple[int, ...] = get_args(Stage)
OFFLOAD_TARGETS: tuple[str, ...] = get_args(OffloadTarget)

_Targeted = TypeVar("_Targeted", "OffloadConfig", "CompileConfig", "ActivationCheckpointingConfig")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Storage of optimizer states, master weights and (stage 3) parameters between uses."""

    target: OffloadTarget | None = "none"
    """``"none"`` (the accelerator), ``"cpu"`` (host memory) or ``"nvme"`` (files, engine ``fsdp2``);
    ``None`` takes the value of ``deepspeed_config``, else ``"none"``. :class:`ZeroConfig` resolves it."""
    path: str | None = None
    """nvme: folder on the fast disk; ``None`` is ``<default_root_dir>/offload``."""
    pin_memory: bool | None = None
    """Use page-locked host memory, without which copies to the accelerator do not overlap with compute; ``None`` is yes
    if there is an accelerator."""
    ratio: float | None = None
    """cpu, engine ``deepspeed``, stage 3: fraction of the optimizer states to offload, in (0, 1]; ``None`` is 1."""

    def __post_init__(self) -> None:
        check_types(self, "offload.")
        if self.ratio is not None and self.ratio > 1:
            raise ValueError(f"offload.ratio={self.ratio!r}: use a fraction up to 1, or None.")
        _require_target(self, "offload")


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Arguments of ``torch.compile``, which compiles each shard unit separately."""

    target: CompileTarget = "none"
    """``"units"`` compiles the forward of every shard unit except the root, in place; equal blocks share graphs."""
    backend: str | None = None
    """A backend of ``torch.compile``; ``None`` is torch's default, ``"inductor"``."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] | None = None
    """inductor's ``"default"`` or ``"max-autotune-no-cudagraphs"``; ``None`` is its default. Its other modes record
    CUDA graphs, which need each parameter at the same address in every step."""
    dynamic: bool | None = None
    """Whether sizes are symbolic from the first graph on; ``None`` makes a size symbolic after it has changed once."""
    fullgraph: bool = False
    """Raise an error for a unit that needs more than one graph."""

    def __post_init__(self) -> None:
        check_types(self, "compile.")
        _require_target(self, "compile")


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
        check_types(self, "activation_checkpointing.")
        object.__setattr__(self, "units", _as_names("activation_checkpointing.units", self.units))
        if self.units is not None and not self.units:
            raise ValueError("activation_checkpointing.units=[]: name modules, or use activation_checkpointing='none'.")
        _require_target(self, "activation_checkpointing")

    @property
    def is_on(self) -> bool:
        """Whether any module recomputes its activations."""
        return self.target != "none"


PASSED_KEYS = ("zero_optimization", "communication_data_type", "prescale_gradients", "gradient_predivide_factor")
"""Top-level keys of a DeepSpeed config that are passed to DeepSpeed."""
_TRAINERS_KEYS = ("gradient_accumulation_steps", "gradient_clipping", "fp16", "bf16", "bfloat16", "data_types")
"""Top-level keys that must agree with the Trainer, or that belong to its precision. No other key has an effect."""


@dataclass(frozen=True)
class RawConfig:
    """A DeepSpeed config as the user gave it, read once and never changed; :meth:`content` returns copies."""

    text: str
    """The config as JSON."""
    origin: str = field(default="deepspeed_config", compare=False)
    """The file's path, for messages."""

    def __post_init__(self) -> None:
        known = (*PASSED_KEYS, *_TRAINERS_KEYS)
        for name in self.content():
            close = get_close_matches(name, known, n=1, cutoff=0.85)
            if close and name not in known:
                raise ValueError(f"{name} in {self.origin} is not a setting of DeepSpeed; did you mean {close[0]}?")

    @classmethod
    def read(cls, given: str | os.PathLike[str] | Mapping[str, Any]) -> RawConfig:
        """Reads a file by its path, or copies a mapping."""
        try:
            if isinstance(given, Mapping):
                return cls(json.dumps(dict(given)))
            origin = os.fspath(given)
            with open(origin, encoding="utf-8") as stream:
                content = json.load(stream)
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"deepspeed_config={given!r}: {error}; use the path of a JSON file without comments, or a mapping of"
                " numbers, strings, lists and sections."
            ) from None
        if not isinstance(content, dict):
            raise ValueError(f"deepspeed_config={origin!r} holds {type(content).__name__}: use a JSON object.")
        return cls(json.dumps(content), origin)

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
    def unused(self) -> list[str]:
        """Top-level keys that have no effect here, but a value. Names that begin with ``_`` or ``//`` are comments."""
        return [
            name
            for name, value in self.content().items()
            if name not in (*PASSED_KEYS, *_TRAINERS_KEYS)
            and not name.startswith(("_", "//"))
            and not (value in (None, False, "auto") or (isinstance(value, dict) and value.get("enabled") is False))
        ]

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that the config sets; ``None`` if it sets none."""
        stage = self.section("zero_optimization").get("stage", "auto")
        if stage == "auto":
            return None
        if isinstance(stage, bool) or stage not in STAGES:
            raise ValueError(
                f"zero_optimization.stage={stage!r} in {self.origin}: use 1, 2 or 3; stage 0 is strategy='ddp'."
            )
        return stage

    @property
    def offload_devices(self) -> dict[str, str]:
        """The devices of the sections ``offload_optimizer`` and ``offload_param``, of those that exist."""
        devices = {}
        for part in ("optimizer", "param"):
            section = self.section("zero_optimization").get(f"offload_{part}")
            if section is not None:
                device = devices[part] = section.get("device", "none")
                if device not in OFFLOAD_TARGETS:
                    raise ValueError(f"{self.origin}: offload_{part}.device={device!r}: use 'none' or 'cpu'.")
        return devices


_ONLY_FSDP2 = {
    "auto": "use stage=1, 2 or 3",
    "shard_size": "leave it unset, set zero_hpz_partition_size in deepspeed_config, which gathers inside a host in the"
    " backward",
    "transport": "leave it unset",
    "reduce_dtype": "set communication_data_type in deepspeed_config",
    "comm_buffers": "leave it unset",
}
"""Setting that the engine ``deepspeed`` lacks -> the repair."""


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
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | None = None
    """A DeepSpeed config for the engine ``deepspeed``: the path of a JSON file, or a mapping. It supplies values that
    are unset here and in the Trainer; two different values are an error. It is read once; use :attr:`raw`
    afterwards."""
    units: Sequence[str] | None = None
    """Modules that become shard units, by class name or name pattern (``"blocks.*"``). The parameters of a unit are
    gathered together. ``None`` takes repeated blocks: classes in ``_no_split_modules`` of Hugging Face models, and
    children of ``ModuleList`` and ``Sequential`` without public methods besides ``forward``; and embeddings and linear
    layers of 16 M elements or more outside of blocks. All other parameters are the root unit, which is gathered for the
    whole step. An empty list makes the entire module one unit."""
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
    and leaves zeros instead of ``None``; CPU processes with direct exchange agree on units all the same."""
    shard_size: int | Literal["auto"] | None = None
    """Number of consecutive ranks that share one copy of the model, for example the GPUs of a host. The groups are
    replicas of each other (HSDP). ``None`` shards over all ranks. ``"auto"`` takes the ranks of one host if the run
    fits there according to the plan, and otherwise all ranks, and prints the reason."""
    transport: TransportName = "auto"
    """Transport of shards and gradients with ``fsdp2``. ``"torch"`` uses the collectives and the schedule of
    ``fully_shard``. ``"direct"``, for CPU processes of one host, reads exactly the bytes needed from the other ranks'
    memory, which is faster and stores less. ``"auto"`` is direct where all ranks that share shards can do so (Linux),
    and torch elsewhere."""
    reduce_dtype: ReduceDtype | None = None
    """The dtype in which ``fsdp2`` accumulates and reduces gradients: ``"fp32"``, ``"bf16"`` or ``"fp16"``. ``None`` is
    fp32 under mixed precision, and otherwise the dtype of the parameters."""
    comm_buffers: CommBuffers = "torch"
    """Allocator of the buffers of NCCL's collectives with ``fsdp2``: ``"torch"`` is the caching allocator,
    ``"process_group"`` is NCCL's own, for reductions in the network (SHARP), and ``"symmetric"`` is symmetric memory,
    for gathers by copy engines on NVLink."""
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
    after_fit: AfterFit = "auto"
    """``"whole"`` gives every rank plain, full parameters and optimizer states when the run ends. ``"sharded"`` leaves
    the shards. ``"auto"`` gives full parameters if host memory allows it, and full states when they are touched."""
    checkpoint: CheckpointForm = "file"
    """``"file"`` writes the one file that Lightning writes under DDP. ``"sharded"`` writes a directory, each rank its
    own shards. ``"sharded-async"`` does so while training continues. This setting does not matter for reading."""
    process_group_backend: str | None = None
    """``torch.distributed`` backend; ``None`` is the device's default (NCCL on CUDA, gloo on CPU). With an accelerator,
    gloo is added for the CPU."""
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
        self._resolve_file()
        object.__setattr__(self, "compile", _by_target(CompileConfig, "compile", self.compile))
        object.__setattr__(self, "activation_checkpointing", _as_checkpointing(self.activation_checkpointing))
        check_types(self)
        if self.engine == "fsdp2":
            self._check_fsdp2()
        else:
            self._check_deepspeed()
        object.__setattr__(self, "units", _as_names("units", self.units))
        declared = _as_names("elementwise_optimizers", self.elementwise_optimizers, "class names")
        object.__setattr__(self, "elementwise_optimizers", declared or ())

    @property
    def raw(self) -> RawConfig | None:
        """The content of ``deepspeed_config``; ``None`` if it is unset."""
        return self.deepspeed_config  # type: ignore[return-value]

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states and master weights are stored off the accelerator."""
        return self._offloads("optimizer")

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameter shards are stored off the accelerator between uses: with ``fully_shard`` at every stage (at
        stages 1 and 2 between steps), with DeepSpeed at stage 3."""
        return self._offloads("param") and (self.engine == "fsdp2" or self.stage == 3)

    def _offloads(self, part: str) -> bool:
        devices = {} if self.raw is None else self.raw.offload_devices
        return (devices.get(part, "none") if devices else self.offload.target) != "none"

    # The three methods below run inside __post_init__ of a frozen dataclass, hence object.__setattr__.

    def _resolve_file(self) -> None:
        """Resolves ``stage`` and ``offload``: the given value, else that of ``deepspeed_config``, else the default."""
        given = self.deepspeed_config
        raw = given if given is None or isinstance(given, RawConfig) else RawConfig.read(given)
        object.__setattr__(self, "deepspeed_config", raw)
        offload = None if self.offload is None else _by_target(OffloadConfig, "offload", self.offload)
        if raw is not None:
            if self.engine != "deepspeed":
                raise ValueError(
                    f"deepspeed_config={raw.origin!r} with engine={self.engine!r}: use engine='deepspeed'."
                )
            if self.stage is not None and raw.stage not in (None, self.stage):
                raise ValueError(
                    f"stage={self.stage!r}, but zero_optimization.stage={raw.stage} in {raw.origin}: leave stage unset"
                    f" (on the command line strategy=zero_default), or use stage={raw.stage}."
                )
            devices = set(raw.offload_devices.values()) - {"none"}
            target: Any = max(devices, default="none", key=OFFLOAD_TARGETS.index)
            if offload is None or offload.target is None:
                offload = replace(offload or OffloadConfig(), target=target)
            elif raw.offload_devices and offload.target != target:
                raise ValueError(
                    f"offload.target={offload.target!r}, but {raw.origin} has {target!r}: leave it unset or make them"
                    " equal."
                )
        if self.stage is None:
            object.__setattr__(self, "stage", (raw and raw.stage) or 3)
        if offload is None or offload.target is None:
            offload = replace(offload or OffloadConfig(), target="none")
        object.__setattr__(self, "offload", offload)

    def _check_fsdp2(self) -> None:
        offload = self.offload
        if offload.target == "nvme" and offload.pin_memory:
            raise ValueError(
                "offload.pin_memory=True with offload.target='nvme' and engine='fsdp2': pages of a file cannot be"
                " pinned; leave it unset, or use offload.target='cpu'."
            )
        if offload.ratio is not None:
            raise ValueError(f"offload.ratio={offload.ratio!r} with engine='fsdp2': use engine='deepspeed' at stage 3.")

    def _check_deepspeed(self) -> None:
        offload = self.offload
        for name, repair in _ONLY_FSDP2.items():
            given = getattr(self, name)
            if given != next(f.default for f in fields(self) if f.name == name):
                raise ValueError(f"{name}={given!r} with engine='deepspeed': {repair}, or use engine='fsdp2'.")
        if offload.target == "nvme":
            origin = f" of {self.raw.origin}" if self.raw is not None and self.raw.offload_devices else ""
            raise ValueError(
                f"offload='nvme'{origin} with engine='deepspeed', which cannot keep shards in files: use engine='fsdp2'"
                " (strategy='zero3_nvme'), or offload='cpu'."
            )
        devices = {} if self.raw is None else self.raw.offload_devices
        if devices.get("param", "none") != "none" and self.stage != 3:
            raise ValueError(
                f"offload_param.device={devices['param']!r} in deepspeed_config with stage={self.stage}: remove the"
                " section, or use stage=3."
            )
        if offload.ratio not in (None, 1) and self.stage != 3:
            raise ValueError(
                f"offload.ratio={offload.ratio!r} with stage={self.stage}: use stage=3, or leave it unset."
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
        if self.units is not None and {self.activation_checkpointing.target, self.compile.target} == {"none"}:
            raise ValueError(
                f"units={self.units!r} with engine='deepspeed', which gathers each module separately, and uses units"
                " only to recompute or compile: set activation_checkpointing='full' or compile='units', leave it unset,"
                " or use engine='fsdp2'."
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
    json: str | None = None
    """File for the plan as JSON; ``"-"`` prints it instead of the table."""

    def __post_init__(self) -> None:
        check_types(self, "plan.")
        if self.headroom >= 1:
            raise ValueError(f"plan.headroom={self.headroom!r}: use a fraction below 1.")


# -- the types of values ---------------------------------------------------------------------------------------------

_LEAST = {**dict.fromkeys(("min_unit_numel", "headroom", "gpus_per_node"), 0), "shard_size": 2}
"""Setting -> its smallest value; other numbers must be above 0."""
_KINDS = {bool: "True or False", str: "a name", int: "a whole number", float: "a number", type(None): "None"}
_hints: Any = functools.cache(get_type_hints)


def check_types(config: Any, where: str = "") -> None:
    """Raises ``ValueError`` unless each value of ``config`` has the declared type of its field, and is not too small.

    Only literals, switches, numbers and names are compared; values of other types have checks of their own.
    """
    for name, hint in _hints(type(config)).items():
        value, least = getattr(config, name), _LEAST.get(name)
        members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if not any(_admits(member, value, least) for member in members):
            admitted = " or ".join(_admitted(member, least) for member in members)
            words = [word for member in members for word in get_args(member) if isinstance(word, str)]
            meant = closest(value, words) if words and isinstance(value, str) else ""
            raise ValueError(f"{where}{name}={value!r}: use {admitted}.{meant}")


def _admits(hint: Any, value: Any, least: float | None) -> bool:
    """Whether a type without alternatives admits ``value``."""
    if get_origin(hint) is Literal:
        return any(value == each and type(value) is type(each) for each in get_args(hint))
    if hint in (int, float):
        is_number = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
        return is_number and (value > 0 if least is None else value >= least)
    return hint not in _KINDS or (isinstance(value, hint) and value != "")


def _admitted(hint: Any, least: float | None) -> str:
    """The values that the type admits, in words."""
    if get_origin(hint) is Literal:
        words = ", ".join(map(repr, get_args(hint)))
        return f"one of {words}" if "," in words else words
    bound = "above 0" if least is None else f"of {least} or more"
    return f"{_KINDS[hint]} {bound}" if hint in (int, float) else _KINDS[hint]


def _require_target(config: Any, where: str) -> None:
    """Raises ``ValueError`` if a section whose target is ``"none"`` has other settings."""
    given = [f.name for f in fields(config) if f.name != "target" and getattr(config, f.name) != f.default]
    if config.target == "none" and given:
        raise ValueError(
            f"{where}.{given[0]}={getattr(config, given[0])!r} with {where}.target='none': choose another target, or"
            f" leave {given[0]} unset."
        )


# -- sections --------------------------------------------------------------------------------------------------------


def _as_checkpointing(value: Any) -> ActivationCheckpointingConfig:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ActivationCheckpointingConfig(target="full", units=_as_names("activation_checkpointing", value))
    return _by_target(ActivationCheckpointingConfig, "activation_checkpointing", value)


def _by_target(cls: type[_Targeted], name: str, value: Any) -> _Targeted:
    """Makes a section from an instance, from its ``target`` alone, or from a mapping of its fields."""
    if isinstance(value, cls):
        return value
    values = value if isinstance(value, Mapping) else {"target": value}
    _known_only(cls, values, f"{name}.")
    return cls(**values)


def _known_only(config: type, values: Mapping[str, Any], where: str = "") -> None:
    known = [f.name for f in fields(config)]
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{where}{name}={value!r} is not a setting of {config.__name__}.{closest(name, known)}")


def _as_names(name: str, value: Any, of: str = "class names or name patterns") -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) and v for v in value):
        raise ValueError(f"{name}={value!r}: use a list of {of}, or None.")
    return tuple(value)


def closest(word: str, known: Sequence[Any]) -> str:
    """The end of an error message: the known word that was probably meant, or all of them."""
    match = get_close_matches(str(word), [str(k) for k in known], n=1)
    return f" Did you mean {match[0]!r}?" if match else f" Known: {', '.join(map(str, known))}."
