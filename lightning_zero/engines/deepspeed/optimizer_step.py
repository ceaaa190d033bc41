"""Users' optimizers on DeepSpeed's flats: the engine's side of :mod:`~lightning_zero.engines.optimizer_step`.

DeepSpeed is given one optimizer, :class:`Joined`, whose groups say which parameters share a flat. It never steps, the
users' own optimizers do. An element-wise one steps on this rank's *pieces* of the masters, 1-D views, so the step
happens in place. A parameter that nobody used has no gradient, so that weight decay and step counts leave it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm.shards import gathered
from lightning_zero.engines.after_run import LeftState
from lightning_zero.engines.deepspeed.private import Piece, Shards
from lightning_zero.private.torch import DisableTorchFunction


class Joined(Optimizer):
    """The groups of all optimizers, for DeepSpeed."""

    def __init__(self, groups: list[list[Tensor]]) -> None:
        # DeepSpeed reads it of a group when only a part is offloaded
        unused = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
        super().__init__([{"params": group} for group in groups], unused)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("users' own optimizers step")


class Managed:
    """The parameters that DeepSpeed holds, their gradients and how to put them together.

    Args:
        shards: They hold the pieces.
        shapes: Every managed parameter's own shape.
        attributes: Those of a parameter that its user has set.
    """

    def __init__(
        self,
        shards: Shards,
        shapes: dict[Tensor, torch.Size],
        attributes: Callable[[Tensor], dict[str, Any]],
    ) -> None:
        self.shards, self.shapes, self.attributes = shards, shapes, attributes
        self.with_grad: set[Tensor] = set()
        """Parameters that have a gradient, as every rank agrees."""

    def __contains__(self, p: Any) -> bool:
        return p in self.shards.pieces

    def piece(self, p: Tensor) -> Piece:
        return self.shards.pieces[p]

    def assemble(self, p: Tensor, local: Tensor, only_on_rank_0: bool = False) -> Tensor:
        """The whole tensor of which ``local`` is this rank's piece (collective).

        A sum in which every element is one rank's and the others' zero, so exact. On other ranks than 0 the result is
        of no use with ``only_on_rank_0``.
        """
        whole = local.new_zeros(self.shapes[p].numel())
        self.piece(p).of_whole(whole).copy_(local)
        if dist.get_world_size() > 1:
            if only_on_rank_0:
                dist.reduce(whole, 0)
            else:
                dist.all_reduce(whole)
        return whole.view(self.shapes[p])

    def cut(self, p: Tensor, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor of the parameter's shape, sharing its memory."""
        return self.piece(p).of_whole(whole)

    def flats(self, params: Iterable[Tensor]) -> list[int]:
        return sorted({self.piece(p).flat for p in params if p in self})

    def master(self, p: Tensor) -> Tensor:
        """This rank's piece of the parameter that is stepped."""
        piece = self.piece(p)
        return piece.of(self.shards.master(piece.flat))

    def grads(self, optimizer: Optimizer) -> list[Tensor]:
        """This rank's pieces of ``optimizer``'s gradients."""
        return [self.shards.grad(p) for p in parameters(optimizer) if p in self.with_grad]


class Pieces:
    """See :class:`~lightning_zero.engines.optimizer_step.Parts`.

    Args:
        managed: The parameters that DeepSpeed holds.
        of_state: The piece of a state that ``state`` has made.
        state: What stands for a piece of a state.
        settle, begin_full, full_step: The engine's.
    """

    def __init__(
        self,
        managed: Managed,
        of_state: Callable[[Any], Tensor | None],
        state: Callable[[Tensor, Tensor], Tensor],
        settle: Callable[[], None],
        begin_full: Callable[[], None],
        full_step: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        self._managed, self.of_state, self.state = managed, of_state, state
        self.settle, self.begin_full, self.full_step = settle, begin_full, full_step

    def of(self, p: Tensor) -> Tensor | None:
        return self._managed.master(p) if p in self._managed else None

    def size(self, p: Tensor) -> torch.Size:
        return self._managed.shapes[p]

    def grad(self, p: Tensor, part: Tensor) -> Tensor | None:
        if p not in self._managed.with_grad:
            return None
        return self._managed.shards.grad(p).to(part)  # itself, unless gradients are kept elsewhere than masters

    def store_grad(self, p: Tensor, grad: Tensor) -> None:
        mine = self._managed.shards.grad(p)
        if mine.data_ptr() != grad.data_ptr():
            mine.copy_(grad)

    def attributes(self, p: Tensor) -> Mapping[str, Any]:
        return self._managed.attributes(p)

    def cut(self, p: Tensor, full: Tensor) -> Tensor:
        """What has the parameter's dtype gets the master's, as ``optimizer.load_state_dict`` gives it the parameter's:
        a checkpoint may come from a run that stepped on bf16 weights."""
        master, dtype = self._managed.master(p), full.dtype
        if isinstance(full, LeftState):
            full = gathered(full.shard)
        elif dtype == p.dtype:
            dtype = master.dtype
        return self._managed.cut(p, full).to(master.device, dtype, copy=True)

    def stepped(self, optimizer: Optimizer) -> None:
        """Masters of which the module does not know would be overwritten by what it holds."""
        managed = self._managed
        with DisableTorchFunction(), torch.no_grad():
            managed.shards.publish(managed.flats(p for p in parameters(optimizer) if p in managed.with_grad))


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of ``optimizer``, group after group."""
    for group in optimizer.param_groups:
        yield from group["params"]
