"""The names users write: which exist, that registering twice is harmless, and what importing the package costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import lightning_zero
from lightning_zero.registry import NAMES, register_strategies

ALL_NAMES = {
    *(f"zero{stage}{suffix}" for stage in (1, 2, 3) for suffix in ("", "_offload", "_deepspeed", "_offload_deepspeed")),
    "zero3_nvme",
    "zero_auto",
}
"""The whole surface."""


def test_the_surface_is_complete() -> None:
    assert set(NAMES) == ALL_NAMES


def test_every_name_is_lower_case_and_its_settings_are_valid() -> None:
    for name, settings in NAMES.items():
        assert name == name.lower()
        config = lightning_zero.ZeroConfig(**settings)
        assert name == "zero_auto" or name.startswith(f"zero{config.stage}")
        assert ("offload" in name) == (config.offload.target == "cpu")
        assert ("nvme" in name) == (config.offload.target == "nvme")
        assert ("deepspeed" in name) == (config.engine == "deepspeed")


def test_registering_again_changes_nothing() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    before = {name: dict(StrategyRegistry[name]) for name in NAMES}
    register_strategies()
    register_strategies()
    assert {name: dict(StrategyRegistry[name]) for name in NAMES} == before
    assert set(NAMES) <= set(StrategyRegistry.available_strategies())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_gives_a_strategy_with_its_settings(name: str) -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    strategy = StrategyRegistry.get(name)
    assert isinstance(strategy, lightning_zero.ZeroStrategy)
    expected = lightning_zero.ZeroConfig(**NAMES[name])
    assert strategy.config == expected


def test_without_deepspeed_its_names_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_zero import host

    monkeypatch.setattr(host, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install deepspeed"):
        StrategyRegistry.get("zero2_deepspeed")
    assert StrategyRegistry.get("zero3_offload").config.offload.target == "cpu"


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Measured against importing lightning itself, which brings what it brings."""
    heavy = ("hydra", "omegaconf", "deepspeed", "transformers", "torch.distributed.fsdp._fully_shard")
    code = (
        "import json, sys; import lightning.pytorch; before = set(sys.modules); import lightning_zero; "
        "print(json.dumps([sorted(set(sys.modules) - before), sorted(sys.modules)])); "
        "from lightning.pytorch.strategies import StrategyRegistry; "
        "assert 'zero3' in StrategyRegistry.available_strategies()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added, everything = json.loads(run.stdout.splitlines()[-1])
    assert not [name for name in added if name.startswith(heavy)]
    assert not [name for name in everything if name.split(".")[0] in ("hydra", "deepspeed")]
    assert {name for name in added if name.startswith("lightning_zero")} == {
        "lightning_zero",
        "lightning_zero.registry",
        "lightning_zero.twins",
    }


def test_public_attributes_exist_and_unknown_ones_are_named() -> None:
    for name in lightning_zero.__all__:
        assert getattr(lightning_zero, name) is not None
        assert name in dir(lightning_zero)
    with pytest.raises(AttributeError, match="zero4"):
        _ = lightning_zero.zero4
