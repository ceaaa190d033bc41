"""The names that ``Trainer(strategy=...)`` takes once this package is imported.

Lightning has no entry point for strategies, so this module adds the names to Lightning's registry: immediately if
Lightning is already imported, otherwise when it is imported. So importing this package alone is cheap, which keeps
``--help`` and errors about mistyped arguments fast. ``pytorch_lightning`` gets the names too
(``lightning_zero.twins``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
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
NAMES["zero3_nvme"] = {"stage": 3, "engine": "fsdp2", "offload": "nvme"}
NAMES["zero_auto"] = {"auto": True, "engine": "fsdp2"}
"""Registered name -> fields of ``ZeroConfig``."""

_REGISTRIES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")
"""Lightning's modules with the Trainer's registry, in both of its distributions."""


def register_strategies(trainers: str = _REGISTRIES[0]) -> None:
    """Registers every name, which imports Lightning; idempotent.

    Args:
        trainers: The module with the Trainer's registry.
    """
    registry = import_module(trainers).StrategyRegistry
    for name, settings in NAMES.items():
        registry.register(
            name,
            _maker(trainers, name),
            description="ZeRO " + ", ".join(f"{key} {value}" for key, value in settings.items()),
            override=True,
            **settings,
        )


def register_when_imported() -> None:
    """Registers every name once Lightning's registry is imported, now or later."""
    for trainers in _REGISTRIES:
        if trainers in sys.modules:
            register_strategies(trainers)
    if not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport())


class _RegisterAfterImport(MetaPathFinder):
    """Finds the modules of :data:`_REGISTRIES` as other finders do, and registers the names when one is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        # Wrap the loader that another finder returns: the registry exists only once Lightning's module has run.
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            register_strategies(fullname)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@cache
def _maker(trainers: str, name: str) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        from lightning_zero.strategy import ZeroStrategy  # imported on first use, not with the package

        if import_module(trainers).StrategyRegistry is import_module(_REGISTRIES[0]).StrategyRegistry:
            return ZeroStrategy(**settings)
        raise ValueError(
            f"pytorch_lightning.Trainer(strategy={name!r}): lightning and pytorch_lightning are both imported, and a"
            " Trainer of one cannot run strategies of the other. Write `import lightning_zero` in front of the"
            " script's other imports and install one version of both, or use lightning.pytorch alone."
        )

    return make
