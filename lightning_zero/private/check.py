"""Reports at the start of a run which private parts of a library have moved, instead of failing or misleading later.

Each private file has a table of the names that it uses. :func:`check` looks for them in the installed library.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from types import CodeType
from typing import Any

from lightning_zero.errors import MovedError


@dataclass(frozen=True, eq=False)
class Library:
    """The private names of a library that this package uses."""

    name: str
    """Name in the package index."""
    tested: str
    """The versions that were read and tested: ``">=2.6,<2.7"``."""
    needed: Mapping[str, str]
    """``"package.module"`` or ``"package.module:Class"`` (or a function) -> names that it must have. Names in the code
    of a function, or of any method of a class, count, so parameters, variables and attributes of instances are found
    without a call."""


_checked: set[Library] = set()
_log = logging.getLogger(__name__)


def check(library: Library) -> None:
    """Compares the installed library with its table, once per process; rank 0 logs if it is newer than tested.

    Raises:
        MovedError: Names everything that is gone, and the versions to use.
    """
    if library in _checked:
        return
    if moved := [text for home, names in library.needed.items() for text in _moved(home, names.split())]:
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


def _moved(home: str, names: list[str]) -> Iterator[str]:
    """Yields a text for each of the ``names`` that ``home`` lacks."""
    module, _, path = home.partition(":")
    shown = home.replace(":", ".")
    try:
        found: Any = import_module(module)
        found = attrgetter(path)(found) if path else found
    except (ImportError, AttributeError):
        yield f"{shown} is gone"
        return
    in_code = _names_in(found)
    for name in names:
        try:
            attrgetter(name)(found)
        except AttributeError:
            if name not in in_code:
                yield f"{shown}.{name} is gone"


def _names_in(found: Any) -> set[Any]:
    """Returns the names and constants in the code of a function, or of a class's methods."""
    if isinstance(found, type):
        return set().union(*map(_names_in, vars(found).values()))
    function = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    codes: list[Any] = [getattr(_innermost(function), "__code__", None)]
    names: set[Any] = set()
    for code in codes:
        if isinstance(code, CodeType):
            names.update(code.co_names, code.co_varnames, code.co_cellvars, code.co_consts)
            codes += code.co_consts  # functions inside it
    return names


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
