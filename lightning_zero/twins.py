"""Makes ``lightning`` and ``pytorch_lightning`` the same modules.

Lightning is published under both names: the same code, two sets of classes. A Trainer of one accepts neither strategies
nor modules of the other. So the package that a process imports first is used under both names: a script or a library
with ``import pytorch_lightning as pl`` gets the same classes as this package. If both were imported before this
package, or if their versions differ, nothing is replaced, and ``lightning_zero.registry`` refuses the Trainer that
cannot run our strategies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

TWINS = {
    "pytorch_lightning": "lightning.pytorch",
    "lightning.pytorch": "pytorch_lightning",
    "lightning_fabric": "lightning.fabric",
    "lightning.fabric": "lightning_fabric",
}
"""Package -> the package with the same content."""


def unite_twins() -> None:
    """Makes later imports of one twin return the modules of the other if that was imported first; idempotent."""
    if not any(isinstance(finder, _FirstTwinFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FirstTwinFinder())


@cache
def _are_twins() -> bool:
    """Whether both are installed in the same version."""
    try:
        return version("lightning") == version("pytorch-lightning")
    except PackageNotFoundError:
        return False


class _FirstTwinFinder(MetaPathFinder):
    """Resolves modules of the twin that is imported second to those of the first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first = _name_in_first(fullname)
        if first is None or find_spec(first) is None:
            return None
        return ModuleSpec(fullname, _Alias(first))


def _name_in_first(name: str) -> str | None:
    """The name of the same module in the twin that was imported first; None if no twin is imported, or if ``name``
    belongs to it."""
    if name in TWINS:
        return TWINS[name] if TWINS[name] in sys.modules and _are_twins() else None
    parent, _, last = name.rpartition(".")
    package = sys.modules.get(parent)
    if not parent.startswith(tuple(TWINS)) or package is None or package.__name__ == parent:
        return None
    return f"{package.__name__}.{last}"


class _Alias(Loader):
    """Loads a module under a second name without changing it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it by the alias's spec
