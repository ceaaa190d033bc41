"""Calls of Dynamo's graphs that are given parameters: the layer between Dynamo and the engine of the run under way.

A graph's operators read memory directly, so calls are intercepted graph by graph. Code is compiled once per process and
is used in all runs, so this layer exists once per process, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_zero.private.torch import Dynamo, Graph, assigns_data, never_a_frame, pause_dynamo

_Call = TypeVar("_Call", bound=Callable[..., Any])


class Inputs(Protocol):
    """An engine's part in calls of graphs."""

    def owns(self, p: Tensor) -> bool:
        """Whether it keeps this parameter, and not whole in memory of its own right now."""

    def call(self, graph: Graph, args: tuple[Any, ...], params: Sequence[nn.Parameter]) -> Any:
        """``graph(*args)``, which computes with ``params``."""


class _Process:
    """State that exists once per process."""

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
    if _Process.inputs is not None and assigns_data(module):
        raise ValueError(
            "compiled code assigns p.data, which would take the memory that the strategy keeps the parameter in: write"
            " p.copy_(...) under torch.no_grad(), or mark the function with torch.compiler.disable."
        )
    places: list[int] | None = None
    held = list(module.parameters())  # in the graph itself, as those of a compiled step of an optimizer

    def call(*args: Any) -> Any:
        nonlocal places
        if _Process.inputs is None:
            return graph(*args)
        if places is None:
            places = [i for i, value in enumerate(args) if isinstance(value, nn.Parameter)]
        return _Process.inputs.call(graph, args, [*(args[place] for place in places), *held])

    return call


def untraced(function: _Call) -> _Call:
    """``function``, which Dynamo calls as it is, with all that it calls."""
    return torch.compiler.disable(function, reason="lightning_zero gathers, counts and agrees outside of graphs")


@untraced
def end_graph() -> None:
    """Ends Dynamo's graph before code that must not be traced: Dynamo runs that code as it is."""


def outside_graphs(method: _Call) -> _Call:
    """``method``, where compiled code of the user's may be around it: the graph ends, and nothing in it is traced.
    Takes a microsecond; :func:`untraced` takes sixteen."""

    @never_a_frame
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            end_graph()
        before = pause_dynamo(None)
        try:
            return method(*args, **kwargs)
        finally:
            pause_dynamo(before)

    return call  # type: ignore[return-value]
