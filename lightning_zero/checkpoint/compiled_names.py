"""Matches parameter names with and without the ``_orig_mod`` that ``torch.compile(module)`` inserts.

A compiled module that is kept next to the original lists each parameter a second time; one that replaces the original
renames all of them. A module that is not compiled reads the checkpoints of both, and vice versa.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

_MARK = "_orig_mod."


def under_current_names(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``state`` under the current names of ``module`` where compiling changed them; keeps other names."""
    now = dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))
    if not any(_MARK in name for name in chain(now, state)):
        return state
    plain = {_plain(name): name for name in sorted(state, key=lambda name: _MARK not in name)}  # unmarked ones last
    also_named: dict[int, list[str]] = {}
    for name, tensor in now.items():
        also_named.setdefault(id(tensor), []).append(name)
    named = dict(state)
    for name, tensor in now.items():
        if name not in state:
            there = (plain[_plain(other)] for other in also_named[id(tensor)] if _plain(other) in plain)
            source = next((other for other in there if _MARK in other or _MARK in name), None)
            if source is not None:
                named[name] = state[source]
    kept, plainly = [state[name] for name in state if name in now], set(map(_plain, now))
    for name in state:
        gone = _MARK in name and name not in now
        if gone and (_plain(name) in plainly or any(_same(state[name], tensor) for tensor in kept)):
            del named[name]
    return named


def _plain(name: str) -> str:
    return name.replace(_MARK, "")


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same tensor, saved under two names."""
    if one is other:
        return True
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.shape == other.shape
        and one.data_ptr() == other.data_ptr() != 0
    )
