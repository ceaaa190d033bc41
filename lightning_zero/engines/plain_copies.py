"""Copies and pickles of a run's modules hold what the user made, and nothing of the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_zero.private.torch import own_parameters

_COPIED = "__reduce_ex__"
"""Looked up on the object by :mod:`copy` and :mod:`pickle` alike."""


class PlainCopies:
    """Modules of a run are copied and pickled without what the engine has hung on them.

    Args:
        module: Each module below gets the means; :meth:`undo` takes it away. Its hooks so far are the user's.
        is_own: Whether a module's attribute of this name is the engine's.
    """

    def __init__(self, module: nn.Module, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own
        self._kept = {m: {name: set(hooks) for name, hooks in _hooks_of(m)} for m in module.modules()}

    def begin(self) -> None:
        """The engine's hooks are those that have come since."""
        for m, kept in self._kept.items():
            ours = {name: set(hooks) - kept[name] for name, hooks in _hooks_of(m)}
            ours = {name: ids for name, ids in ours.items() if ids}
            m.__dict__[_COPIED] = partial(_reduced, m, ours, self._is_own)

    def undo(self) -> None:
        """Modules are copied as they were before."""
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
        if "_parameters" in state:  # an engine may have a table of its own there
            state["_parameters"] = dict(dict.items(own_parameters(module)))
        for name, ids in ours.items():
            if name in state:
                state[name] = type(state[name])((key, hook) for key, hook in state[name].items() if key not in ids)
        rest[0] = state
    return made, arguments, *rest


def pickle_plainly(
    parameters: Iterable[nn.Parameter],
    value: Callable[[Tensor], Tensor],
    attributes: Callable[[Tensor], Mapping[str, Any]],
) -> None:
    """``torch.save`` of ``parameters`` writes whole ones with the user's attributes, for as long as each has the
    attribute that this sets.

    Args:
        parameters: Of the run's module.
        value: A parameter's values in memory of their own.
        attributes: Those of a parameter that are the user's.
    """

    def reduced(p: nn.Parameter, protocol: Any) -> Any:
        plain = nn.Parameter(value(p), p.requires_grad)
        vars(plain).update(attributes(p))
        return plain.__reduce_ex__(protocol)

    for p in parameters:
        vars(p)[_COPIED] = partial(reduced, p)
