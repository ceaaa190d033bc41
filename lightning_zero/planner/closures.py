"""Functions that a module holds, and that hold the module: ``self.penalty = lambda: self.net.weight.norm()``, a method
that ``torch.compile`` was given. ``copy.deepcopy`` takes functions as they are: a copy's would run the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_zero.private.torch import uncompiled

_DEPTH = 3
"""Depth of the search for functions in an attribute's lists and dicts."""


class Closures:
    """Gives a copy of ``module`` functions that hold the copy; compiled ones are not compiled there.

    Args:
        module: Its modules' attributes are looked through.
        memo: Of the ``copy.deepcopy`` to come, which takes from it what is in it.
    """

    def __init__(self, module: nn.Module, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._held = {id(each) for each in (*module.modules(), *module.parameters(), *module.buffers())}
        self._seen: set[int] = set()
        self._later: list[Callable[[], None]] = []
        for m in module.modules():
            self._holds(vars(m).values(), _DEPTH)

    def finish(self) -> None:
        """After the copy was made."""
        for fill in self._later:
            fill()

    def _holds(self, values: Iterable[Any], depth: int) -> bool:
        """Whether the module can be reached from any of ``values``; functions among them are copied on the way."""
        reached = [self._reaches(value, depth) for value in values]  # all of them, also behind the first
        return any(reached)

    def _reaches(self, value: Any, depth: int) -> bool:
        if id(value) in self._held:
            return True
        if isinstance(value, FunctionType):
            return self._copy(value)
        if isinstance(value, MethodType):
            return self._reaches(value.__self__, depth)
        if not depth:
            return False
        if isinstance(value, partial):
            return self._holds((value.func, *value.args, *value.keywords.values()), depth - 1)
        if isinstance(value, (list, tuple)):
            return self._holds(value, depth - 1)
        return isinstance(value, dict) and self._holds(value.values(), depth - 1)

    def _copy(self, function: FunctionType) -> bool:
        if id(function) in self._seen:
            return False  # a function that reaches itself
        self._seen.add(id(function))
        plain = uncompiled(function)
        if plain is not function:
            return self._copy_compiled(function, plain)
        cells, defaults = function.__closure__ or (), function.__defaults__ or ()
        contents = [cell.cell_contents if _is_filled(cell) else None for cell in cells]
        touched = [self._reaches(content, _DEPTH) for content in contents]
        if not self._holds(defaults, _DEPTH) and not any(touched):
            return False
        touched = [its or content is function for its, content in zip(touched, contents, strict=True)]
        inside = tuple(CellType() if its else cell for its, cell in zip(touched, cells, strict=True))
        copied = FunctionType(function.__code__, function.__globals__, function.__name__, None, inside)
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        self._give(function, copied)

        def fill() -> None:
            copied.__defaults__ = copy.deepcopy(function.__defaults__, self._memo)
            for new, cell in zip(inside, cells, strict=True):
                if new is not cell:
                    new.cell_contents = copy.deepcopy(cell.cell_contents, self._memo)

        self._later.append(fill)
        return True

    def _copy_compiled(self, function: FunctionType, plain: Any) -> bool:
        if not self._reaches(plain, _DEPTH):
            return False
        called: list[Any] = []
        self._give(function, lambda *args, **kwargs: called[0](*args, **kwargs))
        self._later.append(lambda: called.append(copy.deepcopy(plain, self._memo)))
        return True

    def _give(self, function: FunctionType, copied: Callable[..., Any]) -> None:
        self._memo[id(function)] = copied
        self._held.add(id(function))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a variable that is not assigned yet
        return False
    return True
