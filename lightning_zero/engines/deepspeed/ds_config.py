"""From our settings, or from a DeepSpeed config file, to the dict that ``deepspeed.initialize`` takes.

Pure: it needs neither deepspeed nor Lightning. What Lightning sets too (batch size, accumulation, precision, clipping)
is Lightning's; a file may repeat it, leave it out, say ``"auto"``, or be refused with both values named.
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
"""Partial offload moves whole sub-groups: so many, that the share is met within a few per cent."""

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
_OURS = ("optimizer", "scheduler", "fp16", "bf16", "bfloat16")
"""Sections of a file that do not go on to DeepSpeed as they are."""
_SCALING = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
"""Settings of the section ``fp16`` -> DeepSpeed's default (deepspeed/runtime/precision_config.py)."""
_INERT = (
    "autotuning", "comet", "csv_monitor", "data_efficiency", "flops_profiler", "memory_breakdown", "tensorboard",
    "wandb", "wall_clock_breakdown",
)  # fmt: skip
"""Keys that only ``engine.forward``, ``engine.step``, its dataloader or its launcher read, none of which runs here."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a run beside its settings."""

    world_size: int
    device_type: str
    """``"cpu"``, ``"cuda"``, ..."""
    precision: str
    """As Lightning writes it: ``"32-true"``, ``"bf16-mixed"``, ..."""
    accumulation: int
    """``Trainer(accumulate_grad_batches)``: micro-batches per optimizer step."""
    clip_value: float | None
    """``Trainer(gradient_clip_val)``; ``None`` or 0 clips nothing."""
    clip_algorithm: str = "norm"
    numel: int = 0
    """Elements of all parameters."""

    @property
    def dtype(self) -> str:
        """The dtype of forward and backward: ``"fp32"``, ``"fp16"``, ``"bf16"`` or ``"fp64"``."""
        return _PRECISIONS.get(str(self.precision)[:2], "fp32")


def bucket_numel(numel: int) -> int:
    """Elements of one message for a module of ``numel``: an eighth of it, so that several overlap with computing, but
    at least 25 million, which fill a link, and at most 200 million, as two buckets are always allocated. A small module
    is one bucket: DeepSpeed's own 500 million take 2 GB whatever the module's size. Even, as DeepSpeed wants it."""
    bucket = max(2, min(numel, max(numel // _ROUND_BUCKETS, MIN_BUCKET_NUMEL), MAX_BUCKET_NUMEL))
    return bucket + bucket % 2


def persistence_numel(numel: int) -> int:
    """Parameters that stay whole at stage 3: biases and norms of a large module, nothing that counts in a small one."""
    return min(100_000, numel // 1000)


def ds_config(config: ZeroConfig, facts: RunFacts) -> dict[str, Any]:
    """The dict for ``deepspeed.initialize(config=...)`` in this run; a new one each time.

    Gradients are clipped and accumulated by the engine, as Lightning asks for it, never by DeepSpeed: its clipping is
    written as 0.0, because without the key it clips to norm 1.0.

    Raises:
        ValueError: Where the file and the settings or the Trainer contradict each other, or the device cannot do it;
            naming both values and the repair.
    """
    raw = config.raw or RawConfig("{}")
    check_device(config, facts)
    check_against_trainer(raw, facts)
    _check_loss_scaling(raw, facts)
    made = {key: value for key, value in raw.content().items() if key not in _OURS and value != AUTO}
    micro, train = _batch_sizes(raw, facts)
    made["train_micro_batch_size_per_gpu"], made["train_batch_size"] = micro, train
    made["gradient_accumulation_steps"] = facts.accumulation
    made["gradient_clipping"] = 0.0
    made["zero_allow_untested_optimizer"] = True
    made["zero_force_ds_cpu_optimizer"] = False
    made.update(_precision_sections(raw, facts))
    _fill(made, "communication_data_type", config.deepspeed.communication_dtype, None, raw)
    made["zero_optimization"] = _zero_section(config, facts, raw)
    return made


# -- checks ----------------------------------------------------------------------------------------------------------


def check_device(config: ZeroConfig, facts: RunFacts) -> None:
    """Raises ``ValueError`` for settings that DeepSpeed does not support on this kind of device."""
    raw = config.raw or RawConfig("{}")
    where = raw.origin
    if facts.device_type == "cpu":
        if raw.section("fp16").get("enabled") is True:
            raise ValueError(
                f'fp16.enabled=True in {where}: fp16 does not train on a CPU; use bf16 instead: "bf16": {{"enabled":'
                " true} with Trainer(precision='bf16-mixed')."
            )
        if facts.dtype == "fp16":
            raise ValueError(
                f"precision={facts.precision!r}: DeepSpeed has no fp16 on a CPU; use precision='bf16-mixed'."
            )
        if config.deepspeed.communication_dtype == "fp16" or raw.content().get("communication_data_type") == "fp16":
            raise ValueError("deepspeed.communication_dtype='fp16' on a CPU: use 'bf16' or 'fp32'.")
        if raw.section("zero_optimization").get("offload_optimizer", {}).get("super_offload"):
            raise ValueError(f"offload_optimizer.super_offload=True in {where}: it needs CUDA; leave it out.")
    if facts.device_type != "cuda":
        zero = raw.section("zero_optimization")
        for name in _NEED_CUDA:
            if getattr(config.deepspeed, name) or zero.get(_ZERO_KEYS[name]) is True:
                raise ValueError(
                    f"deepspeed.{name}=True on {facts.device_type!r}: DeepSpeed's quantization is for CUDA; leave it"
                    " out, or use precision='bf16-mixed', which halves what is sent too."
                )
    if facts.dtype == "fp64":
        raise ValueError(
            f"precision={facts.precision!r}: DeepSpeed computes in 32 or 16 bits; use precision='32-true', or"
            " engine='fsdp2'."
        )
    size = config.deepspeed.hpz_partition_size or 1
    if facts.world_size % size:
        raise ValueError(f"deepspeed.hpz_partition_size={size} with {facts.world_size} ranks: use a divisor of them.")


def check_against_trainer(raw: RawConfig, facts: RunFacts) -> None:
    """Raises ``ValueError`` if the file and the Trainer contradict each other."""
    where, content = raw.origin, raw.content()
    steps, _ = _file_batches(raw, facts)
    if steps is not None and steps != facts.accumulation:
        raise ValueError(
            f"gradient_accumulation_steps={steps} in {where}, but Trainer(accumulate_grad_batches="
            f'{facts.accumulation}): make them equal, or "auto" in the file.'
        )
    clipping, mine = content.get("gradient_clipping", AUTO), facts.clip_value or 0.0
    if clipping not in (AUTO, None):
        if mine and clipping and facts.clip_algorithm != "norm":
            raise ValueError(
                f"gradient_clipping={clipping} in {where} is by norm, but Trainer(gradient_clip_algorithm="
                f'{facts.clip_algorithm!r}): make them equal, or "auto" in the file.'
            )
        if float(clipping) != float(mine):
            raise ValueError(
                f"gradient_clipping={clipping} in {where}, but Trainer(gradient_clip_val={facts.clip_value!r}): make"
                ' them equal, or "auto" in the file.'
            )
    for name in ("fp16", "bf16", "bfloat16"):
        enabled = raw.section(name).get("enabled", AUTO)
        dtype = name[:4]
        if enabled != AUTO and bool(enabled) != (facts.dtype == dtype):
            wanted = f"use Trainer(precision={_precision_for(dtype)!r})" if enabled else "take the section out"
            raise ValueError(
                f"{name}.enabled={enabled} in {where}, but Trainer(precision={facts.precision!r}): {wanted}, or"
                ' "auto" in the file.'
            )


def _check_loss_scaling(raw: RawConfig, facts: RunFacts) -> None:
    if facts.dtype != "fp16":
        return
    for name, value in _without_auto(raw.section("fp16")).items():
        if name in _SCALING and value != _SCALING[name]:
            raise ValueError(
                f"fp16.{name}={value!r} in {raw.origin}: losses are scaled by Lightning's GradScaler, if at all, as"
                " under DDP; leave it out, and give the Trainer plugins=[MixedPrecision('16-mixed', 'cuda',"
                " scaler=torch.amp.GradScaler(...))] for another scale."
            )


def inert_sections(raw: RawConfig) -> list[str]:
    """The sections of a file that have no effect in a run under Lightning."""
    content = raw.content()
    found = []
    for name in _INERT:
        value = content.get(name)
        if (value.get("enabled") is True or _switches_on(value)) if isinstance(value, dict) else value is True:
            found.append(name)
    return found


def _switches_on(section: Mapping[str, Any]) -> bool:
    """Whether a section has parts that are switched on (``data_efficiency``)."""
    return any(
        isinstance(part, Mapping) and (part.get("enabled") is True or _switches_on(part)) for part in section.values()
    )


def check_micro_batch(raw: RawConfig | None, facts: RunFacts, batch_size: int | None) -> None:
    """Raises ``ValueError`` if the file asks for another micro-batch than the dataloader makes (``None``: unknown)."""
    if raw is None or batch_size is None:
        return
    micro = _file_batches(raw, facts)[1]
    if micro is None or micro == batch_size:
        return
    content = raw.content()
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu")
    said = ", ".join(f"{key}={content[key]}" for key in keys if key in content)
    raise ValueError(
        f"{said} in {raw.origin} means micro-batches of {micro} on"
        f" {facts.world_size} ranks with {facts.accumulation} per step, but the dataloader's batch_size={batch_size}:"
        f' use DataLoader(batch_size={micro}), or "auto" in the file.'
    )


def _precision_for(dtype: str) -> str:
    return {"fp16": "16-mixed", "bf16": "bf16-mixed"}[dtype]


def _file_batches(raw: RawConfig, facts: RunFacts) -> tuple[int | None, int | None]:
    """``(accumulation, micro-batch)`` that the file asks for; ``None`` if it leaves it open."""
    content = raw.content()
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, steps = (None if content.get(key) in (None, AUTO) else content[key] for key in keys)
    for key, value in zip(keys, (train, micro, steps), strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f'{key}={value!r} in {raw.origin}: use a whole number, 1 or more, or "auto".')
    if train is not None:
        if micro is not None and steps is None:
            steps, rest = divmod(train, micro * facts.world_size)
            parts = f"{micro} a rank on {facts.world_size} ranks"
        else:
            each, rest = divmod(train, (steps or facts.accumulation) * facts.world_size)
            parts = f"{steps or facts.accumulation} micro-batches on {facts.world_size} ranks"
            if not rest and micro is not None and micro != each:
                raise ValueError(
                    f"train_batch_size={train} in {raw.origin} is not train_micro_batch_size_per_gpu={micro} x"
                    f' gradient_accumulation_steps={steps} x {facts.world_size} ranks: change one, or use "auto".'
                )
            micro = each
        if rest:
            raise ValueError(
                f"train_batch_size={train} in {raw.origin} cannot be split into {parts}: use a multiple, another number"
                ' of ranks, or "auto".'
            )
    return steps, micro


def _batch_sizes(raw: RawConfig, facts: RunFacts) -> tuple[int, int]:
    """``(micro-batch, global batch)``; DeepSpeed wants numbers, though only its own dataloader and logs use them."""
    micro = _file_batches(raw, facts)[1] or 1
    return micro, micro * facts.accumulation * facts.world_size


# -- sections --------------------------------------------------------------------------------------------------------


def _precision_sections(raw: RawConfig, facts: RunFacts) -> dict[str, Any]:
    """``fp16``, ``bf16`` and ``data_types``: parameters in the precision's dtype, master weights and sums in fp32."""
    made: dict[str, Any] = {}
    for name in ("fp16", "bf16"):
        section = _without_auto(raw.section(name) or (raw.section("bfloat16") if name == "bf16" else {}))
        if section or facts.dtype == name:
            made[name] = {**section, "enabled": facts.dtype == name}
    if facts.dtype in ("fp16", "bf16"):
        made["data_types"] = {"grad_accum_dtype": "fp32", **_without_auto(raw.section("data_types"))}
    return made


def _zero_section(config: ZeroConfig, facts: RunFacts, raw: RawConfig) -> dict[str, Any]:
    made = _without_auto(raw.section("zero_optimization"))
    for old in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):  # become sections below
        made.pop(old, None)
    made["stage"] = config.stage
    defaults = _defaults(config, facts)
    for f in fields(config.deepspeed):
        if key := _ZERO_KEYS.get(f.name):
            short = key.removeprefix("stage3_")  # DeepSpeed takes both
            if short in made and short != key:
                made[key] = made.pop(short)
            _fill(made, key, getattr(config.deepspeed, f.name), defaults.get(f.name), raw)
    for part, moves in (("optimizer", config.offloads_optimizer), ("param", config.offloads_parameters)):
        section = _offload_section(part, moves, config, facts, raw)
        if section is not None:
            made[f"offload_{part}"] = section
    return made


def _defaults(config: ZeroConfig, facts: RunFacts) -> dict[str, Any]:
    """Defaults for keys that neither our settings nor the file set; the rest is DeepSpeed's own default."""
    bucket = bucket_numel(facts.numel)
    made: dict[str, Any] = {
        "overlap_comm": facts.device_type != "cpu",  # there are no streams on a CPU
        "reduce_bucket_numel": bucket,
    }
    if config.stage == 3:
        made["prefetch_numel"] = min(bucket, 50_000_000)
        made["persistence_numel"] = persistence_numel(facts.numel)
        if config.offload.ratio not in (None, 1):
            made["sub_group_numel"] = max(1, facts.numel // (facts.world_size * _RATIO_SUB_GROUPS))
    else:
        made["allgather_bucket_numel"] = bucket
    return made


def _offload_section(
    part: str, moves: bool, config: ZeroConfig, facts: RunFacts, raw: RawConfig
) -> dict[str, Any] | None:
    zero, offload = raw.section("zero_optimization"), config.offload
    made = _without_auto(zero.get(f"offload_{part}") or {})
    if not moves:
        return made or None
    made.setdefault("device", offload.target)
    pinned = zero.get("cpu_offload_use_pin_memory")
    _fill(made, "pin_memory", offload.pin_memory, facts.device_type != "cpu" if pinned is None else pinned, raw)
    if part == "optimizer" and made["device"] == "cpu":
        _fill(made, "ratio", offload.ratio, None, raw)
    return made


def _fill(section: dict[str, Any], key: str, mine: Any, default: Any, raw: RawConfig) -> None:
    """``section[key]`` is our setting, else the file's, else the default (``None``: DeepSpeed's own)."""
    its = section.get(key)
    if mine is not None:
        if its is not None and its != mine:
            raise ValueError(
                f"{key}={its!r} in {raw.origin}, but the settings say {mine!r}: leave one out or make them equal."
            )
        section[key] = mine
    elif its is None and default is not None:
        section[key] = default


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """``section`` without its ``"auto"`` values: ours or DeepSpeed's defaults take their places."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in section.items()
        if value != AUTO
    }
