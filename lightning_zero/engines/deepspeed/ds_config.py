"""Translates our settings, or a DeepSpeed config file, to the dict that ``deepspeed.initialize`` takes.

This module imports neither deepspeed nor Lightning. The Trainer owns batch size, accumulation, precision and clipping.
A file may repeat these values, leave them out, or say ``"auto"``; a different value is refused with both values named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_zero.config import RawConfig, ZeroConfig

AUTO = "auto"
MAX_BUCKET_NUMEL = 200_000_000
MIN_BUCKET_NUMEL = 25_000_000
_ROUND_BUCKETS = 8
_RATIO_SUB_GROUPS = 32
"""Sub-groups per rank. Partial offload moves entire sub-groups; with 32 of them the ratio is met within a few per
cent."""

_ZERO_KEYS = {
    "overlap_comm": "overlap_comm",
    "reduce_bucket_numel": "reduce_bucket_size",
    "allgather_bucket_numel": "allgather_bucket_size",
    "prefetch_numel": "stage3_prefetch_bucket_size",
    "persistence_numel": "stage3_param_persistence_threshold",
    "max_live_numel": "stage3_max_live_parameters",
    "max_reuse_distance_numel": "stage3_max_reuse_distance",
    "sub_group_numel": "sub_group_size",
    "contiguous_gradients": "contiguous_gradients",
    "reduce_scatter": "reduce_scatter",
    "round_robin_gradients": "round_robin_gradients",
    "hpz_partition_size": "zero_hpz_partition_size",
    "quantized_weights": "zero_quantized_weights",
    "quantized_nontrainable_weights": "zero_quantized_nontrainable_weights",
    "quantized_gradients": "zero_quantized_gradients",
}
"""Field of ``DeepSpeedConfig`` -> DeepSpeed's key in ``zero_optimization``."""
_NEED_CUDA = ("quantized_weights", "quantized_nontrainable_weights", "quantized_gradients")
_PRECISIONS = {"32": "fp32", "16": "fp16", "bf": "bf16", "64": "fp64"}
_SECTIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
"""Section of a file -> the dtype that it enables."""
_OURS = ("optimizer", "scheduler", "data_types", *_SECTIONS)
"""Sections of a file that are not passed to DeepSpeed unchanged."""
INERT = (
    "aio", "autotuning", "comet", "csv_monitor", "data_efficiency", "flops_profiler", "memory_breakdown", "tensorboard",
    "wandb", "wall_clock_breakdown",
)  # fmt: skip
"""Keys for DeepSpeed's own ``forward``, ``step``, dataloader, launcher and files, none of which is used here."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that are not settings of the strategy."""

    world_size: int
    device_type: str
    """``"cpu"``, ``"cuda"``, ..."""
    precision: str
    """In Lightning's spelling: ``"32-true"``, ``"bf16-mixed"``, ..."""
    accumulation: int
    """``Trainer(accumulate_grad_batches)``: micro-batches per optimizer step."""
    clip_value: float | None
    """``Trainer(gradient_clip_val)``; ``None`` or 0 disables clipping."""
    clip_algorithm: str = "norm"
    numel: int = 0
    """Number of elements of all parameters."""

    @property
    def dtype(self) -> str:
        """The dtype of forward and backward: ``"fp32"``, ``"fp16"``, ``"bf16"`` or ``"fp64"``."""
        return _PRECISIONS.get(str(self.precision)[:2], "fp32")

    @property
    def is_mixed(self) -> bool:
        """Whether Lightning's autocast computes in :attr:`dtype`, with fp32 parameters and Lightning's loss scaling."""
        return "mixed" in str(self.precision)


def bucket_numel(numel: int) -> int:
    """Returns the elements of one bucket for a module of ``numel`` elements; even, as DeepSpeed requires.

    A bucket holds an eighth of the module, so that several messages overlap with computation; at least 25 million
    elements, which saturate a link; and at most 200 million, because two buckets are always allocated."""
    bucket = max(2, min(numel, max(numel // _ROUND_BUCKETS, MIN_BUCKET_NUMEL), MAX_BUCKET_NUMEL))
    return bucket + bucket % 2


def ds_config(config: ZeroConfig, facts: RunFacts) -> dict[str, Any]:
    """Returns a new dict for ``deepspeed.initialize(config=...)`` in this run.

    The engine clips and accumulates gradients, as Lightning asks; DeepSpeed never does. ``gradient_clipping`` is
    written as 0.0, because without the key DeepSpeed clips to norm 1.0.

    Raises:
        ValueError: If the file contradicts the settings or the Trainer, or if the device lacks a feature. The message
            names both values and the repair.
    """
    raw = config.raw or RawConfig("{}")
    _check_trainer(raw, facts)
    _check_device(config, raw, facts)
    made = _without_auto({key: value for key, value in raw.content().items() if key not in _OURS})
    made.update(batches(raw, facts))
    made.update(gradient_clipping=0.0, zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
    if not facts.is_mixed:
        made.update(_precision_sections(config, raw, facts))
    _fill(made, "communication_data_type", config.deepspeed.communication_dtype, None, raw)
    made["zero_optimization"] = _zero_section(config, facts, raw)
    return made


# -- checks ----------------------------------------------------------------------------------------------------------


def _require_same(raw: RawConfig, key: str, its: Any, mine: Any, run: str) -> None:
    """Raises ``ValueError`` if the file's value ``its`` differs from ``mine``; ``run`` describes this run's value."""
    if its not in (None, AUTO) and its != mine:
        raise ValueError(f'{key}={its!r} in {raw.origin}, but {run}: make them equal, or "auto" in the file.')


def _check_device(config: ZeroConfig, raw: RawConfig, facts: RunFacts) -> None:
    zero = raw.section("zero_optimization")
    if facts.device_type == "cpu" and facts.dtype == "fp16":
        raise ValueError(
            f"precision={facts.precision!r}: DeepSpeed has no fp16 on a CPU; use bf16, with"
            " Trainer(precision='bf16-mixed')."
        )
    for name in _NEED_CUDA if facts.device_type != "cuda" else ():
        if getattr(config.deepspeed, name) or zero.get(_ZERO_KEYS[name]) is True:
            raise ValueError(
                f"deepspeed.{name}=True on {facts.device_type!r}: DeepSpeed's quantization needs CUDA; remove the"
                " setting, or use precision='bf16-mixed', which also halves the bytes sent."
            )
    if facts.dtype == "fp64":
        raise ValueError(
            f"precision={facts.precision!r}: DeepSpeed computes in 32 or 16 bits; use precision='32-true', or"
            " engine='fsdp2'."
        )
    size = config.deepspeed.hpz_partition_size or 1
    if facts.world_size % size:
        raise ValueError(
            f"deepspeed.hpz_partition_size={size} with {facts.world_size} ranks: use a divisor of {facts.world_size}."
        )


def _check_trainer(raw: RawConfig, facts: RunFacts) -> None:
    """Compares clipping (always by norm in a file) and precision with the Trainer's."""
    clip = facts.clip_value or 0.0
    _require_same(
        raw,
        "gradient_clipping",
        raw.content().get("gradient_clipping"),
        clip if facts.clip_algorithm == "norm" else clip and None,
        f"Trainer(gradient_clip_val={facts.clip_value!r}, gradient_clip_algorithm={facts.clip_algorithm!r})",
    )
    for name, dtype in _SECTIONS.items():
        run = f"Trainer(precision={facts.precision!r}), where '{dtype.removeprefix('fp')}-mixed' enables it"
        _require_same(raw, f"{name}.enabled", raw.section(name).get("enabled"), facts.dtype == dtype, run)


def batches(raw: RawConfig, facts: RunFacts, batch_size: int | None = None) -> dict[str, int]:
    """Returns accumulation, micro-batch size and global batch size of this run under DeepSpeed's keys.

    DeepSpeed requires these numbers, though only its own dataloader and logs use them.

    Args:
        raw: The file.
        facts: Facts about the run.
        batch_size: The dataloader's batch size. ``None`` means unknown; the file's value is used.

    Raises:
        ValueError: If the file's numbers are invalid, or differ from this run's.
    """
    steps, per_rank, total = "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size"
    content = raw.content()
    its = {key: content[key] for key in (steps, per_rank, total) if content.get(key) not in (None, AUTO)}
    for key, value in its.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{key}={value!r} in {raw.origin}: use a whole number, 1 or more, or "auto".')
    num_micro = facts.accumulation * facts.world_size
    micro = batch_size or its.get(per_rank) or max(1, its.get(total, 1) // num_micro)
    mine = {steps: facts.accumulation, per_rank: micro, total: micro * num_micro}
    parts = f"batch_size={micro}, accumulate_grad_batches={facts.accumulation}, {facts.world_size} ranks"
    for key, value in its.items():
        _require_same(raw, key, value, mine[key], f"this run has {mine[key]} ({parts})")
    return mine


def inert_settings(raw: RawConfig, own_optimizer: bool) -> list[str]:
    """Lists the settings of a file that have no effect in a run under Lightning.

    Args:
        raw: The file.
        own_optimizer: Whether the module has a ``configure_optimizers``.
    """
    content = raw.content()
    found = [name for name in INERT if content.get(name) is True or _enables(content.get(name))]
    if True in raw.section("activation_checkpointing").values():
        found.append("activation_checkpointing")
    if own_optimizer:
        found += [name for name in ("optimizer", "scheduler") if raw.section(name)]
    if _enables(content.get("fp16")):  # Lightning's GradScaler scales losses, so DeepSpeed's keys are unused
        found += [f"fp16.{name}" for name in _without_auto(raw.section("fp16")) if name != "enabled"]
    return found


def _enables(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


# -- sections --------------------------------------------------------------------------------------------------------


def _precision_sections(config: ZeroConfig, raw: RawConfig, facts: RunFacts) -> dict[str, Any]:
    """Makes ``fp16``, ``bf16`` and ``data_types`` for parameters in 16 bits, with master weights and sums in fp32."""
    if facts.dtype == "fp32":
        return {}
    section = raw.section(facts.dtype) or raw.section("bfloat16")
    types = {"grad_accum_dtype": "fp32", **_without_auto(raw.section("data_types"))}
    if config.stage == 1:  # with fp32 sums at stage 1 DeepSpeed chooses an optimizer class that has no pieces
        del types["grad_accum_dtype"]
    return {facts.dtype: {**_without_auto(section), "enabled": True}, "data_types": types}


def _zero_section(config: ZeroConfig, facts: RunFacts, raw: RawConfig) -> dict[str, Any]:
    made = _without_auto(raw.section("zero_optimization"))
    made["stage"] = config.stage
    made["memory_efficient_linear"] = False  # the engine sets that function, for its own steps only
    defaults = _defaults(config, facts)
    for f in fields(config.deepspeed):
        if key := _ZERO_KEYS.get(f.name):
            _fill(made, key, getattr(config.deepspeed, f.name), defaults.get(f.name), raw)
    for part, moves in (("optimizer", config.offloads_optimizer), ("param", config.offloads_parameters)):
        if moves:
            section = made[f"offload_{part}"] = made.get(f"offload_{part}") or {}
            section.setdefault("device", config.offload.target)
            _fill(section, "pin_memory", config.offload.pin_memory, facts.device_type != "cpu", raw)
            if part == "optimizer":
                _fill(section, "ratio", config.offload.ratio, None, raw)
    if config.stage == 1 and made.get("contiguous_gradients") is False and not made["overlap_comm"]:
        raise ValueError(
            "contiguous_gradients=False at stage 1: DeepSpeed then does not say when a gradient arrives; set"
            " deepspeed.overlap_comm=True as well, or use stage=2."
        )
    return made


def _defaults(config: ZeroConfig, facts: RunFacts) -> dict[str, Any]:
    """Returns defaults for keys that neither our settings nor the file set. Other keys keep DeepSpeed's default."""
    bucket = bucket_numel(facts.numel)
    made: dict[str, Any] = {
        "overlap_comm": facts.device_type != "cpu",  # a CPU has no streams
        "reduce_bucket_numel": bucket,
    }
    if config.stage == 3:
        made["prefetch_numel"] = min(bucket, 50_000_000)
        made["persistence_numel"] = min(100_000, facts.numel // 1000)  # biases and norms of a large module
        if config.offload.ratio not in (None, 1):
            made["sub_group_numel"] = max(1, facts.numel // (facts.world_size * _RATIO_SUB_GROUPS))
    else:
        made["allgather_bucket_numel"] = bucket
    return made


def _fill(section: dict[str, Any], key: str, mine: Any, default: Any, raw: RawConfig) -> None:
    """Sets ``section[key]`` to our setting, else the file's value, else ``default`` (``None``: DeepSpeed's own)."""
    its = section.get(key)
    if mine is not None:
        _require_same(raw, key, its, mine, f"the settings say {mine!r}")
        section[key] = mine
    elif its is None and default is not None:
        section[key] = default


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``section`` without its ``"auto"`` values, so that our defaults or DeepSpeed's apply."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in section.items()
        if value != AUTO
    }
