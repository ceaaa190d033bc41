"""Views of gathered parameters that user code takes inside a step and may hold for longer than their unit is gathered.

A unit's own forward takes views as well, but only the graph holds those, so their memory may be freed. If anybody else
holds a view when the unit is dropped, the memory of the gathered parameter stays allocated, and each gather fills it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.torch_functions import tensors_in
from lightning_zero.private.torch import DisableTorchFunction, is_in_graph_alone


class OutstandingViews:
    """The views taken since their units were last dropped.

    Args:
        keep: Called with the key and slot of a parameter whose memory must stay allocated.
        written: Called with a parameter that may have been written to without a change of its version.
    """

    def __init__(self, keep: Callable[[int, int], None], written: Callable[[Tensor], None]) -> None:
        self._keep, self._written = keep, written
        self._taken: dict[int, list[weakref.ref[Tensor]]] = {}  # by id of the ShardedParam

    def take(self, params: Sequence[Tensor], result: Any, own: Mapping[int, private.ShardedParam]) -> None:
        """Remember ``result``, which may alias the memory of the gathered ``params``."""
        for p in params:
            self._taken.setdefault(id(own[id(p)]), []).extend(map(weakref.ref, tensors_in((result,))))

    def dropped(self, key: int, group: private.Group) -> None:
        """Keep the memory of parameters with held views; ``group`` is about to be dropped."""
        on_host = group.device.type == "cpu"
        for slot, p in enumerate(group.fsdp_params):
            if self._is_held(group, p, on_host):
                self._keep(key, slot)

    def _is_held(self, group: private.Group, p: private.ShardedParam, on_host: bool) -> bool:
        taken = self._taken.pop(id(p), None) if self._taken else None
        if on_host and not private.is_resizable(p):  # NumPy shares the memory; its writes change no version
            self._written(private.own_of(p))
            return not private.is_kept(p)
        if taken is None or private.is_kept(p):
            return False
        with DisableTorchFunction():
            in_graph = sum(is_in_graph_alone(reference) for reference in taken)
            return private.others_in(private.Home(group, p)) > in_graph
