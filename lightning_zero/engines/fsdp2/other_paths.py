"""Terms that are computed from a unit's parameters but reach the loss by a path other than the unit's output.

``fully_shard`` gathers a unit for its backward when gradients of its output arrive. A term that a layer keeps (a
router's auxiliary loss), features that a hook captures, and outputs in objects that are not containers of tensors start
their backward without that gather, perhaps before it: the parameters would be empty or only partly filled. Therefore
each operator that used a parameter gathers the parameter, if needed, before the operator's backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.identity import Identity
from lightning_zero.private.torch import outside_modes


class OtherPaths:
    """Gathers units for the backward of such terms, inside the steps of one run.

    Args:
        units: The root is last; the root is gathered for the loss itself.
        is_sharded: Whether a step is running.
    """

    def __init__(self, units: Sequence[nn.Module], identity: Identity, is_sharded: Callable[[], bool]) -> None:
        self._units, self._group_of, self._is_sharded = units, identity.group_of, is_sharded
        self._of_root = private.groups(units[-1])
        self._recomputed: dict[nn.Module, list[private.Group]] = {}

    def used(self, params: Sequence[Tensor], nodes: Sequence[Node], is_alone: bool) -> None:
        """Prepare ``nodes``, computed from the gathered ``params``; ``is_alone``: from no other trained tensor."""
        for group in self._groups_of(params):
            for node in nodes if is_alone or group not in self._of_root else ():
                node.register_prehook(lambda grads, group=group: private.gather_now(group))

    def recomputes(self, module: nn.Module) -> None:
        """Gather for ``module``, which is about to recompute its activations. Inner units have their own hooks."""
        if not self._is_sharded():
            return
        if module not in self._recomputed:
            inside = set(module.modules()) - {module}
            inner = {p for unit in self._units if unit in inside for p in unit.parameters()}
            params = [p for p in module.parameters() if p not in inner and id(p) in self._group_of]
            self._recomputed[module] = self._groups_of(params)
        for group in self._recomputed[module]:
            if not private.is_gathered(group):
                with outside_modes():  # the mode of selective recomputation counts operators
                    private.gather_now(group)

    def _groups_of(self, params: Sequence[Tensor]) -> list[private.Group]:
        return list({id(group): group for group in (self._group_of[id(p)] for p in params)}.values())
