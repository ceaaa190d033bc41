"""The part of the engine's hooks that ``torch.compile`` may trace.

Dynamo inlines the hooks of every module in a compiled region. Code that gathers, counts or agrees must stay out of its
graphs (:func:`~lightning_zero.engines.graphs.untraced`), as the hooks of ``fully_shard`` do, but each untraced call
breaks the graph. At a unit, ``fully_shard``'s hooks break the graph anyway. At a module that holds parameters of the
root there is nothing to do inside a step, so hooks there check :class:`Marks` first and leave nothing in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_zero.engines.graphs import untraced


@dataclass
class Marks:
    """All that compiled code reads of a run: one boolean, equal in every step. A change means recompilation."""

    root_is_full: bool = False
    """The root's parameters stay gathered until the engine says otherwise."""


def before_owner(marks: Marks, gather: Callable[[], None]) -> Callable[..., None]:
    """Return a forward pre-hook that gathers the root's parameters unless ``marks`` says they are gathered."""
    gather = untraced(gather)

    def hook(*unused: Any) -> None:
        if not marks.root_is_full:
            gather()

    return hook
