"""``ZeroStrategy(...)`` has ``ZeroConfig``'s fields as keywords; LightningCLI reads them from files and the shell."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zero import ZeroStrategy
from lightning_zero.config import (
    ActivationCheckpointingConfig,
    CheckpointingTarget,
    CompileConfig,
    CompileTarget,
    OffloadConfig,
    OffloadTarget,
    Stage,
    ZeroConfig,
)

OF_LIGHTNING = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
ACCEPTED = {
    "stage": Stage | None,
    "offload": OffloadTarget | OffloadConfig | None,
    "compile": CompileTarget | CompileConfig,
    "activation_checkpointing": CheckpointingTarget | Sequence[str] | ActivationCheckpointingConfig,
}
"""Fields that hold less, once resolved, than the constructor takes."""


def test_the_keywords_are_the_fields_of_the_config() -> None:
    parameters = dict(inspect.signature(ZeroStrategy).parameters)
    hints, accepted = get_type_hints(ZeroStrategy.__init__), get_type_hints(ZeroConfig) | ACCEPTED
    assert set(parameters) - OF_LIGHTNING == {f.name for f in dataclasses.fields(ZeroConfig)}
    for f in dataclasses.fields(ZeroConfig):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        assert parameters[f.name].default == default, f.name
        assert hints[f.name] == accepted[f.name], f.name


def test_every_keyword_reaches_the_config() -> None:
    given: dict[str, Any] = {
        "stage": 2, "units": ("Block",), "min_unit_numel": 5, "find_unused_parameters": False, "shard_size": 2,
        "uneven": "shortest", "reduce_dtype": "bf16", "comm_buffers": "symmetric",
        "broadcast_buffers": False, "after_fit": "whole", "checkpoint": "sharded", "process_group_backend": "gloo",
        "timeout_seconds": 5.0, "device_memory_gib": 3.0, "start_method": "spawn", "rank_logs": "logs",
        "build": "whole", "offload": "cpu", "compile": "units", "activation_checkpointing": "full",
    }  # fmt: skip
    assert ZeroStrategy(**given).config == ZeroConfig(**given)
    config = ZeroConfig(**given)
    assert ZeroStrategy.from_config(config).config == config


pytest.importorskip("jsonargparse")


def strategy_of_cli(*arguments: str) -> Any:
    cli = LightningCLI(BoringModel, run=False, args=["--trainer.accelerator=cpu", *arguments])
    return cli.trainer.strategy


def from_file(folder: Path, text: str) -> Any:
    path = folder / "config.yaml"
    path.write_text(text)
    return strategy_of_cli(f"--config={path}")


CLASS = "trainer:\n  strategy:\n    class_path: lightning_zero.ZeroStrategy\n    init_args:\n"


def test_lightning_cli_from_a_file(tmp_path: Path) -> None:
    assert from_file(tmp_path, f"{CLASS}      offload: cpu\n      stage: 2\n").config == ZeroConfig(
        stage=2, offload="cpu"
    )
    text = f"{CLASS}      engine: deepspeed\n      offload:\n        target: cpu\n        ratio: 0.5\n"
    text += "      units: null\n"
    assert from_file(tmp_path, text).config == ZeroConfig(
        engine="deepspeed",
        offload=OffloadConfig(target="cpu", ratio=0.5),
    )
    assert from_file(tmp_path, "trainer:\n  strategy: zero2_offload\n").config == ZeroConfig(stage=2, offload="cpu")
    text = f"{CLASS}      engine: deepspeed\n      deepspeed_config:\n        zero_optimization:\n          stage: 1\n"
    assert from_file(tmp_path, text).config.stage == 1
