"""Every rule about which settings are valid. Floor 0: standard library only.

A :class:`ZeroConfig` is the single form that settings take past the entrance: registered names, keyword arguments
of :class:`~lightning_zero.strategy.ZeroStrategy` and Hydra's groups all become one. What is wrong with a value is
said here, in a ``ValueError`` that names the setting, the value found and the repair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

STAGES = (1, 2, 3)
ENGINES = ("fsdp2",)
OFFLOAD_TARGETS = ("none", "cpu", "nvme")
CHECKPOINTS = ("file", "sharded", "sharded-async")
AFTER_FIT = ("auto", "whole", "sharded")
START_METHODS = ("auto", "popen", "spawn", "fork")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where optimizer states, master weights and (stage 3) parameters live between uses."""

    target: str = "none"
    """``"none"`` (the accelerator), ``"cpu"`` (host memory) or ``"nvme"`` (files)."""

    def __post_init__(self) -> None:
        _one_of("offload.target", self.target, OFFLOAD_TARGETS)


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What to shard, with which engine, and how; immutable and validated.

    Raises:
        ValueError: naming the setting, the value found and the repair.
    """

    stage: int = 3
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters."""
    engine: str = "fsdp2"
    """The runtime that does the sharding; ``"fsdp2"`` is ``torch.distributed.fsdp.fully_shard``."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """A target (``"none"``, ``"cpu"``, ``"nvme"``) or an :class:`OffloadConfig`."""
    units: Sequence[str] | None = None
    """Modules gathered together, by class name or by name pattern (``"blocks.*"``); ``None`` chooses from the module,
    an empty list makes the whole module one unit."""
    min_unit_numel: int = 100_000
    """Automatic units smaller than this many elements are left to the unit around them."""
    find_unused_parameters: bool = True
    """Agree after each synchronized backward which parameters no rank used, so that their gradients stay ``None`` as
    under DDP. ``False`` saves one small all-reduce per step and leaves zeros there instead."""
    shard_size: int | None = None
    """Ranks that share one copy of the model: shards lie inside groups of this many consecutive ranks (the GPUs of a
    host, say), and the groups are replicas of each other (HSDP). ``None`` shards over all ranks."""
    broadcast_buffers: bool = True
    """Rank 0's buffers become everybody's at each training forward, as under DDP."""
    after_fit: str = "auto"
    """``"whole"`` gives every rank plain full parameters when the run ends, ``"sharded"`` leaves the shards,
    ``"auto"`` takes whole where host memory allows."""
    checkpoint: str = "file"
    """``"file"`` writes what Lightning writes under DDP, ``"sharded"`` a directory that each rank writes its part of,
    ``"sharded-async"`` the same while training goes on. All are read whatever is set here."""
    process_group_backend: str | None = None
    """``torch.distributed`` backend; ``None`` is the device's own (NCCL on CUDA, gloo on CPU)."""
    timeout_seconds: float = 1800.0
    """How long a collective waits for a missing rank before it raises."""
    auto: bool = False
    """The plan picks the stage when a run is set up, whatever ``stage`` says; the name ``zero_auto``."""
    device_memory_gib: float | None = None
    """Memory of one device that ``auto`` plans for; ``None`` asks the devices."""
    start_method: str = "auto"
    """How the other ranks of a machine are started: ``"popen"`` executes the program again, ``"spawn"`` and ``"fork"``
    make processes that bring their results back; ``"auto"`` is popen for programs, fork in notebooks, spawn in pytest.
    Without effect under torchrun, srun and mpirun."""
    rank_logs: str | None = None
    """Folder for one log file per rank (``rank1.log``); ``None`` is ``ranks/`` in a Hydra job's folder, and the
    terminal outside of Hydra. Used by popen."""

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or not isinstance(self.stage, int):
            raise ValueError(f"stage={self.stage!r}: the ZeRO stage is a whole number; use 1, 2 or 3.")
        _one_of("stage", self.stage, STAGES)
        _boolean("auto", self.auto)
        _one_of("engine", self.engine, ENGINES)
        object.__setattr__(self, "offload", _as_offload(self.offload))
        if self.engine == "fsdp2" and self.offload.target != "none":
            raise ValueError(
                f"offload={self.offload.target!r} is not available with engine='fsdp2': use offload='none'"
                + (" (NVMe is what DeepSpeed's zero3_nvme does)." if self.offload.target == "nvme" else ".")
            )
        object.__setattr__(self, "units", _as_names("units", self.units))
        if isinstance(self.min_unit_numel, bool) or not isinstance(self.min_unit_numel, int) or self.min_unit_numel < 0:
            raise ValueError(f"min_unit_numel={self.min_unit_numel!r}: use a number of elements, 0 or more.")
        size = self.shard_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 2):
            raise ValueError(f"shard_size={size!r}: use a number of ranks, 2 or more, or None for all of them.")
        _boolean("find_unused_parameters", self.find_unused_parameters)
        _boolean("broadcast_buffers", self.broadcast_buffers)
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

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ZeroConfig:
        """A config from keywords, naming the closest field when one is unknown."""
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise ValueError(f"{name}={kwargs[name]!r} is not a setting of ZeroConfig.{_closest(name, known)}")
        return cls(**kwargs)

    def with_(self, **changes: Any) -> ZeroConfig:
        """A copy with ``changes``, validated again."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What ``lightning-zero plan`` can be told beside the run itself."""

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
    if isinstance(value, OffloadConfig):
        return value
    if isinstance(value, str):
        _one_of("offload", value, OFFLOAD_TARGETS)
        return OffloadConfig(target=value)
    raise ValueError(f"offload={value!r}: use one of {', '.join(map(repr, OFFLOAD_TARGETS))} or an OffloadConfig.")


def _as_names(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) and v for v in value):
        raise ValueError(f"{name}={value!r}: use a list of class names or name patterns, or None.")
    return tuple(value)


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: use True or False.")


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        hint = _closest(value, allowed) if isinstance(value, str) else ""
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, allowed))}.{hint}")


def _closest(word: str, known: Sequence[Any]) -> str:
    from difflib import get_close_matches

    match = get_close_matches(str(word), [str(k) for k in known], n=1)
    return f" Did you mean {match[0]!r}?" if match else f" Known: {', '.join(map(str, known))}."
