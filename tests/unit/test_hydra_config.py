"""The schemas are the dataclasses: one list of settings, the same defaults, the same refusals."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.hydra_config import ConfigError, make_strategy, make_zero_config, schema_of


def test_schema_has_the_fields_and_defaults_of_the_config():
    schema = schema_of(ZeroConfig)
    assert [f.name for f in dataclasses.fields(schema)] == [f.name for f in dataclasses.fields(ZeroConfig)]
    assert make_zero_config({}) == ZeroConfig()


def test_settings_become_one_validated_config():
    config = make_zero_config({"stage": 2, "offload": {"target": "none"}, "units": ["Block"]})
    assert config == ZeroConfig(stage=2, offload=OffloadConfig(), units=["Block"])
    assert make_strategy(stage=1).config.stage == 1
    assert make_strategy(name="ddp") == "ddp"


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
