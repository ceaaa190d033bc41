"""Keys of DeepSpeed config files: misspelled ones are errors, all that DeepSpeed knows are not."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zero import ZeroStrategy
from lightning_zero.config import RawConfig
from lightning_zero.engines.deepspeed.known_keys import check_keys

pytest.importorskip("deepspeed")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"zero_optimizaton": {"stage": 2}}, ["zero_optimizaton in", "did you mean zero_optimization?"]),
        ({"zero_optimization": {"stge": 2}}, ["zero_optimization.stge in", "did you mean stage?"]),
        (
            {"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}},
            ["zero_optimization.offload_optimizer.devic in", "did you mean device?"],
        ),
        ({"overlap_comm": True}, ["overlap_comm in", "it belongs in zero_optimization."]),
        ({"zero_optimization": {"stage": 2, "train_batch_size": 1}}, ["it belongs in the top level."]),
        ({"nonsense": 1}, ["nonsense in", "the top level has activation_checkpointing, aio,"]),
        ({"optimizer": {"type": "AdamW", "param": {}}}, ["optimizer.param in", "did you mean params?"]),
        ({"zero_optimization": {"prefetch_bucket_size": 1}}, ["did you mean stage3_prefetch_bucket_size?"]),
        ({"zero_optimization": {"cpu_offload": True}}, ["cpu_offload in", "is deprecated: use offload_optimizer."]),
    ],
)
def test_an_unknown_key_is_an_error_when_the_strategy_is_made(content: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the parts below are the match)
        ZeroStrategy(engine="deepspeed", deepspeed_config=content)
    for part in parts:
        assert part in str(caught.value)


def test_the_file_is_named(tmp_path: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimizaton": {"stage": 2}}')
    with pytest.raises(ValueError, match=f"zero_optimizaton in {path} is not a setting of DeepSpeed;"):
        ZeroStrategy(engine="deepspeed", deepspeed_config=path)


AUTO_FILE = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "offload_optimizer": {
            "device": "nvme", "nvme_path": "/nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False,
        },
        "offload_param": {
            "device": "nvme", "nvme_path": "/nvme", "pin_memory": True, "buffer_count": 5, "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {
        "block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
"""As transformers' documentation shows it."""

DOCUMENTED = {
    "_comment": "as https://www.deepspeed.ai/docs/config-json/ shows them",
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "dump_state": False,
    "communication_data_type": "fp32", "prescale_gradients": False, "gradient_predivide_factor": 1.0,
    "data_types": {"grad_accum_dtype": "fp32"}, "disable_allgather": False, "memory_breakdown": False,
    "checkpoint": {
        "tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False,
        "parallel_write": {"pipeline_stage": False},
    },
    "zero_optimization": {
        "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
        "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3}, "round_robin_gradients": True,
        "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_gradients": False,
        "leaf_module": {"classes": ["a.B"], "names": ["c"]},
    },
    "activation_checkpointing": {
        "partition_activations": False, "cpu_checkpointing": False, "contiguous_memory_optimization": False,
        "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False,
    },
    "flops_profiler": {
        "enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True,
        "output_file": None,
    },
    "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False, "prof_ops": ["all_reduce"]},
    "tensorboard": {"enabled": False, "output_path": "output/ds_logs/", "job_name": "train"},
    "wandb": {"enabled": False, "group": "my_group", "team": "my_team", "project": "my_project"},
    "csv_monitor": {"enabled": False, "output_path": "output/ds_logs/", "job_name": "train"},
    "comet": {"enabled": False, "workspace": "w", "project": "p", "samples_log_interval": 50, "experiment_name": "e"},
    "autotuning": {
        "enabled": False, "arg_mappings": {"any": "--name"}, "metric": "throughput", "fast": True, "overwrite": True,
        "max_train_batch_size": None, "tuner_type": "gridsearch", "model_info": {"num_params": 1},
    },
    "data_efficiency": {
        "enabled": True, "seed": 1234,
        "data_routing": {"enabled": True, "random_ltd": {"enabled": True, "total_layer_num": 24, "any": {}}},
        "data_sampling": {
            "enabled": True, "num_epochs": 1, "num_workers": 0,
            "curriculum_learning": {"enabled": True, "data_cluster_path": "x", "curriculum_metrics": {"any": {}}},
            "dynamic_batching": {"enabled": True, "metrics_path": "x", "max_tokens": 1},
        },
    },
    "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
    "compile": {"deepcompile": False, "passes": None}, "pipeline": {"stages": "auto", "any": 1},
    "timers": {"throughput": {"enabled": True, "synchronized": True}},
    "weight_quantization": {"quantized_initialization": {"any": 1}, "post_init_quant": {"any.layer": {}}},
    "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}},
}  # fmt: skip


@pytest.mark.parametrize("content", [AUTO_FILE, DOCUMENTED], ids=["auto", "documented"])
def test_what_is_documented_is_known(content: dict[str, Any]) -> None:
    check_keys(RawConfig.read(content))
