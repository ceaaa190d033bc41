"""Reports at the start of a run which private parts of a library have moved, instead of failing or misleading later.

Each private file has a table of :class:`Needed` parts. :func:`check` compares the table with the installed library:
whether a name exists, takes its parameters in the order in which we pass them, and stores the attributes that we read
and set.
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
    """``"package.module:Class.attribute"``; a property's setter is ``.fset``."""
    takes: str | None = None
    """The leading parameters as we pass or receive them, ``"self, trainer"``; further ones must have defaults.
    Parameters after ``*`` are passed by keyword."""
    stores: str = ""
    """Attributes and variables that its code uses by these names, ``"_start_method procs"``. For a class, the code of
    all its methods counts, so attributes of instances are checked without making one."""
    sets: str = ""
    """For a class: attributes that we assign, so a property without a setter does not suffice."""


@dataclass(frozen=True)
class Library:
    """The private names of a library that this package uses."""

    name: str
    """Name in the package index."""
    tested: str
    """The versions that were read and tested: ``">=2.6,<2.7"``."""
    needed: tuple[Needed, ...]


_checked: set[Library] = set()
_log = logging.getLogger(__name__)


def check(library: Library) -> None:
    """Compares the installed library with its table, once per process; rank 0 logs if it is newer than tested.

    Raises:
        MovedError: Names everything that is gone or has changed, and the versions to use.
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
    """Wraps imports of private names: if one fails, the error names everything in the table that has moved."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        check(library)
        raise MovedError(_message(library, [str(error)])) from error


_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
"""Variables that launchers set; a single process has none of them."""


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
    """Yields a text for each difference between the table and the library."""
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
    """Returns the function inside decorators.

    ``inspect.unwrap`` does not see through DeepSpeed's decorators, nor through Dynamo's replacement of
    ``Module.__init__`` once something is compiled: these take any arguments and do not name what they wrap.
    """
    function = inspect.unwrap(function)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    functions = [cell.cell_contents for cell in cells if inspect.isfunction(cell.cell_contents)]
    if code is not None and code.co_argcount <= 1 and code.co_flags & inspect.CO_VARARGS and len(functions) == 1:
        return _innermost(functions[0])
    return function


def _names_in(found: Any) -> set[Any]:
    """Returns the names and constants in the code of a function, or of a class's methods."""
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
