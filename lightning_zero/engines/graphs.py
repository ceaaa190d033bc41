"""Whoever runs a graph of Dynamo's that is given parameters: between Dynamo and the engine of the run under way.

A graph's operators read memory directly, so no view can translate for them. Code is compiled once per process and runs
in any run, so what stands between is there once, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_zero.private.torch import Dynamo, Graph, puts_other_memory


class Inputs(Protocol):
    """What an engine does for graphs."""

    def owns(self, p: Tensor) -> bool:
        """Whether it keeps this parameter, and not whole in memory of its own right now."""

    def call(self, graph: Graph, args: tuple[Any, ...], places: Sequence[int]) -> Any:
        """``graph(*args)``, whose parameters are at ``places``."""


class _Process:
    """What there is once."""

    dynamo: Dynamo | None = None
    inputs: Inputs | None = None
    """Of the run that is under way. Graphs outlive it."""
    traced_outside = True
    """Whether there may be graphs that were made while no run was under way, and know nothing of one."""


def begin(inputs: Inputs) -> None:
    """From now on all graphs are called through ``inputs``; code that was traced outside of a run is traced anew."""
    if _Process.dynamo is None:
        _Process.dynamo = Dynamo(_seen_to, _is_owned)
    if _Process.traced_outside:
        _Process.dynamo.forget_graphs()
        _Process.traced_outside = False
    _Process.inputs = inputs


def end(inputs: Inputs) -> None:
    """Graphs are given what they are called with."""
    if _Process.inputs is inputs:
        _Process.inputs = None


def _is_owned(p: Tensor) -> bool:
    return _Process.inputs is not None and _Process.inputs.owns(p)


def _seen_to(module: Any, graph: Graph) -> Graph:
    """``graph``, whose inputs the run under way sees to; the user's parameters have the same places in each call."""
    _Process.traced_outside |= _Process.inputs is None
    if _Process.inputs is not None and puts_other_memory(module):
        raise ValueError(
            "compiled code assigns p.data, which would take the memory that the strategy keeps the parameter in: write"
            " p.copy_(...) under torch.no_grad(), or mark the function with torch.compiler.disable."
        )
    places: list[int] | None = None

    def call(*args: Any) -> Any:
        nonlocal places
        if _Process.inputs is None:
            return graph(*args)
        if places is None:
            places = [i for i, value in enumerate(args) if isinstance(value, nn.Parameter)]
        return _Process.inputs.call(graph, args, places)

    return call
