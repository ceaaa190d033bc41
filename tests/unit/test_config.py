"""``ZeroConfig``: what is valid, and that every refusal names the setting, the value found and the repair."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from lightning_zero.config import STAGES, OffloadConfig, ZeroConfig


def test_defaults() -> None:
    config = ZeroConfig()
    assert (config.stage, config.engine, config.offload) == (3, "fsdp2", OffloadConfig(target="none"))
    assert config.units is None


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_accepted(stage: int) -> None:
    assert ZeroConfig(stage=stage).stage == stage


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"stage": 4}, ["stage=4", "1, 2, 3"]),
        ({"stage": 0}, ["stage=0", "1, 2, 3"]),
        ({"stage": "3"}, ["stage='3'", "1, 2 or 3"]),
        ({"stage": True}, ["stage=True"]),
        ({"stage": 2.0}, ["stage=2.0"]),
        ({"engine": "fsdp"}, ["engine='fsdp'", "Did you mean 'fsdp2'"]),
        ({"engine": "horovod"}, ["engine='horovod'", "'fsdp2'"]),
        ({"engine": None}, ["engine=None"]),
        ({"offload": "disk"}, ["offload='disk'", "'none'", "'cpu'", "'nvme'"]),
        ({"offload": True}, ["offload=True", "'cpu'", "OffloadConfig"]),
        ({"offload": {"target": "cpu"}}, ["offload={'target': 'cpu'}", "OffloadConfig"]),
        ({"offload": "nvme"}, ["offload='nvme'", "engine='fsdp2'", "zero3_nvme"]),
        ({"units": "Block"}, ["units='Block'", "list"]),
        ({"units": [1]}, ["units=[1]", "list"]),
        ({"units": [""]}, ["units=['']"]),
        ({"units": 3}, ["units=3"]),
        ({"min_unit_numel": -1}, ["min_unit_numel=-1", "0 or more"]),
        ({"min_unit_numel": 1.5}, ["min_unit_numel=1.5"]),
        ({"min_unit_numel": True}, ["min_unit_numel=True"]),
        ({"find_unused_parameters": 1}, ["find_unused_parameters=1", "True or False"]),
        ({"broadcast_buffers": "yes"}, ["broadcast_buffers='yes'", "True or False"]),
        ({"after_fit": "keep"}, ["after_fit='keep'", "'whole'", "'sharded'"]),
        ({"process_group_backend": 1}, ["process_group_backend=1", "'gloo'"]),
        ({"auto": "yes"}, ["auto='yes'", "True or False"]),
        ({"device_memory_gib": 0}, ["device_memory_gib=0", "GiB above 0"]),
        ({"device_memory_gib": "80"}, ["device_memory_gib='80'"]),
        ({"timeout_seconds": 0}, ["timeout_seconds=0", "above 0"]),
        ({"timeout_seconds": -1.0}, ["timeout_seconds=-1.0"]),
        ({"timeout_seconds": float("nan")}, ["timeout_seconds=nan"]),
        ({"timeout_seconds": "30"}, ["timeout_seconds='30'"]),
        ({"timeout_seconds": True}, ["timeout_seconds=True"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refusals_name_setting_value_and_repair(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the parts below are the match)
        ZeroConfig(**settings)
    for part in parts:
        assert part in str(caught.value)


def test_unknown_setting_names_the_closest() -> None:
    with pytest.raises(ValueError, match=r"stages=2 .*Did you mean 'stage'"):
        ZeroConfig.from_kwargs(stages=2)
    with pytest.raises(ValueError, match=r"zzzz=1 .*Known: stage, engine"):
        ZeroConfig.from_kwargs(zzzz=1)
    assert ZeroConfig.from_kwargs(stage=1) == ZeroConfig(stage=1)


def test_forms_of_a_value_become_one() -> None:
    assert ZeroConfig(offload="none") == ZeroConfig(offload=OffloadConfig(target="none"))
    assert ZeroConfig(units=["a", "b"]).units == ("a", "b")
    assert ZeroConfig(units=[]).units == ()


def test_a_config_is_frozen_hashable_and_changed_by_copy() -> None:
    config = ZeroConfig(stage=2, units=["Block"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 3  # type: ignore[misc]
    assert hash(config) == hash(ZeroConfig(stage=2, units=("Block",)))
    assert config.with_(stage=1) == ZeroConfig(stage=1, units=["Block"])
    assert config.stage == 2
    with pytest.raises(ValueError, match="stage=9"):
        config.with_(stage=9)


def test_settings_are_keywords_only() -> None:
    with pytest.raises(TypeError):
        ZeroConfig(3)  # type: ignore[misc]


def test_only_the_standard_library_is_needed() -> None:
    """The file itself, without its package, in an interpreter that has no site-packages."""
    import lightning_zero.config

    run = subprocess.run(
        [sys.executable, "-S", "-I", lightning_zero.config.__file__], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
