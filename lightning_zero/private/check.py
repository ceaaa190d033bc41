"""Tells at the start of a run which private parts of a library have moved, instead of failing or misleading later.

Each private file has a table of :class:`Needed` parts. :func:`check` compares it with the installed library: whether a
name is there, takes its parameters in the order in which we pass them, and stores the attributes that we read and set.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any

from lightning_zero.errors import MovedError


@dataclass(frozen=True)
class Needed:
    """One private part of a library."""

    name: str
    """``"package.module:Class.attribute"``; of a property, ``.fset`` is its setter."""
    takes: str | None = None
    """The leading parameters as we pass or receive them, ``"self, trainer"``; further ones must have defaults.
    Those behind ``*`` are passed by keyword."""
    stores: str = ""
    """Attributes and variables that its code uses by these names, ``"_main_port _timeout"``; of a class: any of its
    methods' code. So attributes of instances are checked without making one."""
    sets: str = ""
    """Of a class: those that we assign, so that a property without setter will not do."""


@dataclass(frozen=True)
class Library:
    """Names of a library in use here beside its public ones."""

    name: str
    """As the package index has it."""
    tested: str
    """The versions that were read and tested: ``">=2.6,<2.7"``."""
    needed: tuple[Needed, ...]


_checked: set[Library] = set()
_log = logging.getLogger(__name__)


def check(library: Library) -> None:
    """Compares the installed library with its table, once per process; rank 0 says so if it is newer than tested.

    Raises:
        MovedError: Naming everything that is gone or another than what was tested, and the versions to use.
    """
    if library in _checked:
        return
    if moved := [text for needed in library.needed for text in _moved(needed)]:
        raise MovedError(_message(library, moved))
    _checked.add(library)
    if _is_newer(library) and {os.environ.get(name, "0") for name in _RANKS} == {"0"}:
        newer = f"{library.name} {_found(library)} is newer than {library.name}{library.tested}, which was tested"
        _log.warning("%s", f"{newer}; `lightning-zero check` compares it with DDP.")


@contextmanager
def importing(library: Library) -> Iterator[None]:
    """Around imports of private names: what is gone is named together with all else that has moved."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        check(library)
        raise MovedError(_message(library, [str(error)])) from error


_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
"""Set by launchers; unset on the only process."""


def _found(library: Library) -> str:
    try:
        return version(library.name)
    except PackageNotFoundError:
        return "an unknown version"


def _is_newer(library: Library) -> bool:
    _, _, end = library.tested.partition("<")
    found, bound = ([int(number) for number in re.findall(r"\d+", text)] for text in (_found(library), end))
    return bool(bound) and found >= bound


def _message(library: Library, moved: list[str]) -> str:
    return (
        f"lightning_zero uses private parts of {library.name}, tested with {library.name}{library.tested}; found"
        f" {_found(library)}: {'; '.join(moved)}. Use '{library.name}{library.tested}'."
    )


def _moved(needed: Needed) -> Iterator[str]:
    """Says what is not as in the table."""
    module, _, path = needed.name.partition(":")
    shown = f"{module}.{path}"
    try:
        found: Any = import_module(module)
    except ImportError:
        yield f"{module} is gone"
        return
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            yield f"{shown} is gone"
            return
    if needed.takes is not None and (difference := _other_parameters(found, needed.takes)):
        yield f"{shown} {difference}"
    names = _names_in(found) if needed.stores else set()
    yield from (f"{shown} no longer has {name}" for name in needed.stores.split() if name not in names)
    for name in needed.sets.split():
        attribute = inspect.getattr_static(found, name, None)
        if isinstance(attribute, property) and attribute.fset is None:
            yield f"{shown}.{name} is read-only"


def _innermost(function: Any) -> Any:
    """The function inside decorators; DeepSpeed's say nothing of it and take anything, and so does the one that
    Dynamo puts in the place of ``Module.__init__`` once something is compiled."""
    function = inspect.unwrap(function)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    functions = [cell.cell_contents for cell in cells if inspect.isfunction(cell.cell_contents)]
    if code is not None and code.co_argcount <= 1 and code.co_flags & inspect.CO_VARARGS and len(functions) == 1:
        return _innermost(functions[0])
    return function


def _names_in(found: Any) -> set[Any]:
    """Names and constants in the code of a function, or of a class's methods."""
    if isinstance(found, type):
        return {*dir(found)}.union(*map(_names_in, vars(found).values()))
    function = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    codes: list[Any] = [getattr(_innermost(function), "__code__", None)]
    names: set[Any] = set()
    for code in codes:
        if isinstance(code, CodeType):
            names.update(code.co_names, code.co_varnames, code.co_cellvars, code.co_consts)
            codes += code.co_consts  # functions inside it
    return names


def _other_parameters(function: Any, takes: str) -> str:
    parameters = inspect.signature(_innermost(function)).parameters
    leading, _, keywords = takes.partition("*")
    wanted = [name for name in leading.replace(" ", "").split(",") if name]
    by_keyword = [name for name in keywords.replace(" ", "").split(",") if name]
    rest = [p for name, p in parameters.items() if name not in by_keyword][len(wanted) :]
    optional = all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in rest)
    if list(parameters)[: len(wanted)] == wanted and set(by_keyword) <= set(parameters) and optional:
        return ""
    return f"takes ({', '.join(parameters)}) instead of ({takes})"
