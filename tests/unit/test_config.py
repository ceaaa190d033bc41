"""``ZeroConfig``: what is valid, and that every refusal names the setting, the value found and the repair."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest

from lightning_zero.config import (
    STAGES,
    ActivationCheckpointingConfig,
    CompileConfig,
    OffloadConfig,
    RawConfig,
    ZeroConfig,
)

FILE = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ONLY_PARAMETERS = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
INSTEAD = ["use engine='fsdp2'", "strategy='zero3_nvme'", "offload='cpu'"]
"""Of files on DeepSpeed."""


def _to_files(section: str) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, section: {"device": "nvme", "nvme_path": "/fast"}}}


def test_defaults() -> None:
    config = ZeroConfig()
    assert (config.stage, config.engine, config.offload) == (3, "fsdp2", OffloadConfig(target="none"))
    assert config.units is None


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"stage": 4}, ["stage=4", "1, 2 or 3"]),
        ({"stage": "3"}, ["stage='3'", "1, 2 or 3"]),
        ({"engine": "fsdp"}, ["engine='fsdp'", "Did you mean 'fsdp2'"]),
        ({"offload": "disk"}, ["offload='disk'", "'none'", "'cpu'", "'nvme'"]),
        ({"offload": True}, ["offload=True", "'cpu'", "OffloadConfig"]),
        ({"offload": {"targt": "cpu"}}, ["offload.targt='cpu'", "Did you mean 'target'"]),
        ({"activation_checkpointing": "ful"}, ["activation_checkpointing='ful'", "Did you mean 'full'?"]),
        ({"activation_checkpointing": True}, ["activation_checkpointing=True", "'selective'", "a mapping"]),
        ({"activation_checkpointing": {"unit": ["A"]}}, ["activation_checkpointing.unit=", "Did you mean 'units'"]),
        (
            {"activation_checkpointing": "selective", "engine": "deepspeed"},
            ["activation_checkpointing='selective'", "use 'full'"],
        ),
        ({"compile": "blocks"}, ["compile='blocks'", "'none' or 'units'"]),
        ({"compile": True}, ["compile=True", "'units'", "CompileConfig"]),
        ({"compile": {"target": "units", "moed": "default"}}, ["compile.moed='default'", "Did you mean 'mode'"]),
        ({"compile": "units", "engine": "deepspeed"}, ["compile='units'", "at stage 3", "stage=2, or engine='fsdp2'"]),
        (
            {"offload": {"target": "nvme", "pin_memory": True}},
            ["offload.pin_memory=True", "'nvme'", "engine='fsdp2'", "offload.target='cpu'"],
        ),
        ({"offload": OffloadConfig(target="cpu", ratio=0.5)}, ["offload.ratio=0.5", "engine='deepspeed'"]),
        ({"deepspeed_config": {}}, ["deepspeed_config", "engine='fsdp2'", "engine='deepspeed'"]),
        ({"engine": "deepspeed", "deepspeed_config": "/nowhere.json"}, ["'/nowhere.json'", "No such file"]),
        ({"engine": "deepspeed", "deepspeed_config": 3}, ["deepspeed_config=3", "mapping"]),
        ({"engine": "deepspeed", "deepspeed_config": {"a": {1, 2}}}, ["deepspeed_config.a={1, 2}"]),
        ({"engine": "deepspeed", "deepspeed_config": FILE, "stage": 3}, ["stage=3", "stage=2"]),
        ({"engine": "deepspeed", "deepspeed_config": FILE, "offload": "none"}, ["target='none'", "'cpu'"]),
        ({"engine": "deepspeed", "deepspeed_config": FILE, "auto": True}, ["auto=True", "deepspeed_config"]),
        ({"engine": "deepspeed", "deepspeed_config": {"zero_optimization": {"stage": 0}}}, ["stage=0", "ddp"]),
        ({"engine": "deepspeed", "deepspeed_config": {"zero_optimization": 3}}, ["zero_optimization=3", "section"]),
        ({"engine": "deepspeed", "offload": "nvme"}, ["offload='nvme'", "engine='deepspeed'", *INSTEAD]),
        ({"engine": "deepspeed", "deepspeed_config": _to_files("offload_param")}, INSTEAD),
        (
            {"engine": "deepspeed", "deepspeed_config": _to_files("offload_optimizer")},
            ["offload='nvme' of deepspeed_config", *INSTEAD],
        ),
        ({"transport": "gloo"}, ["transport='gloo'", "'direct'"]),
        ({"engine": "deepspeed", "transport": "torch"}, ["transport='torch'", "engine='deepspeed'"]),
        ({"reduce_dtype": "float32"}, ["reduce_dtype='float32'", "'fp32'"]),
        ({"engine": "deepspeed", "reduce_dtype": "bf16"}, ["reduce_dtype='bf16'", "communication_data_type"]),
        ({"comm_buffers": "nccl"}, ["comm_buffers='nccl'", "'symmetric'"]),
        ({"engine": "deepspeed", "comm_buffers": "symmetric"}, ["comm_buffers='symmetric'", "engine='fsdp2'"]),
        ({"engine": "deepspeed", "shard_size": 2}, ["shard_size=2", "engine='deepspeed'", "engine='fsdp2'"]),
        ({"engine": "deepspeed", "units": ["Block"]}, ["units=['Block']", "activation_checkpointing='full'"]),
        ({"engine": "deepspeed", "min_unit_numel": 1}, ["min_unit_numel=1", "activation_checkpointing='full'"]),
        ({"engine": "deepspeed", "auto": True}, ["auto=True", "engine='deepspeed'"]),
        (
            {"engine": "deepspeed", "stage": 1, "deepspeed_config": ONLY_PARAMETERS},
            ["offload_param.device='cpu'", "stage=1", "stage=3"],
        ),
        (
            {"engine": "deepspeed", "stage": 2, "offload": OffloadConfig(target="cpu", ratio=0.5)},
            ["offload.ratio=0.5", "stage=2", "stage=3"],
        ),
        (
            {"engine": "deepspeed", "deepspeed_config": {"zero_optimizaton": {"stage": 2}}},
            ["zero_optimizaton in deepspeed_config", "did you mean zero_optimization?"],
        ),
        ({"units": "Block"}, ["units='Block'", "list"]),
        ({"min_unit_numel": -1}, ["min_unit_numel=-1", "0 or more"]),
        ({"find_unused_parameters": 1}, ["find_unused_parameters=1", "True or False"]),
        ({"build": "sharded"}, ["build='sharded'", "'auto'", "'whole'"]),
        ({"after_fit": "keep"}, ["after_fit='keep'", "'whole'", "'sharded'"]),
        ({"uneven": "join"}, ["uneven='join'", "'error'", "'shortest'"]),
        ({"process_group_backend": 1}, ["process_group_backend=1", "a name or None"]),
        ({"device_memory_gib": 0}, ["device_memory_gib=0", "GiB above 0"]),
        ({"timeout_seconds": 0}, ["timeout_seconds=0", "above 0"]),
        ({"timeout_seconds": float("nan")}, ["timeout_seconds=nan"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refusals_name_setting_value_and_repair(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the parts below are the match)
        ZeroConfig(**settings)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("config", "settings", "parts"),
    [
        (OffloadConfig, {"target": "none", "pin_memory": True}, ["offload.pin_memory=True", "'cpu' or 'nvme'"]),
        (OffloadConfig, {"target": "cpu", "path": "/x"}, ["offload.path='/x'", "'nvme'"]),
        (OffloadConfig, {"target": "nvme", "path": ""}, ["offload.path=''"]),
        (OffloadConfig, {"target": "nvme", "ratio": 0.5}, ["offload.ratio=0.5", "'cpu'"]),
        (OffloadConfig, {"target": "cpu", "ratio": 0}, ["offload.ratio=0", "above 0"]),
        (OffloadConfig, {"target": "cpu", "ratio": 1.5}, ["offload.ratio=1.5", "up to 1"]),
        (OffloadConfig, {"target": "cpu", "pin_memory": 1}, ["offload.pin_memory=1", "True, False or None"]),
        (CompileConfig, {"backend": "eager"}, ["compile.backend='eager'", "compile.target='units'"]),
        (CompileConfig, {"target": "units", "backend": 3}, ["compile.backend=3", "a name or None"]),
        (CompileConfig, {"target": "units", "mode": "fast"}, ["compile.mode='fast'", "'max-autotune-no-cudagraphs'"]),
        (CompileConfig, {"target": "units", "mode": "max-autotune"}, ["mode='max-autotune'", "-no-cudagraphs'"]),
        (
            CompileConfig,
            {"target": "units", "mode": "reduce-overhead"},
            ["compile.mode='reduce-overhead'", "-no-cudagraphs'"],
        ),
        (
            CompileConfig,
            {"target": "units", "mode": "default", "backend": "eager"},
            ["compile.mode='default'", "backend='eager'"],
        ),
        (CompileConfig, {"target": "units", "dynamic": "no"}, ["compile.dynamic='no'", "True, False or None"]),
        (CompileConfig, {"target": "units", "fullgraph": None}, ["compile.fullgraph=None", "True or False"]),
        (ActivationCheckpointingConfig, {"offload": True}, ["offload=True", "target='full' or 'selective'"]),
        (ActivationCheckpointingConfig, {"target": "some"}, ["activation_checkpointing.target='some'", "'selective'"]),
        (ActivationCheckpointingConfig, {"target": "full", "units": []}, ["units=[]", "name modules"]),
    ],
)
def test_sections_refuse_on_their_own(config: Any, settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        config(**settings)
    for part in parts:
        assert part in str(caught.value)


def test_sections_may_be_mappings() -> None:
    given = ZeroConfig(engine="deepspeed", offload={"target": "cpu", "ratio": 0.5})  # type: ignore[arg-type]
    assert given == ZeroConfig(engine="deepspeed", offload=OffloadConfig(target="cpu", ratio=0.5))


def test_what_moves() -> None:
    def moves(**settings: Any) -> tuple[bool, bool]:
        config = ZeroConfig(**settings)
        return config.offloads_optimizer, config.offloads_parameters

    assert moves() == (False, False)
    for stage in STAGES:
        assert moves(stage=stage, offload="cpu") == (True, True)
        assert moves(stage=stage, offload="cpu", engine="deepspeed") == (True, stage == 3)
    assert moves(deepspeed_config={}, offload="cpu", engine="deepspeed") == (True, True)
    assert moves(deepspeed_config=ONLY_PARAMETERS, engine="deepspeed") == (False, True)
    assert moves(deepspeed_config=FILE, offload="cpu", engine="deepspeed") == (True, False)


def test_a_file_fills_what_is_unset(tmp_path: Any) -> None:
    path = tmp_path / "zero_2.json"
    path.write_text(json.dumps(FILE))
    config = ZeroConfig(engine="deepspeed", deepspeed_config=str(path))
    path.unlink()  # read once
    assert (config.stage, config.offload.target) == (2, "cpu")
    assert config.raw is not None
    assert config.raw.content() == FILE
    assert config == ZeroConfig(engine="deepspeed", deepspeed_config=FILE)
    assert hash(config) == hash(config.with_(after_fit="auto"))
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.with_(after_fit="whole").stage == 2
    assert ZeroConfig.from_kwargs(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)}) == config
    assert ZeroConfig(engine="deepspeed", deepspeed_config=FILE, stage=2, offload="cpu").stage == 2
    pinned = ZeroConfig(engine="deepspeed", deepspeed_config=FILE, offload=OffloadConfig(target=None, pin_memory=True))
    assert (pinned.offload.target, pinned.offload.pin_memory) == ("cpu", True)
    empty = ZeroConfig(engine="deepspeed", deepspeed_config={})
    assert (empty.stage, empty.offload) == (3, OffloadConfig())


def test_a_file_is_never_changed() -> None:
    given = {"zero_optimization": {"stage": 2}}
    raw = RawConfig.read(given)
    raw.content()["zero_optimization"]["stage"] = 3
    raw.section("zero_optimization")["stage"] = 3
    given["zero_optimization"]["stage"] = 1
    assert raw.stage == 2


def test_a_file_that_is_no_json_says_where(tmp_path: Any) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"a": 1,\n "b": }')
    with pytest.raises(ValueError, match=r"broken\.json' is not valid JSON: .*line 2"):
        RawConfig.read(str(path))
    path.write_text('{"a": 1, "a": 2}')
    with pytest.raises(ValueError, match=r"'a' occurs 2 times, with values \[1, 2\]"):
        RawConfig.read(str(path))
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"holds list: use a JSON object"):
        RawConfig.read(str(path))


def test_unknown_setting_names_the_closest() -> None:
    with pytest.raises(ValueError, match=r"stages=2 .*Did you mean 'stage'"):
        ZeroConfig.from_kwargs(stages=2)
    with pytest.raises(ValueError, match=r"zzzz=1 .*Known: stage, engine"):
        ZeroConfig.from_kwargs(zzzz=1)
    assert ZeroConfig.from_kwargs(stage=1) == ZeroConfig(stage=1)


def test_a_config_is_frozen_hashable_and_changed_by_copy() -> None:
    config = ZeroConfig(stage=2, units=["Block"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 3  # type: ignore[misc]
    assert hash(config) == hash(ZeroConfig(stage=2, units=("Block",)))
    assert config.with_(stage=1) == ZeroConfig(stage=1, units=["Block"])
    assert config.stage == 2
    with pytest.raises(ValueError, match="stage=9"):
        config.with_(stage=9)


def test_only_the_standard_library_is_needed() -> None:
    """The file itself, without its package, in an interpreter that has no site-packages."""
    import lightning_zero.config

    run = subprocess.run(
        [sys.executable, "-S", "-I", lightning_zero.config.__file__], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
