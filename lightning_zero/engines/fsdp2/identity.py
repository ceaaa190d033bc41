"""The user's own parameters stay what they are: the same objects, on their modules, all the time.

``fully_shard`` puts a parameter of its own in the user's place, another one between steps than inside. Here both are
taken back. The user's ``nn.Parameter``, with its class, attributes and hooks, *is* the gathered parameter
(:func:`private.keep_registered`), so lists, sets, optimizers and averages that hold it since ``__init__`` hold the live
one. It stays registered while it is not gathered; then it is empty, or where shards lie in copies stale but for this
rank's rows, until somebody touches it (:mod:`~lightning_zero.engines.residency`).

Modules keep their class, and are copied and pickled as ordinary ones (:mod:`~lightning_zero.engines.plain_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.comm.shards import gathered, local, rewrapped, shard_like
from lightning_zero.engines.fsdp2 import private
from lightning_zero.private.torch import DisableTorchFunction, set_data


class Identity:
    """The user's parameters and their shards, for the length of a run.

    Args:
        groups: Initialized, sharded; from here on the user's parameters are their gathered ones.
        originals: Shards -> the user's parameters, emptied.
    """

    def __init__(self, groups: list[private.Group], originals: Mapping[Tensor, nn.Parameter]) -> None:
        self.own: dict[int, private.ShardedParam] = {}
        """``id`` of each of the user's parameters -> what ``fully_shard`` knows of it. Empty while all are whole."""
        self.shards: dict[Tensor, DTensor] = {}
        """The user's parameters -> their shards."""
        self.group_of: dict[int, private.Group] = {}
        """``id`` of each of the user's parameters -> what is gathered with it."""
        self._memory: list[Tensor] = []
        self._params: list[tuple[nn.Parameter, private.ShardedParam]] = []
        self._handles: list[Any] = []
        self._is_left = False
        for group in groups:
            for p in group.fsdp_params:
                original = originals[p.sharded_param]
                self._take_grad_over(original, p.sharded_param)
                self._params.append((original, p))
                self.shards[original] = p.sharded_param
                self.group_of[id(original)] = group
            private.keep_registered(group, originals)
        self._know_all()

    def _know_all(self) -> None:
        self.own.update((id(original), p) for original, p in self._params)

    def _take_grad_over(self, original: nn.Parameter, shard: DTensor) -> None:
        """Moves the gradient that an earlier run has left to the shard; DDP would add to it."""
        if original.grad is not None:
            shard.grad = shard_like(original.grad.to(local(shard)), shard)
            original.grad = None

    # -- whole for a while, or for good --------------------------------------------------------------------------

    def take_whole(self) -> dict[Tensor, nn.Parameter]:
        """The user's parameters, in plain whole memory of their own until :meth:`give_whole_back` (collective)."""
        self._memory = [original.data for original, _ in self._params]  # of their group, allocated or not
        for original, p in self._params:
            set_data(original, gathered(p.sharded_param))
            if self._is_left:
                private.register(p, original)
        self.own.clear()
        return {original: original for original, _ in self._params}

    def give_whole_back(self) -> None:
        """They have the memory of their group again."""
        self._know_all()
        with torch.no_grad(), DisableTorchFunction():
            for (original, p), memory in zip(self._params, self._memory, strict=True):
                set_data(original, memory)
                if self._is_left:
                    private.register(p, p.sharded_param)
        self._memory.clear()

    def release(self, values: Callable[[DTensor], Tensor], on_whole: Callable[[nn.Parameter], object]) -> None:
        """The end: each parameter takes ``values(shard)`` as its own memory; ``on_whole`` is told of it."""
        self.own.clear()
        for original, p in self._params:
            set_data(original, values(p.sharded_param))
            private.give_grad_dtype_back(p, original)
            original.requires_grad_(p.sharded_param.requires_grad)
            private.register(p, original)
            p.sharded_param.grad = None
            private.drop_shard(p)
            on_whole(original)
        self._end()

    def leave_sharded(self, root: nn.Module) -> None:
        """The run has ended, and values stay shared out, maybe for the next run: shards take the place of parameters
        that no view stands before any more."""
        self._is_left = True
        for _, p in self._params:
            private.register(p, p.sharded_param)
            if isinstance(grad := p.sharded_param.grad, DTensor):
                p.sharded_param.grad = rewrapped(grad)
        self._end()
        for module in root.modules():
            self._handles.append(module.register_forward_pre_hook(_refuse_shards, prepend=True))

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- optimizers ----------------------------------------------------------------------------------------------

    def held(self, optimizer: Optimizer) -> list[Tensor]:
        """The tensors that ``optimizer`` steps on, shards in the place of the user's parameters."""
        return [self.shards.get(p, p) for group in optimizer.param_groups for p in group["params"]]


def _refuse_shards(module: nn.Module, args: Any) -> None:
    """Alike on all ranks, and on one alone: before ``fully_shard``'s own hook gathers."""
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__} holds shards: its run ended with an error, with after_fit='sharded', or with"
            " 'auto' where the whole module does not fit into host memory. Run it by a Trainer with a ZeroStrategy or"
            " inside trainer.strategy.full_parameters(), or end that run with after_fit='whole'."
        )
