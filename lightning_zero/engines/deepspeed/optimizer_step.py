"""Steps users' optimizers on DeepSpeed's flats: the engine's side of :mod:`~lightning_zero.engines.optimizer_step`.

DeepSpeed receives one optimizer, :class:`Joined`, whose groups say which parameters share a flat. ``Joined`` never
steps; the users' own optimizers do. An element-wise optimizer steps in place on this rank's *pieces* of the masters,
1-D views. A parameter that no rank used has no gradient, so weight decay and step counts leave it unchanged.
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
    """Gives DeepSpeed the parameter groups of all optimizers; never steps."""

    def __init__(self, groups: list[list[Tensor]]) -> None:
        # DeepSpeed reads these keys of a group if offload.ratio is below 1
        unused = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
        super().__init__([{"params": group} for group in groups], unused)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("users' own optimizers step")


class Managed:
    """The parameters that DeepSpeed shards, their gradients, and how to assemble full tensors from pieces.

    Args:
        shards: Holds the pieces.
        shapes: The full shape of every managed parameter.
        attributes: Returns the attributes that user code has set on a parameter.
    """

    def __init__(
        self,
        shards: Shards,
        shapes: dict[Tensor, torch.Size],
        attributes: Callable[[Tensor], dict[str, Any]],
    ) -> None:
        self.shards, self.shapes, self.attributes = shards, shapes, attributes
        self.with_grad: set[Tensor] = set()
        """Parameters that have a gradient; alike on all ranks."""

    def __contains__(self, p: Any) -> bool:
        return p in self.shards.pieces

    def piece(self, p: Tensor) -> Piece:
        return self.shards.pieces[p]

    def assemble(self, p: Tensor, local: Tensor) -> Tensor:
        """Returns the full tensor of which ``local`` is this rank's piece (collective).

        The sum over ranks is exact, because each element is non-zero on one rank only.
        """
        whole = local.new_zeros(self.shapes[p].numel())
        self.piece(p).of_whole(whole).copy_(local)
        if dist.get_world_size() > 1:
            dist.all_reduce(whole)
        return whole.view(self.shapes[p])

    def cut(self, p: Tensor, whole: Tensor) -> Tensor:
        """Returns this rank's piece of ``whole``, a tensor of the full shape of ``p``; a view of its memory."""
        return self.piece(p).of_whole(whole)

    def flats(self, params: Iterable[Tensor]) -> list[int]:
        return sorted({self.piece(p).flat for p in params if p in self})

    def master(self, p: Tensor) -> Tensor:
        """Returns this rank's piece of the master of ``p``, 1-D."""
        piece = self.piece(p)
        return piece.of(self.shards.master(piece.flat))

    def grads(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns this rank's pieces of the gradients of ``optimizer``, 1-D."""
        return [self.shards.grad(p) for p in parameters(optimizer) if p in self.with_grad]


class Pieces:
    """Implements :class:`~lightning_zero.engines.optimizer_step.Parts` on DeepSpeed's pieces.

    Args:
        managed: The parameters that DeepSpeed shards.
        of_state: Returns the piece behind a tensor that ``state`` made.
        state: Makes the tensor that represents a piece of a state between steps.
        settle, begin_full, full_step: Callbacks of the engine.
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
        return self._managed.shards.grad(p).to(part)  # no copy, unless device or dtype differ from the master's

    def store_grad(self, p: Tensor, grad: Tensor) -> None:
        mine = self._managed.shards.grad(p)
        if mine.data_ptr() != grad.data_ptr():
            mine.copy_(grad)

    def attributes(self, p: Tensor) -> Mapping[str, Any]:
        return self._managed.attributes(p)

    def cut(self, p: Tensor, full: Tensor) -> Tensor:
        """Returns a copy of this rank's piece of ``full``, a state of ``p``, on the master's device.

        A state in the parameter's dtype is cast to the master's dtype, because ``optimizer.load_state_dict`` casts to
        the parameter's: a checkpoint may come from a run that stepped on bf16 weights."""
        master, dtype = self._managed.master(p), full.dtype
        if isinstance(full, LeftState):
            full = gathered(full.shard)
        elif dtype == p.dtype:
            dtype = master.dtype
        return self._managed.cut(p, full).to(master.device, dtype, copy=True)

    def stepped(self, optimizer: Optimizer) -> None:
        """Publishes the stepped masters to the module; otherwise the module's old values would overwrite them."""
        managed = self._managed
        with DisableTorchFunction(), torch.no_grad():
            managed.shards.publish(managed.flats(p for p in parameters(optimizer) if p in managed.with_grad))


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterates over the parameters of ``optimizer``, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]
