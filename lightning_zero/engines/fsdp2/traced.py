"""The part of our hooks that ``torch.compile`` may see.

Dynamo inlines the hooks of every module in a compiled region. What gathers, counts or agrees must stay out of its
graphs (:func:`~lightning_zero.engines.graphs.untraced`), as ``fully_shard``'s own hooks do; but each of them ends a
graph. At a unit one ends anyhow, at ``fully_shard``'s. At a module that holds parameters of the root nothing is to be
done inside a step, so hooks there look at :class:`Marks` first, and leave nothing in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_zero.engines.graphs import untraced


@dataclass
class Marks:
    """All that compiled code knows of a run, and so is compiled anew for: a boolean, the same in every step."""

    root_is_whole: bool = False
    """The root's parameters stay gathered until the engine says otherwise."""


def before_owner(marks: Marks, gather: Callable[[], None]) -> Callable[..., None]:
    """A forward pre-hook that gathers the root's parameters where they may not be."""
    gather = untraced(gather)

    def hook(*unused: Any) -> None:
        if not marks.root_is_whole:
            gather()

    return hook
