"""``ZeroConfig``: what is valid, and that every refusal names the setting, the value found and the repair."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest

from lightning_zero.config import (
    STAGES,
    OffloadConfig,
    RawConfig,
    ZeroConfig,
)

FILE = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ONLY_PARAMETERS = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
FILES = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}}}
INSTEAD = ["use engine='fsdp2'", "strategy='zero3_nvme'", "offload='cpu'"]
"""Of files on DeepSpeed."""


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"stage": 4}, ["stage=4", "1, 2, 3"]),
        ({"engine": "fsdp"}, ["engine='fsdp'", "Did you mean 'fsdp2'"]),
        ({"offload": True}, ["offload.target=True", "'cpu'"]),
        ({"offload": {"targt": "cpu"}}, ["offload.targt='cpu'", "Did you mean 'target'"]),
        ({"activation_checkpointing": "ful"}, ["activation_checkpointing.target='ful'", "Did you mean 'full'?"]),
        (
            {"activation_checkpointing": "selective", "engine": "deepspeed"},
            ["activation_checkpointing='selective'", "use 'full'"],
        ),
        ({"compile": "units", "engine": "deepspeed"}, ["compile='units'", "use stage=2, or engine='fsdp2'"]),
        (
            {"offload": {"target": "nvme", "pin_memory": True}},
            ["offload.pin_memory=True", "'nvme'", "engine='fsdp2'", "offload.target='cpu'"],
        ),
        ({"offload": OffloadConfig(target="cpu", ratio=0.5)}, ["offload.ratio=0.5", "engine='deepspeed'"]),
        ({"deepspeed_config": {}}, ["deepspeed_config", "engine='fsdp2'", "engine='deepspeed'"]),
        ({"engine": "deepspeed", "deepspeed_config": "/nowhere.json"}, ["'/nowhere.json'", "No such file"]),
        ({"engine": "deepspeed", "deepspeed_config": {"a": {1, 2}}}, ["deepspeed_config={'a': {1, 2}}"]),
        ({"engine": "deepspeed", "deepspeed_config": FILE, "stage": 3}, ["stage=3", "stage=2"]),
        ({"engine": "deepspeed", "deepspeed_config": FILE, "offload": "none"}, ["target='none'", "'cpu'"]),
        ({"engine": "deepspeed", "deepspeed_config": {"zero_optimization": {"stage": 0}}}, ["stage=0", "ddp"]),
        ({"engine": "deepspeed", "deepspeed_config": {"zero_optimization": 3}}, ["zero_optimization=3", "section"]),
        ({"engine": "deepspeed", "offload": "nvme"}, ["offload='nvme'", "engine='deepspeed'", *INSTEAD]),
        ({"engine": "deepspeed", "deepspeed_config": FILES}, ["offload='nvme' of deepspeed_config", *INSTEAD]),
        ({"engine": "deepspeed", "transport": "torch"}, ["transport='torch'", "engine='deepspeed'"]),
        ({"engine": "deepspeed", "reduce_dtype": "bf16"}, ["reduce_dtype='bf16'", "communication_data_type"]),
        ({"engine": "deepspeed", "comm_buffers": "symmetric"}, ["comm_buffers='symmetric'", "engine='fsdp2'"]),
        ({"engine": "deepspeed", "shard_size": 2}, ["shard_size=2", "engine='deepspeed'", "engine='fsdp2'"]),
        ({"engine": "deepspeed", "auto": True}, ["auto=True", "engine='deepspeed'"]),
        (
            {"engine": "deepspeed", "stage": 1, "deepspeed_config": ONLY_PARAMETERS},
            ["offload_param.device='cpu'", "stage=1", "stage=3"],
        ),
        (
            {"engine": "deepspeed", "stage": 2, "offload": OffloadConfig(target="cpu", ratio=0.5)},
            ["offload.ratio=0.5", "stage=2", "stage=3"],
        ),
        ({"offload": {"pin_memory": True}}, ["offload.pin_memory=True", "another target"]),
        ({"offload": {"target": "cpu", "ratio": 1.5}}, ["offload.ratio=1.5", "up to 1"]),
        ({"compile": {"target": "units", "mode": "reduce-overhead"}}, ["mode='reduce-overhead'", "-no-cudagraphs'"]),
        (
            {"engine": "deepspeed", "deepspeed_config": {"zero_optimizaton": {"stage": 2}}},
            ["zero_optimizaton in deepspeed_config", "did you mean zero_optimization?"],
        ),
        ({"activation_checkpointing": {"target": "full", "units": []}}, ["units=[]", "name modules"]),
        ({"units": "Block"}, ["units='Block'", "list"]),
        ({"min_unit_numel": -1}, ["min_unit_numel=-1", "0 or more"]),
        ({"timeout_seconds": float("nan")}, ["timeout_seconds=nan"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refusals_name_setting_value_and_repair(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the parts below are the match)
        ZeroConfig(**settings)
    for part in parts:
        assert part in str(caught.value)


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
    with pytest.raises(ValueError, match=r"broken\.json': .*line 2"):
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
