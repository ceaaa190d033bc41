"""Gathers the inputs of compiled code: no Dynamo graph computes with a resharded parameter.

Dynamo passes a module's parameters to its graphs as inputs. The units' hooks run between graphs, so a running unit's
parameters are gathered. Other code may use any parameter at any time: a penalty over ``parameters()``, another unit's
weight, a moving average in a hook. A graph's operators read memory directly, and a resharded parameter's memory is
empty. Therefore each graph is called through this file, which touches the graph's inputs first. ``.grad`` and
``.data`` of a parameter need :mod:`~lightning_zero.engines.residency`, so a graph ends there.
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
    """Gathers the inputs of all graphs, until :meth:`end`.

    Args:
        own: ``id`` of each user parameter. Empty while all parameters are full.
    """

    def __init__(self, own: Mapping[int, Any], residency: Residency) -> None:
        self._own, self._residency = own, residency
        graphs.begin(self)

    def end(self) -> None:
        """Graphs get their inputs unchanged from now on."""
        graphs.end(self)

    def owns(self, p: Tensor) -> bool:
        return id(p) in self._own

    def call(self, graph: Graph, args: tuple[Any, ...], params: Sequence[Tensor]) -> Any:
        """Calls ``graph(*args)``, which computes with ``params``."""
        given = [p for p in params if id(p) in self._own]
        gradients = [value for value in args if type(value) is Resharded]
        # The mode intercepts user code; the graph's operators are not user code.
        with DisableTorchFunction():
            if given or gradients:
                self._residency.touch([*given, *gradients], brings=torch.is_grad_enabled())
            result = graph(*args)
            if given:
                self._residency.computed(given, result)
        return result
