"""The names users write: which exist, that registering twice is harmless, and what importing the package costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import lightning_zero
from lightning_zero.registry import NAMES, register_strategies


def test_registering_again_changes_nothing() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    before = {name: dict(StrategyRegistry[name]) for name in NAMES}
    register_strategies()
    register_strategies()
    assert {name: dict(StrategyRegistry[name]) for name in NAMES} == before
    for name, settings in NAMES.items():
        assert StrategyRegistry.get(name).config == lightning_zero.ZeroConfig(**settings)


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
