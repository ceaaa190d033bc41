"""The keys of a DeepSpeed config file, level by level: one that DeepSpeed does not know is an error, not ignored.

DeepSpeed refuses unknown keys in some sections, when the engine starts, and ignores them everywhere else: with
``{"zero_optimizaton": {"stage": 2}}`` it would train at another stage. Read in DeepSpeed 0.19.8 and written down here,
so that a mistake is found when the strategy is made, before ranks start and without importing DeepSpeed. A test
compares this table with DeepSpeed's own models and with the keys that it looks for. Pure, as ``ds_config`` is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from lightning_zero.config import RawConfig

Schema: TypeAlias = "dict[str, Schema | None]"
"""Key -> the keys of that section; ``None`` for a value, and for a section in which the user chooses the names."""

READ_IN = "0.19.8"


def _keys(names: str, **sections: Schema) -> Schema:
    return {**dict.fromkeys(names.split()), **sections}


_ZERO = _keys(
    """allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload cpu_offload_param
    cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters legacy_stage1
    load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear overlap_comm override_module_apply
    parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory stage stage3_gather_fp16_weights_on_model_save sub_group_size
    use_multi_rank_bucket_allreduce zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights""",
    leaf_module=_keys("classes name_suffixes names"),
    offload_optimizer=_keys(
        "buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio"
        " super_offload"
    ),
    offload_param=_keys("buffer_count buffer_size device max_in_cpu nvme_path pin_memory"),
    zenflow=_keys(
        "auto_ratio full_warm_up_rounds offload overlap_step pt_reserved_cores_perc select_interval select_strategy"
        " steps_per_epoch topk_ratio update_interval"
    ),
)
for _name in (
    "allgather_sequential gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance"
    " model_persistence_threshold module_granularity_threshold param_persistence_threshold prefetch_bucket_size"
    " use_all_reduce_for_fetch_params"
).split():
    _ZERO |= dict.fromkeys((_name, f"stage3_{_name}"))  # DeepSpeed takes both

_BF16 = _keys("bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update")
_TENSOR_PARALLEL = _keys("mpu tp_grain_size tp_group tp_size")

KNOWN = _keys(
    """allgather_size communication_data_type dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc
    dump_state gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor log_level
    managed_gradient_accumulation memory_breakdown pipeline prescale_gradients seq_parallel_communication_data_type
    sequence_parallel_size steps_per_print train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer""",
    activation_checkpointing=_keys(
        "contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations profile"
        " synchronize_checkpoint_boundary"
    ),
    aio=_keys("block_size intra_op_parallelism overlap_events queue_depth single_submit thread_count use_gds"),
    autotuning=_keys(
        """arg_mappings enabled end_profile_step exps_dir fast max_train_batch_size max_train_micro_batch_size_per_gpu
        metric metric_path min_train_batch_size min_train_micro_batch_size_per_gpu model_info_path mp_size
        num_tuning_micro_batch_sizes overwrite results_dir start_profile_step tuner_early_stopping tuner_num_trials
        tuner_type""",
        model_info=_keys("hidden_size num_layers num_params profile"),
    ),
    bf16=_BF16,
    bfloat16=_BF16,
    checkpoint=_keys(
        "checkpoint_serialization load_universal tag_validation use_node_local_storage",
        parallel_write=_keys("pipeline_stage"),
        writer=_keys("data_parallel decoupled io_buffer_double io_buffer_size io_multiplier show_statistics type"),
    ),
    comet=_keys("api_key enabled experiment_key experiment_name mode online project samples_log_interval workspace"),
    comms_logger=_keys("debug enabled prof_all prof_ops verbose"),
    compile=_keys(
        """autoep_non_moe debug_log deepcompile double_buffer free_activation free_activation_threshold
        keep_all_input_tensors keep_int_input_tensors offload_activation offload_activation_pin_memory
        offload_opt_states offload_parameters passes symmetric_memory sync_after_allgather sync_after_reduce
        sync_before_allgather sync_before_reduce"""
    ),
    csv_monitor=_keys("enabled job_name output_path"),
    data_efficiency=_keys(
        "enabled seed",
        data_routing=_keys("enabled random_ltd"),
        data_sampling=_keys(
            "curriculum_learning enabled num_epochs num_workers pin_memory",
            dynamic_batching=_keys(
                "enabled lr_scaling_method max_batch_size max_tokens metrics_path min_batch_size"
                " sequence_picking_order verbose"
            ),
        ),
    ),
    data_types=_keys("buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype"),
    expert_parallel=_keys(
        """async_split_plan autoep_size combine_impl comm_backend comm_max_tokens_per_rank comm_num_sm comm_qp_margin
        disable_triton_grouped_mm enabled expert_activation expert_pattern expert_tensor_parallel_size expert_w1
        expert_w2 expert_w3 gate_up_impl has_shared_experts load_balance_coeff moe_layer_pattern num_expert_groups
        num_experts_attr num_limited_groups preset_model route_norm route_scale routed_scaling_factor router_pattern
        row_weighting_impl score_apply score_func shared_experts_gate_pattern shared_experts_pattern top_k top_k_attr
        use_grouped_mm validate_folding_routing"""
    ),
    flops_profiler=_keys("detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules"),
    fp16=_keys(
        "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power"
        " loss_scale loss_scale_window min_loss_scale"
    ),
    hybrid_engine=_keys(
        "enable_cuda_graph enabled inference_tp_size max_out_tokens pin_parameters release_inference_cache"
        " tp_gather_partition_size"
    ),
    optimizer=_keys("legacy_fusion params type"),
    scheduler=_keys("params type"),
    tensor_parallel=_keys(
        """autotp_size dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config preset_model
        replace_with_kernel_inject tp_overlap_comm vocab_parallel_ce_backend vocab_parallel_lm_head""",
        tensor_parallel=_TENSOR_PARALLEL,
        tp=_TENSOR_PARALLEL,
    ),
    tensorboard=_keys("enabled job_name output_path"),
    timers=_keys("", throughput=_keys("enabled synchronized")),
    torch_autocast=_keys("dtype enabled lower_precision_safe_modules"),
    wandb=_keys("enabled group project team"),
    weight_quantization=_keys("enabled num_bits post_init_quant q_groups q_type quantized_initialization"),
    zero_optimization=_ZERO,
)

REMOVED = {
    "": (
        "amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula",
        "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients",
    ),
    "zero_optimization": ("mics_hierarchical_params_gather", "mics_shard_size", "zeropp_loco_param"),
}  # fmt: skip
"""Section -> keys that DeepSpeed had, and refuses now even where they are switched off."""

DEPRECATED = {
    ("zero_optimization", "cpu_offload"): 'offload_optimizer: {"device": "cpu"}',
    ("zero_optimization", "cpu_offload_param"): 'offload_param: {"device": "cpu"}',
    ("zero_optimization", "cpu_offload_use_pin_memory"): "pin_memory in offload_optimizer and offload_param",
}
"""Section and old key -> what to write today. ``ds_config`` translates them."""


def check_keys(raw: RawConfig) -> None:
    """Raises ``ValueError`` where ``raw`` has a key that DeepSpeed does not know, naming the nearest that it does.

    At the top level a name that begins with ``_`` or ``//`` is a comment.
    """
    for path, key, known in _unknown(raw.content(), KNOWN, ""):
        full = f"{path}.{key}" if path else key
        if key in REMOVED.get(path, ()):
            raise ValueError(f"{full} in {raw.origin}: DeepSpeed has removed it; take it out.")
        message = f"{full} in {raw.origin} is not a setting of DeepSpeed's; {_repair(path, key, known)}"
        if not get_close_matches(key, known, n=1, cutoff=0.8) and _installed() not in (READ_IN, None):
            # A name that resembles none may be new in that version.
            warnings.warn(f"{message} It was unknown in {READ_IN}; {_installed()} is installed.", stacklevel=2)
            continue
        raise ValueError(message)


def deprecated_keys(raw: RawConfig) -> list[str]:
    """A line for each key of ``raw`` that has another name today."""
    return [
        f"{section}.{old} in {raw.origin} is deprecated: use {new}."
        for (section, old), new in DEPRECATED.items()
        if old in raw.section(section)
    ]


def _unknown(content: Mapping[str, Any], known: Schema, path: str) -> Iterator[tuple[str, str, Schema]]:
    for key, value in content.items():
        if not path and key.startswith(("_", "//")):
            continue
        if key not in known:
            yield path, key, known
        elif isinstance(value, Mapping) and (inner := known[key]) is not None:
            yield from _unknown(value, inner, f"{path}.{key}" if path else key)


def _repair(path: str, key: str, known: Schema) -> str:
    if close := get_close_matches(key, known, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    if sections := [section for section in _sections_with(key, KNOWN, "") if section != path]:
        return f"it belongs into {' or '.join(section or 'the top level' for section in sections[:2])}."
    if close := get_close_matches(key, known, n=1):
        return f"did you mean {close[0]}?"
    return f"{path or 'the top level'} has {', '.join(sorted(known))}."


def _sections_with(key: str, known: Schema, path: str) -> list[str]:
    found = [path] if key in known else []
    for name, inner in known.items():
        if inner is not None:
            found += _sections_with(key, inner, f"{path}.{name}" if path else name)
    return found


def _installed() -> str | None:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return None
