"""DeepSpeed's settings: what becomes of ours, of a file's, and of both together."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.engines.deepspeed.ds_config import MAX_BUCKET_NUMEL, RunFacts, ds_config
from lightning_zero.engines.deepspeed.run import DeepSpeedRun

WELL_KNOWN = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
    "fp16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
    },
}
"""The file that tutorials show."""

GPU = RunFacts(
    world_size=2,
    device_type="cuda",
    precision="16-true",
    accumulation=4,
    clip_value=None,
    numel=10**9,
)
CPU = replace(GPU, device_type="cpu", precision="32-true", accumulation=1)


def made(facts: RunFacts = CPU, **settings: Any) -> dict[str, Any]:
    return ds_config(ZeroConfig(engine="deepspeed", **settings), facts)


def test_the_well_known_file() -> None:
    given = copy.deepcopy(WELL_KNOWN)
    config = ZeroConfig(engine="deepspeed", deepspeed_config=given)
    assert (config.stage, config.offload) == (2, OffloadConfig())
    first = ds_config(config, GPU)
    assert first["gradient_accumulation_steps"] == 4
    assert first["fp16"] == {"enabled": True}
    assert "optimizer" not in first
    zero = first["zero_optimization"]
    assert zero.items() >= WELL_KNOWN["zero_optimization"].items()  # nothing of it is lost
    first["zero_optimization"]["stage"] = 9
    assert given == WELL_KNOWN
    assert ds_config(config, GPU)["zero_optimization"]["stage"] == 2


def test_the_well_known_file_on_a_cpu_names_bf16() -> None:
    with pytest.raises(ValueError, match=r"precision='16-true'.*CPU.*bf16"):
        made(replace(CPU, accumulation=4, precision="16-true"), deepspeed_config=WELL_KNOWN)
    bf16 = {**WELL_KNOWN, "fp16": {"enabled": False}, "bf16": {"enabled": True}}
    config = made(replace(CPU, accumulation=4, precision="bf16-true"), deepspeed_config=bf16)
    assert config["bf16"] == {"enabled": True}
    assert "fp16" not in config


def test_clipping_is_always_written() -> None:
    """Without the key DeepSpeed clips to norm 1.0; the engine clips itself, where Lightning asks."""
    assert made()["gradient_clipping"] == 0.0
    assert made(replace(CPU, clip_value=1.0))["gradient_clipping"] == 0.0
    both = made(replace(CPU, clip_value=1.0), deepspeed_config={"gradient_clipping": 1.0})
    assert both["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("file", "facts", "parts"),
    [
        ({"gradient_accumulation_steps": 4}, {}, ["gradient_accumulation_steps=4", "accumulate_grad_batches=1"]),
        ({"gradient_clipping": 1.0}, {}, ["gradient_clipping=1.0", "gradient_clip_val=None"]),
        ({"gradient_clipping": 1.0}, {"clip_value": 0.5}, ["gradient_clipping=1.0", "gradient_clip_val=0.5"]),
        (
            {"gradient_clipping": 1.0},
            {"clip_value": 1.0, "clip_algorithm": "value"},
            ["gradient_clipping=1.0", "gradient_clip_algorithm='value'"],
        ),
        ({"bf16": {"enabled": True}}, {}, ["bf16.enabled=True", "precision='32-true'", "bf16-mixed"]),
        ({"bf16": {"enabled": False}}, {"precision": "bf16-mixed"}, ["bf16.enabled=False", "precision='bf16-mixed'"]),
        ({"fp16": {"enabled": True}}, {"device_type": "cuda"}, ["fp16.enabled=True", "16-mixed"]),
    ],
)
def test_a_file_that_contradicts_the_trainer_is_refused(file: Any, facts: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the parts below are the match)
        made(replace(CPU, **facts), deepspeed_config=file)
    for part in parts:
        assert part in str(caught.value)


def test_auto_takes_lightnings_and_ours() -> None:
    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    }
    config = made(replace(CPU, precision="bf16-true", accumulation=3, clip_value=0.5), deepspeed_config=file)
    assert config["gradient_accumulation_steps"] == 3
    assert config["bf16"]["enabled"]
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (3, MAX_BUCKET_NUMEL)
    assert "auto" not in json.dumps(config)


def test_a_config_replaces_our_defaults() -> None:
    config = {"zero_optimization": {"reduce_bucket_size": 1000, "sub_group_size": 5, "ignore_unused_parameters": False}}
    merged = made(deepspeed_config=config)["zero_optimization"]
    assert merged.items() >= config["zero_optimization"].items()
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}
    with pytest.raises(ValueError, match=r"ratio=0.3 .*0.5"):
        made(deepspeed_config=offload, offload=OffloadConfig(target="cpu", ratio=0.5))


def test_offload_sections() -> None:
    cpu = made(offload="cpu")["zero_optimization"]
    assert cpu["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert cpu["offload_optimizer"] == {"device": "cpu", "pin_memory": False, "ratio": 1.0}
    assert made(replace(CPU, device_type="cuda"), offload="cpu")["zero_optimization"]["offload_param"]["pin_memory"]
    assert "offload_param" not in made(offload="cpu", stage=2)["zero_optimization"]
    part = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    for split in (
        made(offload=OffloadConfig(target="cpu", ratio=0.5))["zero_optimization"],
        made(deepspeed_config=part)["zero_optimization"],
    ):
        assert split["offload_optimizer"]["ratio"] == 0.5
        assert split["sub_group_size"] == CPU.numel // (CPU.world_size * 32)  # one group could not be split
    assert "offload_param" not in split


@pytest.mark.parametrize("section", [{"zenflow": {"topk_ratio": 0.1}}, {"offload_optimizer": {"super_offload": True}}])
def test_other_ways_of_stepping_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="zenflow or super_offload in deepspeed_config"):
        made(deepspeed_config={"zero_optimization": section})


def test_offload_of_a_file() -> None:
    file = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    config = ZeroConfig(engine="deepspeed", deepspeed_config=file)
    assert (config.offloads_optimizer, config.offloads_parameters) == (True, False)
    zero = ds_config(config, CPU)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 1.0}
    assert "offload_param" not in zero


def test_sections_without_effect_are_found_and_not_passed_on() -> None:
    config = {
        "_comment": "ours",
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": "auto",
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "tensorboard": {"enabled": False},
        "wall_clock_breakdown": False,
        "steps_per_print": 10,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_allow_untested_optimizer": False,
    }
    raw = ZeroConfig(engine="deepspeed", deepspeed_config=config).raw
    assert raw is not None
    assert raw.unused == ["train_batch_size", "flops_profiler", "steps_per_print", "optimizer"]
    assert not set(raw.unused) & set(made(deepspeed_config=config))


def test_precision() -> None:
    """Under mixed precision DeepSpeed holds fp32 parameters, and Lightning casts and scales."""
    sections = {"fp16", "bf16", "data_types"}
    assert not sections & set(made())
    assert not sections & set(made(replace(CPU, precision="bf16-mixed"), deepspeed_config={"bf16": {"enabled": True}}))
    assert made(replace(CPU, precision="bf16-true"))["bf16"] == {"enabled": True}
    with pytest.raises(ValueError, match=r"precision='64-true'.*fsdp2"):
        made(replace(CPU, precision="64-true"))
    with pytest.raises(ValueError, match=r"precision='16-true'.*bf16-mixed"):
        made(replace(CPU, precision="16-true"))


def test_compiled_optimizers_of_deepspeed_are_refused() -> None:
    class DeepSpeedCPUAdam(torch.optim.AdamW):
        pass

    pytest.importorskip("deepspeed")
    run = DeepSpeedRun(ZeroConfig(engine="deepspeed", offload="cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"DeepSpeedCPUAdam from configure_optimizers.*return PyTorch's AdamW"):
        run.check_optimizers([DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(1))])])
