"""Inputs of compiled code: no Dynamo graph computes with a parameter that is not gathered.

Dynamo hands a module's parameters to its graphs as inputs. The units' hooks run between graphs, so where a unit runs,
its parameters are gathered. Other code may use any parameter at any time: a penalty over ``parameters()``, another
unit's weight, an average that a hook follows. A graph's operators read memory directly, which is empty or stale. So
each graph is called through this module, which touches the graph's inputs first. ``.grad`` and ``.data`` of a parameter
are :mod:`~lightning_zero.engines.residency`'s to answer, so a graph ends there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engines import graphs
from lightning_zero.engines.residency import Resharded, Residency
from lightning_zero.private.torch import DisableTorchFunction, Graph


class GraphInputs:
    """Sees to the inputs of all graphs, until :meth:`end`.

    Args:
        own: ``id`` of each of the user's parameters. Empty while all are full.
    """

    def __init__(self, own: Mapping[int, Any], residency: Residency) -> None:
        self._own, self._residency = own, residency
        graphs.begin(self)

    def end(self) -> None:
        """Graphs are given what they are called with."""
        graphs.end(self)

    def owns(self, p: Tensor) -> bool:
        return id(p) in self._own

    def call(self, graph: Graph, args: tuple[Any, ...], params: Sequence[Tensor]) -> Any:
        """``graph(*args)``, which computes with ``params``."""
        given = [p for p in params if id(p) in self._own]
        gradients = [value for value in args if type(value) is Resharded]
        # What the graph's operators do is no user code, for which modes and guarded classes are.
        with DisableTorchFunction():
            if given or gradients:
                self._residency.touch([*given, *gradients], brings=torch.is_grad_enabled())
            result = graph(*args)
            if given:
                self._residency.computed(given, result)
        return result
