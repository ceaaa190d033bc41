"""Copies and pickles of a run's modules without the engine's additions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

_COPIED = "__reduce_ex__"
"""Method name that :mod:`copy` and :mod:`pickle` both look up on the object."""


class PlainCopies:
    """Has modules of a run copied and pickled without the attributes and hooks that the engine has added to them.

    Args:
        module: Each of its modules gets a ``__reduce_ex__`` until :meth:`undo`. Its present hooks are the user's.
        is_own: Whether a module's attribute of this name is the engine's.
    """

    def __init__(self, module: nn.Module, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own
        self._kept = {m: {name: set(hooks) for name, hooks in _hooks_of(m)} for m in module.modules()}

    def begin(self) -> None:
        """Takes all hooks registered since the constructor as the engine's and leaves them out of copies."""
        for m, kept in self._kept.items():
            ours = {name: set(hooks) - kept[name] for name, hooks in _hooks_of(m)}
            ours = {name: ids for name, ids in ours.items() if ids}
            m.__dict__[_COPIED] = partial(_reduced, m, ours, self._is_own)

    def undo(self) -> None:
        """Restores the normal copying of the modules."""
        for m in self._kept:
            m.__dict__.pop(_COPIED, None)


def _hooks_of(module: nn.Module) -> Iterator[tuple[str, dict[int, Any]]]:
    return ((name, value) for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict))


def _reduced(module: nn.Module, ours: Mapping[str, set[int]], is_own: Callable[[str], bool], protocol: Any) -> Any:
    """The value that ``module.__reduce_ex__`` would return for a module that no engine has touched."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    made, arguments, *rest = reduced
    if rest and isinstance(rest[0], dict):
        state = {key: value for key, value in rest[0].items() if key != _COPIED and not is_own(key)}
        for name, ids in ours.items():
            if name in state:
                state[name] = type(state[name])((key, hook) for key, hook in state[name].items() if key not in ids)
        rest[0] = state
    return made, arguments, *rest
