"""Makes the dict that ``deepspeed.initialize`` takes, from our settings and the user's DeepSpeed config.

This module imports neither deepspeed nor Lightning. The Trainer owns batches, accumulation, precision and clipping. A
config may repeat the last three, leave them out, or say ``"auto"``; a different value is refused with both values
named. DeepSpeed checks the keys of ``zero_optimization`` itself, when its engine starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_zero.config import PASSED_KEYS, RawConfig, ZeroConfig

AUTO = "auto"
MAX_BUCKET_NUMEL = 50_000_000
"""Elements of a bucket, unless the module has fewer. Two buckets are always allocated."""
_RATIO_SUB_GROUPS = 32
"""Sub-groups per rank. Partial offload moves entire sub-groups; with 32 of them the ratio is met within a few per
cent."""

_PRECISIONS = {"32": "fp32", "16": "fp16", "bf": "bf16", "64": "fp64"}
_SECTIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
"""Section of a config -> the dtype that it enables."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that are not settings of the strategy."""

    device_type: str
    """``"cpu"``, ``"cuda"``, ..."""
    precision: str
    """In Lightning's spelling: ``"32-true"``, ``"bf16-mixed"``, ..."""
    accumulation: int
    """``Trainer(accumulate_grad_batches)``: micro-batches per optimizer step."""
    clip_value: float | None
    """``Trainer(gradient_clip_val)``; ``None`` or 0 disables clipping."""
    clip_algorithm: str = "norm"
    world_size: int = 1
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


def ds_config(config: ZeroConfig, facts: RunFacts) -> dict[str, Any]:
    """Returns a new dict for ``deepspeed.initialize(config=...)`` in this run.

    The engine clips and accumulates gradients, as Lightning asks; DeepSpeed never does. ``gradient_clipping`` is
    written as 0.0, because without the key DeepSpeed clips to norm 1.0. DeepSpeed requires a batch size, but only its
    own dataloader and logs use the number.

    Raises:
        ValueError: If the config contradicts the settings or the Trainer, or if the device lacks a feature. The message
            names both values and the repair.
    """
    raw = config.raw or RawConfig("{}")
    _check_trainer(raw, facts)
    _check_device(raw, facts)
    made = {key: value for key, value in _without_auto(raw.content()).items() if key in PASSED_KEYS}
    made.update(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=facts.accumulation)
    made.update(gradient_clipping=0.0, zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
    if not facts.is_mixed:
        made.update(_precision_sections(config, raw, facts))
    made["zero_optimization"] = _zero_section(config, facts, raw)
    return made


# -- checks ----------------------------------------------------------------------------------------------------------


def _require_same(raw: RawConfig, key: str, its: Any, mine: Any, run: str) -> None:
    """Raises ``ValueError`` if the config's value ``its`` differs from ``mine``; ``run`` describes this run's value."""
    if its not in (None, AUTO) and its != mine:
        raise ValueError(f'{key}={its!r} in {raw.origin}, but {run}: make them equal, or write "auto" in the config.')


def _check_trainer(raw: RawConfig, facts: RunFacts) -> None:
    """Compares accumulation, clipping (always by norm in a config) and precision with the Trainer's."""
    content, clip = raw.content(), facts.clip_value or 0.0
    _require_same(
        raw,
        "gradient_accumulation_steps",
        content.get("gradient_accumulation_steps"),
        facts.accumulation,
        f"Trainer(accumulate_grad_batches={facts.accumulation})",
    )
    _require_same(
        raw,
        "gradient_clipping",
        content.get("gradient_clipping"),
        clip if facts.clip_algorithm == "norm" else clip and None,
        f"Trainer(gradient_clip_val={facts.clip_value!r}, gradient_clip_algorithm={facts.clip_algorithm!r})",
    )
    for name, dtype in _SECTIONS.items():
        run = f"Trainer(precision={facts.precision!r}), where '{dtype.removeprefix('fp')}-mixed' enables it"
        _require_same(raw, f"{name}.enabled", raw.section(name).get("enabled"), facts.dtype == dtype, run)


def _check_device(raw: RawConfig, facts: RunFacts) -> None:
    if facts.device_type == "cpu" and facts.dtype == "fp16":
        raise ValueError(
            f"precision={facts.precision!r}: DeepSpeed has no fp16 on a CPU; use bf16, with"
            " Trainer(precision='bf16-mixed')."
        )
    zero = raw.section("zero_optimization")
    if zero.get("zenflow") or (zero.get("offload_optimizer") or {}).get("super_offload"):
        raise ValueError(
            f"zenflow or super_offload in {raw.origin}: DeepSpeed would choose gradients and step by itself; remove it."
        )
    if zero.get("zero_quantized_nontrainable_weights") is True:
        raise ValueError(
            f"zero_quantized_nontrainable_weights=True in {raw.origin}: hooks and checkpoints need shards in the"
            " parameters' dtype; remove the key."
        )
    if facts.dtype == "fp64":
        raise ValueError(
            f"precision={facts.precision!r}: DeepSpeed computes in 32 or 16 bits; use precision='32-true', or"
            " engine='fsdp2'."
        )


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
    made = {**_defaults(config, facts, raw), **_without_auto(raw.section("zero_optimization"))}
    made["stage"] = config.stage
    made["memory_efficient_linear"] = False  # the engine sets that function, for its own steps only
    for part, moves in (("optimizer", config.offloads_optimizer), ("param", config.offloads_parameters)):
        if moves:
            section = made[f"offload_{part}"] = made.get(f"offload_{part}") or {}
            section.setdefault("device", config.offload.target)
            _fill(section, "pin_memory", config.offload.pin_memory, facts.device_type != "cpu", raw)
            if part == "optimizer":
                _fill(section, "ratio", config.offload.ratio, 1.0, raw)
    return made


def _defaults(config: ZeroConfig, facts: RunFacts, raw: RawConfig) -> dict[str, Any]:
    """Returns our defaults for keys that the user's config does not set. Other keys keep DeepSpeed's default."""
    bucket = min(facts.numel + facts.numel % 2, MAX_BUCKET_NUMEL)  # DeepSpeed requires an even number
    made: dict[str, Any] = {"overlap_comm": facts.device_type != "cpu", "reduce_bucket_size": bucket}  # CPU: no streams
    if config.stage == 3:
        made["stage3_prefetch_bucket_size"] = bucket
        # biases and norms of a large module
        made["stage3_param_persistence_threshold"] = min(100_000, facts.numel // 1000)
        offloaded = raw.section("zero_optimization").get("offload_optimizer") or {}
        if (config.offload.ratio or offloaded.get("ratio")) not in (None, 1, AUTO):
            made["sub_group_size"] = max(1, facts.numel // (facts.world_size * _RATIO_SUB_GROUPS))
    return made


def _fill(section: dict[str, Any], key: str, mine: Any, default: Any, raw: RawConfig) -> None:
    """Sets ``section[key]`` to our setting, else the config's value, else ``default``."""
    if mine is not None:
        _require_same(raw, key, section.get(key), mine, f"the settings say {mine!r}")
    section[key] = section.get(key, default) if mine is None else mine


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``section`` without its ``"auto"`` values, so that our defaults or DeepSpeed's apply."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in section.items()
        if value != AUTO
    }
