"""The names that ``Trainer(strategy=...)`` takes once this package is imported.

Lightning has no entry point for strategies, so the names are put into its registry: at once where Lightning is
imported already, else when it is. Importing this package alone therefore costs nothing, which the command's ``--help``
and its refusals of what was mistyped live by.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES: dict[str, dict[str, Any]] = {
    f"zero{stage}{offloaded}{suffix}": {"stage": stage, "engine": engine, **offload}
    for suffix, engine in (("", "fsdp2"), ("_deepspeed", "deepspeed"))
    for offloaded, offload in (("", {}), ("_offload", {"offload": "cpu"}))
    for stage in (1, 2, 3)
}
NAMES["zero3_nvme"] = {"stage": 3, "engine": "deepspeed", "offload": "nvme"}
NAMES["zero_auto"] = {"auto": True, "engine": "fsdp2"}
"""Registered name -> the fields of ``ZeroConfig`` it stands for."""

_REGISTRY = "lightning.pytorch.strategies"
"""The module of Lightning's that makes the registry."""


def register_strategies() -> None:
    """Registers every name, importing Lightning; safe to call again.

    Fabric gets the names too, to say that it is the Trainer that takes them.
    """
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRICS
    from lightning.pytorch.strategies import StrategyRegistry

    for name, settings in NAMES.items():
        StrategyRegistry.register(
            name,
            _make_strategy,  # the class is imported on first use, not with the package
            description="ZeRO " + ", ".join(f"{key} {value}" for key, value in settings.items()),
            override=True,
            **settings,
        )
        FABRICS.register(name, partial(_refuse_fabric, name), description="of the Trainer alone", override=True)
    StrategyRegistry.available_strategies = lambda: _KnownNames(StrategyRegistry)  # type: ignore[method-assign]


def register_when_imported() -> None:
    """Registers every name as soon as Lightning's registry is there."""
    if _REGISTRY in sys.modules:
        register_strategies()
    elif not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport())


class _RegisterAfterImport(MetaPathFinder):
    """Finds one module, :data:`_REGISTRY`, as the other finders do, and registers the names once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            register_strategies()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _KnownNames(list[str]):
    """What the Trainer looks a name up in; its own refusal of an unknown one lists examples without ours."""

    def __contains__(self, name: object) -> bool:
        if list.__contains__(self, name):
            return True
        if isinstance(name, str) and (close := get_close_matches(name, NAMES, n=1, cutoff=0.75)):
            raise ValueError(
                f"strategy={name!r} is not known: did you mean {close[0]!r}? lightning_zero has"
                f" {', '.join(map(repr, NAMES))}."
            )
        return False


def _make_strategy(**settings: Any) -> Any:
    from lightning_zero.auto import make_strategy
    from lightning_zero.config import ZeroConfig

    return make_strategy(ZeroConfig.from_kwargs(**settings))


def _refuse_fabric(name: str) -> Any:
    raise ValueError(
        f"Fabric(strategy={name!r}): lightning_zero's strategies are the Trainer's, Fabric cannot run them. Use"
        f" lightning.Trainer(strategy={name!r}), or for Fabric one of Lightning's own, such as 'fsdp'."
    )
