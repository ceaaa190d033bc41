"""Inputs of compiled code: writes of a graph to parameters reach the masters, and none computes with an empty one.

DeepSpeed's own hooks stand before each of the smallest modules at stage 3, so a graph there holds one of them at most,
and a parameter's shape, for which graphs are made, changes from use to use: stage 3 is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_zero.engines import graphs
from lightning_zero.engines.deepspeed.access import Access
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay
from lightning_zero.private.torch import DisableTorchFunction, Graph, is_compiled, version_of


class GraphInputs:
    """Sees to the inputs of all graphs, until :meth:`end`.

    Args:
        held: The parameters that DeepSpeed has.
    """

    def __init__(self, held: Collection[Tensor], access: Access, under_way: UnderWay) -> None:
        self._held, self._access, self._under_way = held, access, under_way
        graphs.begin(self)

    def end(self) -> None:
        """Graphs are given what they are called with."""
        graphs.end(self)

    def owns(self, p: Tensor) -> bool:
        return p in self._held

    def call(self, graph: Graph, args: tuple[Any, ...], params: Sequence[Tensor]) -> Any:
        """``graph(*args)``, which computes with ``params``."""
        if Phase.WHOLE in self._under_way:
            return graph(*args)
        with DisableTorchFunction():  # what the graph's operators do is no user code
            held = [(p, version_of(p)) for p in params if self.owns(p)]
            if any(self._access.is_away(p) for p, _ in held):
                raise ValueError(_NOT_AT_STAGE_3.format("compiled code is given a parameter that is partitioned"))
            result = graph(*args)
            for p, version in held:
                if version_of(p) != version:
                    self._access.written(p, None)
        return result


_NOT_AT_STAGE_3 = (
    "engine='deepspeed' at stage 3: {}, but DeepSpeed gathers before each of the smallest modules, where graphs end:"
    " use engine='fsdp2' or stage=2, or leave the module uncompiled."
)


def refuse_compiled(module: nn.Module) -> None:
    """Raises ``ValueError`` for a module that is compiled, at stage 3."""
    for name, each in module.named_modules():
        if is_compiled(each):
            raise ValueError(_NOT_AT_STAGE_3.format(f"module {name or type(each).__name__!r} is compiled"))
