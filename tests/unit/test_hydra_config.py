"""The schemas are the dataclasses: one list of settings, the same defaults, the same refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hydra.errors import HydraException

from lightning_zero.app.hydra_config import (
    ConfigError,
    explain,
    make_slurm_job,
    make_strategy,
    make_trainer,
    make_zero_config,
)
from lightning_zero.app.plan_command import run_plan
from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.registry import NAMES
from tests.helpers.ranks import ROOT


def _job(*overrides: str) -> Any:
    """The job as the command line makes it."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("lightning_zero.conf", version_base="1.3"):
        return compose("config", list(overrides))


def _composed(*overrides: str) -> Any:
    """Its group ``strategy``."""
    return make_zero_config(_job(*overrides).strategy)


def test_a_plan_refuses_the_settings_that_a_run_refuses():
    """Engine and offload do not enter its account, and are no less wrong."""
    contradiction = "strategy=zero3_nvme", "strategy/engine=deepspeed"
    with pytest.raises(ConfigError) as of_run:
        _composed(*contradiction)
    shapes = "plan.batch=[2,8]", "plan.device_memory_gib=1"
    with pytest.raises(ConfigError) as of_plan:
        run_plan(_job(*contradiction, *shapes))
    assert str(of_plan.value) == str(of_run.value)


def test_a_setting_of_the_trainer_may_be_none():
    """Lightning's default is not what the user has written."""
    batches = "trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=7", "callbacks=none", "logger=none"
    assert make_trainer(_job(*batches)).check_val_every_n_epoch is None


@pytest.mark.parametrize("setting", ["nodes=two", "nodes=0", "gpus_per_node=-1", "time_minutes=soon"])
def test_numbers_of_a_batch_job_are_checked_before_it_waits(setting):
    with pytest.raises(ConfigError, match=rf"launcher\.{setting.split('=')[0]}=.*use a whole number"):
        make_slurm_job(_job("launcher=slurm", f"launcher.{setting}"))


def test_groups_of_engine_and_offload():
    assert _composed() == _composed("strategy=zero3") == ZeroConfig()
    assert _composed("strategy/offload=none") == ZeroConfig(offload="none")
    assert _composed("strategy=zero2", "strategy/offload=cpu") == ZeroConfig(stage=2, offload="cpu")
    assert _composed("strategy.offload.target=cpu") == _composed("strategy.offload=cpu") == ZeroConfig(offload="cpu")
    assert _composed("strategy/compile=units", "strategy.compile.dynamic=true") == ZeroConfig(
        compile={"target": "units", "dynamic": True}  # type: ignore[arg-type]
    )
    assert _composed(
        *("strategy=zero3", "strategy/engine=deepspeed", "strategy/offload=cpu", "strategy.offload.ratio=0.5"),
    ) == ZeroConfig(
        engine="deepspeed",
        offload=OffloadConfig(target="cpu", ratio=0.5),
    )
    assert _composed("strategy=zero3_nvme") == _composed("strategy/offload=nvme") == ZeroConfig(offload="nvme")


def test_a_deepspeed_file_decides_what_was_not_chosen(tmp_path):
    path = tmp_path / "zero_2.json"
    path.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    file = f"strategy.deepspeed_config={path}"
    config = _composed("strategy/engine=deepspeed", file)
    assert (config.stage, config.offload.target) == (2, "cpu")
    assert config == _composed("strategy=zero2", "strategy/engine=deepspeed", file)
    assert make_strategy(engine="deepspeed", stage=None, deepspeed_config=str(path)).config == config
    inline = "strategy.deepspeed_config={zero_optimization:{stage:1}}"
    assert _composed("strategy/engine=deepspeed", inline).stage == 1
    with pytest.raises(ConfigError, match=r"stage=3, but .*stage=2 .*strategy=zero_default"):
        _composed("strategy=zero3", "strategy/engine=deepspeed", file)
    with pytest.raises(ConfigError, match=r"target='none', but .*'cpu'"):
        _composed("strategy/engine=deepspeed", "strategy/offload=none", file)
    with pytest.raises(ConfigError, match="engine='deepspeed'"):
        _composed(file)
    path.write_text('{"zero_optimizaton": {"stage": 2}}')
    with pytest.raises(ConfigError, match=f"zero_optimizaton in {path} .*did you mean zero_optimization"):
        _composed("strategy/engine=deepspeed", file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 4}, "stage=4"),
        ({"stagee": 1}, "strategy: stagee=1 .* Did you mean 'stage'"),
        ({"offload": {"target": "disk"}}, "offload.target='disk'"),
        ({"offload": {"target": "nvme"}, "engine": "deepspeed"}, "zero3_nvme"),
    ],
)
def test_wrong_settings_are_config_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_zero_config(settings)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("strategy.offload.targe=cpu", "Did you mean 'target'?"),
        ("strategi=zero3", "Did you mean 'strategy'?"),
        ("devices=2", "Write trainer.devices."),
        ("trainer.strategy=zero2", "use strategy=CHOICE"),
    ],
)
def test_the_error_about_a_key_names_the_one_that_was_meant(override, text):
    with pytest.raises(HydraException) as raised:
        _composed(override)
    assert text in explain(raised.value)


def test_keys_that_hydra_adds_are_refused_too():
    """A YAML file, or ``+`` on the command line, adds keys that Hydra itself would pass on."""
    with pytest.raises(ConfigError, match=r"strategy: stagee=1 .* Did you mean 'stage'"):
        _composed("+strategy.stagee=1")
    with pytest.raises(ConfigError, match=r"trainer\.max_step=1: .* Did you mean 'max_steps'"):
        make_trainer(_job("+trainer.max_step=1"))


def test_every_name_is_a_choice_of_the_command_line_and_stands_in_the_readme():
    """README's table, the registry and ``conf/strategy`` are one list, and a name means the same in each."""
    chosen = {path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml")}
    assert chosen == {*NAMES, "ddp", "zero_default"}
    for name, settings in NAMES.items():
        assert _composed(f"strategy={name}") == ZeroConfig.from_kwargs(**settings), name
    section = (ROOT / "README.md").read_text().split("\n## Names\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(?:strategy=)?(zero\w+|ddp)`", section))
    six = {f"zero{stage}{offload}" for stage in (1, 2, 3) for offload in ("", "_offload")}
    assert named | {f"{name}_deepspeed" for name in six} == chosen
