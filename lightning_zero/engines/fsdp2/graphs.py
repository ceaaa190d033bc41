"""Inputs of compiled code: no graph of Dynamo's ever computes with a parameter that is away.

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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.comm.shards import before_host_write
from lightning_zero.engines import graphs
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.writes import store_rows
from lightning_zero.engines.reads import leaf
from lightning_zero.private.torch import DisableTorchFunction, Graph, version_of


class GraphInputs:
    """Sees to the inputs of all graphs, until :meth:`end`.

    Args:
        own: ``id`` of each of the user's parameters -> what is known of it. Empty while all are whole.
        read: Reads a shard differentiably, with all ranks.
        alone: The whole values of shards by their ids, if not all ranks read them.
        writing: Around a write to shards.
        group_of: ``id`` of each of the user's parameters -> what is gathered with it; ``None`` where gathered
            parameters stay until the backward is over.
    """

    def __init__(
        self,
        own: Mapping[int, private.ShardedParam],
        read: Callable[[DTensor], Tensor],
        alone: Callable[[Sequence[DTensor]], Mapping[int, Tensor]],
        writing: Callable[[Sequence[DTensor]], AbstractContextManager[object]],
        group_of: Mapping[int, private.Group] | None,
    ) -> None:
        self.own, self._read, self._alone, self._writing, self._group_of = own, read, alone, writing, group_of
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
        own, away, groups = self.own, dict[int, private.ShardedParam](), dict[int, private.Group]()
        inputs = list(args)
        # What the graph's operators do is no user code, for which modes and guarded classes are.
        with DisableTorchFunction():
            for place in places:
                p = args[place]
                known = own.get(id(p))
                if known is None:
                    continue
                if private.is_away(known):
                    away[place] = known
                elif self._group_of is not None:
                    group = self._group_of[id(p)]
                    groups[id(group)] = group
            lent = self._lend(away, args) if away else {}
            for place, each in lent.items():
                inputs[place] = each.value
            result = graph(*inputs)
            for each in lent.values():
                self._store(*each)
            if groups and torch.is_grad_enabled():
                nodes = {t.grad_fn for t in result if isinstance(t, Tensor) and t.grad_fn is not None}
                for group in groups.values():
                    private.gather_before(group, nodes)
        return result

    def _lend(self, away: Mapping[int, private.ShardedParam], args: Sequence[Any]) -> dict[int, _Lent]:
        alone = self._alone([known.sharded_param for known in away.values()])

        def one(place: int) -> _Lent:
            shard = away[place].sharded_param
            value = alone[id(shard)] if alone else self._read(shard)
            if alone and torch.is_grad_enabled() and shard.requires_grad:
                value = leaf(value)
            value = value.to(args[place].dtype)  # which the graph was made for
            return _Lent(value, version_of(value), shard)

        return {place: one(place) for place in away}

    def _store(self, value: Tensor, version: int, shard: DTensor) -> None:
        if version_of(value) != version:
            with self._writing([shard]), torch.no_grad():
                before_host_write(shard)
                store_rows(value, shard)


class _Lent(NamedTuple):
    value: Tensor
    """Whole."""
    version: int
    """Of the value then."""
    shard: DTensor
    """That it is of."""
