"""Intercepts calls of Dynamo's graphs that take parameters: the layer between Dynamo and the current run's engine.

Dynamo passes a module's parameters to its graphs as inputs. The units' hooks run between graphs, so a running unit's
parameters are gathered. Other code may use any parameter at any time: a penalty over ``parameters()``, another unit's
weight, a moving average in a hook. A graph's operators read memory directly, and a resharded parameter's memory is
empty. Therefore the current run (:mod:`~lightning_zero.engines.residency`) calls each graph and touches its inputs
first; at ``.grad`` and ``.data`` of a parameter a graph ends. Code is compiled once per process and reused in all runs,
so this layer also exists once per process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_zero.private.torch import Dynamo, Graph, assigns_data, never_a_frame, pause_dynamo

if TYPE_CHECKING:
    from lightning_zero.engines.residency import Residency

_Call = TypeVar("_Call", bound=Callable[..., Any])


class _Process:
    """State that exists once per process."""

    dynamo: Dynamo | None = None
    inputs: Residency | None = None
    """Handler of the current run. Graphs outlive the run."""
    traced_outside = True
    """Whether graphs may exist that were traced outside of a run and therefore do not call the handler."""


class Calls:
    """Calls all graphs through ``inputs`` until :meth:`end`; code that was traced outside of a run is traced again."""

    def __init__(self, inputs: Residency) -> None:
        if _Process.dynamo is None:
            _Process.dynamo = Dynamo(_seen_to, _is_owned)
        if _Process.traced_outside:
            _Process.dynamo.forget_graphs()
            _Process.traced_outside = False
        self._inputs = _Process.inputs = inputs

    def end(self) -> None:
        """Graphs get their inputs unchanged from now on, unless another run has begun."""
        if _Process.inputs is self._inputs:
            _Process.inputs = None


def _is_owned(p: Tensor) -> bool:
    return _Process.inputs is not None and _Process.inputs.owns(p)


def _seen_to(module: Any, graph: Graph) -> Graph:
    """Wraps ``graph`` so that the current run's handler calls it. User parameters have the same positions in each
    call."""
    _Process.traced_outside |= _Process.inputs is None
    if _Process.inputs is not None and assigns_data(module):
        raise ValueError(
            "compiled code assigns p.data, which would replace the memory in which the strategy keeps the parameter:"
            " write p.copy_(...) under torch.no_grad(), or mark the function with torch.compiler.disable."
        )
    places: list[int] | None = None
    held = list(module.parameters())  # constants of the graph, as in a compiled optimizer step

    def call(*args: Any) -> Any:
        nonlocal places
        if _Process.inputs is None:
            return graph(*args)
        if places is None:
            places = [i for i, value in enumerate(args) if isinstance(value, nn.Parameter)]
        return _Process.inputs.call_graph(graph, args, [*(args[place] for place in places), *held])

    return call


def untraced(function: _Call) -> _Call:
    """Decorator: Dynamo does not trace ``function`` or any function that it calls."""
    return torch.compiler.disable(function, reason="lightning_zero gathers, counts and agrees outside of graphs")


@untraced
def end_graph() -> None:
    """Ends Dynamo's graph before code that must not be traced; Dynamo runs that code in eager mode."""


def outside_graphs(method: _Call) -> _Call:
    """Decorator for a method that the user's compiled code may call: the graph ends, and the method is not traced.
    A call costs one microsecond; with :func:`untraced` it costs sixteen."""

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
