"""The schemas are the dataclasses: one list of settings, the same defaults, the same refusals."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, Literal, Optional, Union

import pytest
from lightning.pytorch import Trainer

from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.hydra_config import (
    ConfigError,
    hint,
    make_strategy,
    make_zero_config,
    plain_type,
    schema_of,
    trainer_schema,
)
from lightning_zero.launcher import LaunchedDDP


def test_schema_has_the_fields_and_defaults_of_the_config():
    schema = schema_of(ZeroConfig)
    assert [f.name for f in dataclasses.fields(schema)] == [f.name for f in dataclasses.fields(ZeroConfig)]
    assert make_zero_config({}) == ZeroConfig()


def test_settings_become_one_validated_config():
    config = make_zero_config({"stage": 2, "offload": {"target": "none"}, "units": ["Block"]})
    assert config == ZeroConfig(stage=2, offload=OffloadConfig(), units=["Block"])
    assert make_strategy(stage=1).config.stage == 1
    assert isinstance(make_strategy(name="ddp"), LaunchedDDP)
    assert make_strategy(name="fsdp") == "fsdp"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 4}, "stage=4"),
        ({"stage": "two"}, "two"),
        ({"stagee": 1}, "did you mean strategy.stage"),
        ({"offload": {"target": "disk"}}, "offload.target='disk'"),
        ({"find_unused_parameters": "perhaps"}, "perhaps"),
    ],
)
def test_wrong_settings_are_config_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_zero_config(settings)


@pytest.mark.parametrize(
    ("hint_", "plain"),
    [
        (Literal[1, 2], int),
        (Literal["a", 1] | None, Union[str, int, None]),  # noqa: UP007
        (Sequence[str] | None, Optional[list[str]]),  # noqa: UP045
        (int | float, Union[int, float]),  # noqa: UP007
        (int | list[str] | None, Any),
        (Any | None, Any),
    ],
)
def test_types_become_what_omegaconf_can_check(hint_, plain):
    assert plain_type(hint_) == plain


def test_a_dataclass_or_a_word_becomes_the_dataclass():
    assert plain_type(OffloadConfig | str) is schema_of(OffloadConfig)


def test_trainer_takes_every_argument_of_lightnings():
    known = {f.name for f in dataclasses.fields(trainer_schema())}
    assert known | {"strategy", "callbacks", "self"} == {*inspect.signature(Trainer.__init__).parameters, "_target_"}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("strategy.offload=cpu", "strategy/offload=cpu"),
        ("trainer.strategy=zero2", "use strategy=zero2"),
        ("trainer.max_stepz=3", "did you mean trainer.max_steps?"),
        ("+strategy.stagee=3", "did you mean strategy.stage?"),
        ("trainer.qqq=3", "known: accelerator"),
        ("trainer.max_steps=3", None),
        ("strategy.offload.target=cpu", None),
        ("strategy.name=fsdp", None),
        ("model.width=3", None),
        ("strategy=zero2", None),
    ],
)
def test_hints_name_the_override_that_works(override, text):
    said = hint(override)
    assert said is None if text is None else text in said
