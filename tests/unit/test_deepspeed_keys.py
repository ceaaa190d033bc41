"""Keys of DeepSpeed config files: misspelled ones are errors, all that DeepSpeed knows are not."""

from __future__ import annotations

import typing
from importlib import import_module
from typing import Any

import pytest

from lightning_zero import ZeroStrategy
from lightning_zero.config import RawConfig
from lightning_zero.engines.deepspeed import known_keys
from lightning_zero.engines.deepspeed.known_keys import KNOWN, REMOVED, Schema, check_keys, deprecated_keys


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"zero_optimizaton": {"stage": 2}}, ["zero_optimizaton in", "did you mean zero_optimization?"]),
        ({"zero_optimization": {"stge": 2}}, ["zero_optimization.stge in", "did you mean stage?"]),
        (
            {"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}},
            ["zero_optimization.offload_optimizer.devic in", "did you mean device?"],
        ),
        ({"activation_checkpointing": {"partitioned_activations": True}}, ["did you mean partition_activations?"]),
        ({"overlap_comm": True}, ["overlap_comm in", "it belongs into zero_optimization."]),
        ({"zero_optimization": {"block_size": 1}}, ["it belongs into aio."]),
        ({"zero_optimization": {"stage": 2, "train_batch_size": 1}}, ["it belongs into the top level."]),
        ({"nonsense": 1}, ["nonsense in", "the top level has activation_checkpointing, aio,"]),
        ({"timers": {"x": 1}}, ["timers.x in", "timers has throughput"]),
        ({"elasticity": {"enabled": False}}, ["elasticity in", "has removed it; take it out"]),
        ({"zero_optimization": {"mics_shard_size": 2}}, ["mics_shard_size in", "has removed it"]),
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
    with pytest.raises(ValueError, match=f"zero_optimizaton in {path} is not a setting of DeepSpeed's"):
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


def test_deprecated_keys_are_named_with_todays() -> None:
    raw = RawConfig.read({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    check_keys(raw)
    (line,) = deprecated_keys(raw)
    assert line.startswith("zero_optimization.cpu_offload in ")
    assert line.endswith('is deprecated: use offload_optimizer: {"device": "cpu"}.')


def test_another_version_may_know_a_new_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_keys, "version", lambda package: "0.19.99")
    with pytest.warns(UserWarning, match=r"brand_new in deepspeed_config .*0\.19\.99 is installed"):
        check_keys(RawConfig.read({"brand_new": 1}))
    with pytest.raises(ValueError, match="did you mean zero_optimization"):
        check_keys(RawConfig.read({"zero_optimizaton": {}}))


# -- the table beside DeepSpeed's own ----------------------------------------------------------------------------------

MODELS = {
    "zero_optimization": "runtime.zero.config:DeepSpeedZeroConfig",
    "bf16": "runtime.precision_config:DeepSpeedBF16Config",
    "bfloat16": "runtime.precision_config:DeepSpeedBF16Config",
    "fp16": "runtime.precision_config:DeepSpeedFP16Config",
    "tensorboard": "monitor.config:TensorBoardConfig",
    "wandb": "monitor.config:WandbConfig",
    "csv_monitor": "monitor.config:CSVConfig",
    "comet": "monitor.config:CometConfig",
    "comms_logger": "comm.config:CommsLoggerConfig",
    "hybrid_engine": "runtime.config:HybridEngineConfig",
    "weight_quantization": "inference.config:WeightQuantConfig",
    "compile": "compile.config:CompileConfig",
    "tensor_parallel": "runtime.tensor_parallel.config:TPTrainingConfig",
}


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return annotation
    return next((model for inner in typing.get_args(annotation) if (model := _model_in(inner))), None)


def _schema_of(model: Any) -> Schema:
    found: Schema = {}
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        found |= dict.fromkeys({name, field.alias or name}, _schema_of(inner) if inner else None)
    return found


@pytest.mark.parametrize("section", MODELS)
def test_sections_are_those_of_deepspeeds_models(section: str) -> None:
    pytest.importorskip("deepspeed")
    module, _, name = MODELS[section].partition(":")
    assert KNOWN[section] == _schema_of(getattr(import_module(f"deepspeed.{module}"), name))


def test_removed_keys_are_deepspeeds() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import config

    assert set(REMOVED[""]) == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(REMOVED["zero_optimization"]) == set(config._REMOVED_ZERO_CONFIG_KEYS)


class _Asked(dict[str, Any]):
    """A section that notes the keys which are looked for in it."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__({k: _Asked(v) if isinstance(v, dict) else v for k, v in content.items()})
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self) -> Any:  # DeepSpeed's `key in config.keys()`
        return self

    def __copy__(self) -> _Asked:
        return self


def test_deepspeed_looks_for_no_key_that_is_not_known() -> None:
    """Every section of the table is there, so its reader runs, in those sections that are no models."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    plain = {name: {} for name, inner in KNOWN.items() if inner is not None and name not in MODELS}
    content = {**plain, "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    content["checkpoint"] = {"parallel_write": {}, "writer": {}}
    content["autotuning"] = {"model_info": {}}
    content["data_efficiency"] = {"data_sampling": {}, "data_routing": {}}
    asked = _Asked(content)
    DeepSpeedConfig(asked)

    def compare(section: _Asked, known: Schema, path: str) -> None:
        extra = section.asked - set(known) - set(REMOVED.get(path, ()))
        assert not extra, f"{path or 'the top level'}: DeepSpeed looks for {extra}"
        for key, inner in section.items():
            if isinstance(inner, _Asked) and known.get(key) is not None:
                compare(inner, typing.cast("Schema", known[key]), f"{path}.{key}" if path else key)

    compare(asked, KNOWN, "")
