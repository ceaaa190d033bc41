"""Keeps the user's parameters on their modules as the same objects during a run.

``fully_shard`` replaces the user's parameter by one of its own between steps and by another inside steps. This module
undoes both. The user's ``nn.Parameter``, with its class, attributes and hooks, *is* the gathered parameter
(:func:`private.keep_registered`), so lists, sets, optimizers and averages that took it in ``__init__`` hold the live
one. The parameter stays registered while it is resharded; it is then empty until somebody touches it
(:mod:`~lightning_zero.engines.residency`).

Modules keep their class, and are copied and pickled as ordinary ones (:mod:`~lightning_zero.engines.plain_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zero.comm.shards import local, shard_like
from lightning_zero.engines.after_run import leave_parameter
from lightning_zero.engines.fsdp2 import private
from lightning_zero.private.torch import set_data


class Identity:
    """The user's parameters and their shards, for the length of a run.

    Args:
        groups: Initialized and sharded; from here on the user's parameters are their gathered parameters.
        originals: Shards -> the user's parameters, which are empty.
    """

    def __init__(self, groups: list[private.Group], originals: Mapping[Tensor, nn.Parameter]) -> None:
        self.own: dict[int, private.ShardedParam] = {}
        """``id`` of each of the user's parameters -> its ``ShardedParam``. Empty after the run."""
        self.shards: dict[Tensor, DTensor] = {}
        """The user's parameters -> their shards."""
        self.group_of: dict[int, private.Group] = {}
        """``id`` of each of the user's parameters -> the group in which it is gathered."""
        self._params: list[tuple[nn.Parameter, private.ShardedParam]] = []
        for group in groups:
            for p in group.fsdp_params:
                original = originals[p.sharded_param]
                self._take_grad_over(original, p.sharded_param)
                self._params.append((original, p))
                self.shards[original] = p.sharded_param
                self.group_of[id(original)] = group
            private.keep_registered(group, originals)
        self.own.update((id(original), p) for original, p in self._params)

    def _take_grad_over(self, original: nn.Parameter, shard: DTensor) -> None:
        """Move a gradient left by an earlier run to the shard: as with DDP, new gradients are added to it."""
        if original.grad is not None:
            shard.grad = shard_like(original.grad.to(local(shard)), shard)
            original.grad = None

    def release(self, values: Callable[[DTensor], Tensor] | None) -> None:
        """End the run: each parameter takes ``values(shard)`` as its memory. Without ``values`` it stays sharded until
        user code touches it."""
        self.own.clear()
        for original, p in self._params:
            private.give_grad_dtype_back(p, original)
            original.requires_grad_(p.sharded_param.requires_grad)
            private.register(p, original)
            p.sharded_param.grad = None
            if values is None:
                leave_parameter(original, p.sharded_param.detach(), p.sharded_param)
            else:
                set_data(original, values(p.sharded_param))
            private.drop_shard(p)  # or the memory stays until garbage collection finds the engine
