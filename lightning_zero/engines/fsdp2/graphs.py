"""What compiled code is given: no graph of Dynamo's ever computes with a parameter that is away.

Dynamo hands a module's parameters to its graphs as inputs. The units' hooks run between graphs, so where a unit runs,
its parameters are gathered. Other code may use any parameter at any time: a penalty over ``parameters()``, another
unit's weight, an average that a hook follows. No view can look at that, since a graph's operators read memory directly,
which is empty or stale. So each graph is called through here:

- a parameter that is away is read whole (a collective, so all ranks must make the call), differentiably where a
  gradient is wanted, as the view does outside of graphs; what the graph writes to it goes to the shards;
- ``.grad`` and ``.data`` of a parameter are the view's to answer, so a graph ends there;
- a gathered one may be away when the backward comes, if the result reaches the loss beside the unit's output; then it
  is gathered for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor

from lightning_zero.comm.shards import before_host_write
from lightning_zero.engines import graphs
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.writes import store_rows
from lightning_zero.private.torch import DisableTorchFunction, Graph, version_of


class GraphInputs:
    """Sees to the inputs of all graphs, until :meth:`end`.

    Args:
        own: ``id`` of each of the user's parameters -> what is known of it. Empty while all are whole.
        read: Reads a shard differentiably.
        on_write: Called before a shard changes.
        group_of: ``id`` of each of the user's parameters -> what is gathered with it; ``None`` where gathered
            parameters stay until the backward is over.
    """

    def __init__(
        self,
        own: Mapping[int, private.ShardedParam],
        read: Callable[[DTensor], Tensor],
        on_write: Callable[[], None],
        group_of: Mapping[int, private.Group] | None,
    ) -> None:
        self.own, self._read, self._on_write, self._group_of = own, read, on_write, group_of
        graphs.begin(self)

    def end(self) -> None:
        """Graphs are given what they are called with."""
        graphs.end(self)

    def owns(self, p: Tensor) -> bool:
        return id(p) in self.own

    def call(self, graph: Graph, args: tuple[Any, ...], places: Sequence[int]) -> Any:
        """``graph(*args)``; its parameters are at ``places``."""
        if not self.own:
            return graph(*args)
        own, lent, groups = self.own, list[_Lent](), dict[int, private.Group]()
        inputs = list(args)
        # What the graph's operators do is no user code, for which modes and guarded classes are.
        with DisableTorchFunction():
            for place in places:
                p = args[place]
                known = own.get(id(p))
                if known is None:
                    continue
                if private.is_away(known):
                    inputs[place] = self._lend(p, known, lent)
                elif self._group_of is not None:
                    group = self._group_of[id(p)]
                    groups[id(group)] = group
            result = graph(*inputs)
            for each in lent:
                self._store(*each)
            if groups and torch.is_grad_enabled():
                _gather_for_backward(result, groups.values())
        return result

    def _lend(self, p: Tensor, known: private.ShardedParam, lent: list[_Lent]) -> Tensor:
        value = self._read(known.sharded_param).to(p.dtype)  # which the graph was made for
        lent.append((value, version_of(value), known.sharded_param))
        return value

    def _store(self, value: Tensor, version: int, shard: DTensor) -> None:
        if version_of(value) != version:
            self._on_write()
            before_host_write(shard)
            with torch.no_grad():
                store_rows(value, shard)


_Lent = tuple[Tensor, int, DTensor]
"""A whole value, its version then, and the shard that it is of."""


def _gather_for_backward(result: Any, groups: Collection[private.Group]) -> None:
    nodes: set[Node] = {get_gradient_edge(t).node for t in result if isinstance(t, Tensor) and t.grad_fn is not None}
    groups = list(groups)

    def gather(*unused: Any) -> None:
        for group in groups:
            private.gather_now(group)

    for node in nodes:
        node.register_prehook(gather)
