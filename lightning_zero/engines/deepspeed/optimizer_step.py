"""Users' optimizers on DeepSpeed's flats.

DeepSpeed is given one optimizer, :class:`Joined`, whose groups say which parameters share a flat. It never steps:
users' own optimizers do, on what they expect to see. For the length of a step they hold stand-ins, as under
``fully_shard`` (see :mod:`lightning_zero.engines.optimizer_step`):

- an *element-wise* optimizer holds this rank's pieces of the masters, 1-D views, so the step happens in place;
- any other holds whole masters, gradients and states, and the pieces are stored again.

Stand-ins have the attributes of the user's parameters, whole ones their class, too: a step may go by them.

A parameter that nobody used has no gradient, so that weight decay and step counts leave it alone. Between steps
``PieceStep.states`` holds one 1-D tensor per state tensor of a parameter's shape.

With offload the masters lie in host memory, where Adam and AdamW get PyTorch's fused kernel, as under ``fully_shard``.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engines.deepspeed.lent_states import LentStates, raw
from lightning_zero.engines.deepspeed.private import Piece, Shards
from lightning_zero.engines.elementwise import is_elementwise, is_known, keys_beside_elements
from lightning_zero.engines.optimizer_family import exchange
from lightning_zero.engines.optimizer_step import fused
from lightning_zero.private.torch import DisableTorchFunction
from lightning_zero.private.torch_optim import make_parameter


@dataclass(slots=True)
class Cut:
    """This rank's piece of a state tensor that has its parameter's shape."""

    piece: Tensor


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

    def is_alike(self, p: Tensor, value: Any) -> bool:
        """Whether ``value`` is a tensor of the whole parameter's shape."""
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape == self.shapes[p]

    def flats(self, params: Iterable[Tensor]) -> list[int]:
        return sorted({self.piece(p).flat for p in params if p in self})

    def master(self, p: Tensor) -> Tensor:
        """This rank's piece of the parameter that is stepped."""
        piece = self.piece(p)
        return piece.of(self.shards.master(piece.flat))

    def grads(self, optimizer: Optimizer) -> list[Tensor]:
        """This rank's pieces of ``optimizer``'s gradients."""
        return [self.shards.grad(p) for p in parameters(optimizer) if p in self.with_grad]


class PieceStep:
    """Steps one optimizer; see the module's text.

    Args:
        optimizer: The user's.
        managed: The parameters that DeepSpeed holds.
        declared: ``ZeroConfig.elementwise_optimizers``.
        fuses: Whether masters lie in host memory, so that Adam is fused there.
    """

    def __init__(
        self, optimizer: Optimizer, managed: Managed, declared: Collection[str] = (), fuses: bool = False
    ) -> None:
        self.optimizer, self.managed, self.fuses = optimizer, managed, fuses
        self.elementwise = is_elementwise(optimizer, declared)
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        self.states: dict[Tensor, dict[str, Any]] = {}
        self.beside = keys_beside_elements(optimizer) if self.elementwise else frozenset()
        self.calls_closure = self.needs_closure or (
            closure is not None and not self.elementwise and not is_known(optimizer)
        )
        """Whether it is handed its closure, because it may call that itself."""
        self.holds_stand_ins = False
        self._take_over(optimizer.state)
        self.take_given()

    def take_given(self) -> None:
        """States that stand beside the parameters themselves: made in a constructor (Adagrad), loaded by a user, or
        lent to user code."""
        if self.holds_stand_ins:
            return
        state = self.optimizer.state
        if not isinstance(state, LentStates):  # load_state_dict, or a user, has put another in its place
            self.states.clear()
            state = self._take_over(state)
        standing = raw(state)  # nothing, in most steps
        lent = [p for p in parameters(self.optimizer) if p in state.lent] if state.lent else []
        given = [p for p in standing if p in self.managed and p not in state.lent]
        if lent:
            self.put_states({p: state.take(p) for p in lent})
        if given:
            self.put_states({p: state.take(p) for p in given}, casts=True)

    def _take_over(self, state: Mapping[Tensor, dict[str, Any]]) -> LentStates:
        lent = LentStates(self.states.keys, self._whole, self._forget, state)
        self.optimizer.state = lent
        return lent

    def _whole(self, p: Tensor) -> dict[str, Any]:
        return {
            key: self.managed.assemble(p, value.piece) if type(value) is Cut else value
            for key, value in self.states[p].items()
        }

    def _forget(self, p: Tensor) -> None:
        self.states.pop(p, None)

    def give_back(self) -> None:
        """``optimizer.state`` is an ordinary one."""
        self.optimizer.state = defaultdict(dict, raw(self.optimizer.state))

    def put_states(self, whole: Mapping[Tensor, Mapping[str, Any]], casts: bool = False) -> None:
        """:meth:`put_state` of several parameters."""
        for p, values in whole.items():
            self.put_state(p, values, casts)

    def put_state(self, p: Tensor, whole: Mapping[str, Any], casts: bool = False) -> None:
        """Takes over the state of one parameter, given with whole tensors.

        With ``casts`` what has the parameter's shape gets the master's dtype, as ``optimizer.load_state_dict`` gives it
        the parameter's: a checkpoint may come from a run that stepped on bf16 weights.
        """
        master = self.managed.master(p)

        def take(key: str, value: Any) -> Any:
            if key not in self.beside and self.managed.is_alike(p, value):
                dtype = master.dtype if casts and value.is_floating_point() else value.dtype
                return Cut(self.managed.cut(p, value).to(master.device, dtype, copy=True))
            return value.clone() if isinstance(value, Tensor) else value  # off the disk

        self.states[p] = {key: take(key, value) for key, value in whole.items()}

    @contextmanager
    def stand_ins(self, on_shards: bool | None = None) -> Iterator[_Swap]:
        """The optimizer holds tensors it can step on; its changes to them are stored on leaving.

        Args:
            on_shards: Pieces (``True``) or whole tensors (``False``); by default what the optimizer needs.
        """
        on_shards = self.elementwise if on_shards is None else on_shards
        with torch.no_grad(), DisableTorchFunction():
            self.take_given()
        with DisableTorchFunction():
            swap = (_Pieces if on_shards else _Wholes)(self)
        self.holds_stand_ins = True
        try:
            with fused(self.optimizer) if self.fuses and on_shards else nullcontext():
                yield swap
        finally:
            self.holds_stand_ins = False
            with DisableTorchFunction():
                swap.undo()


class _Swap:
    """Replaces the managed parameters of an optimizer and their states, and brings both back."""

    def __init__(self, step: PieceStep) -> None:
        self.step, self.managed, self.optimizer = step, step.managed, step.optimizer
        self.groups = self.optimizer.param_groups
        self.lists = [list(group["params"]) for group in self.groups]
        self.state = self.optimizer.state
        self.pairs = [(p, self.stand_in(p)) for p in parameters(self.optimizer) if p in self.managed]
        self._lend_attributes()
        for p, stand_in in self.pairs:
            if p in self.managed.with_grad:
                stand_in.grad = self.grad(p, stand_in)
        instead = {id(p): stand_in for p, stand_in in self.pairs}
        for group in self.groups:
            group["params"][:] = [instead.get(id(p), p) for p in group["params"]]
        self._exchange(instead)  # and where it keeps them beside its groups
        self.optimizer.state = defaultdict(dict, raw(self.state))
        for p, stand_in in self.pairs:
            entering = self.enter(p)
            if entering is not None:
                self.optimizer.state[stand_in] = entering

    def undo(self) -> None:
        self._exchange({id(stand_in): p for p, stand_in in self.pairs})
        for group, before in zip(self.groups, self.lists, strict=True):
            group["params"][:] = before
        self.optimizer.param_groups = self.groups
        stepped, self.optimizer.state = self.optimizer.state, self.state
        self._take_attributes()
        for p, stand_in in self.pairs:
            self.store(p, stand_in)
            new = stepped.pop(stand_in, None)
            if new is not None:
                self.leave(p, stand_in, new)
        self.state.update(stepped)

    def release(self) -> None:
        """For the length of a closure: the optimizer holds its own parameters, and masters the stand-ins' values."""
        for p, stand_in in self.pairs:
            self.store(p, stand_in)
        self._take_attributes()
        self._exchange({id(stand_in): p for p, stand_in in self.pairs})

    def take(self) -> None:
        """Stand-ins again, with the gradients of now."""
        self._exchange({id(p): stand_in for p, stand_in in self.pairs})
        self._lend_attributes()
        for p, stand_in in self.pairs:
            stand_in.grad = self.grad(p, stand_in) if p in self.managed.with_grad else None

    def _lend_attributes(self) -> None:
        for p, stand_in in self.pairs if not is_known(self.optimizer) else ():
            vars(stand_in).update(self.managed.attributes(p))

    def _take_attributes(self) -> None:
        for p, stand_in in self.pairs if not is_known(self.optimizer) else ():
            vars(p).update(vars(stand_in))

    def _exchange(self, instead: dict[int, Tensor]) -> None:
        exchange([self.optimizer], instead, hidden=not is_known(self.optimizer))

    def stand_in(self, p: Tensor) -> Tensor:
        raise NotImplementedError

    def grad(self, p: Tensor, stand_in: Tensor) -> Tensor:
        raise NotImplementedError

    def store(self, p: Tensor, stand_in: Tensor) -> None:
        raise NotImplementedError

    def enter(self, p: Tensor) -> dict[str, Any] | None:
        raise NotImplementedError

    def leave(self, p: Tensor, stand_in: Tensor, new: dict[str, Any]) -> None:
        raise NotImplementedError


class _Pieces(_Swap):
    """Stand-ins are views of the masters."""

    def stand_in(self, p: Tensor) -> Tensor:
        return self.managed.master(p)

    def grad(self, p: Tensor, stand_in: Tensor) -> Tensor:
        return self.managed.shards.grad(p).to(stand_in)  # itself, unless gradients are kept elsewhere than masters

    def store(self, p: Tensor, stand_in: Tensor) -> None:
        if stand_in.grad is not None:  # a loss scaler divides them in place
            mine = self.managed.shards.grad(p)
            if mine.data_ptr() != stand_in.grad.data_ptr():
                mine.copy_(stand_in.grad)

    def enter(self, p: Tensor) -> dict[str, Any] | None:
        if p not in self.step.states:
            return None
        return {key: value.piece if type(value) is Cut else value for key, value in self.step.states[p].items()}

    def leave(self, p: Tensor, stand_in: Tensor, new: dict[str, Any]) -> None:
        def is_cut(key: str, value: Any) -> bool:  # alike on all ranks, though a piece may be of one element
            beside = key in self.step.beside or not isinstance(value, Tensor) or value.dim() == 0
            return not beside and value.shape == stand_in.shape

        self.step.states[p] = {key: Cut(value) if is_cut(key, value) else value for key, value in new.items()}


class _Wholes(_Swap):
    """Stand-ins are whole tensors, the same on every rank."""

    def stand_in(self, p: Tensor) -> Tensor:
        kind = type(p) if isinstance(p, nn.Parameter) else nn.Parameter
        return make_parameter(kind, self.managed.assemble(p, self.managed.master(p)), p.requires_grad)

    def grad(self, p: Tensor, stand_in: Tensor) -> Tensor:
        return self.managed.assemble(p, self.managed.shards.grad(p)).to(stand_in)

    def store(self, p: Tensor, stand_in: Tensor) -> None:
        self.managed.master(p).copy_(self.managed.cut(p, stand_in))

    def enter(self, p: Tensor) -> dict[str, Any] | None:
        state = self.step.states.get(p)
        if state is None:
            return None
        return {
            key: self.managed.assemble(p, value.piece) if type(value) is Cut else value for key, value in state.items()
        }

    def leave(self, p: Tensor, stand_in: Tensor, new: dict[str, Any]) -> None:
        self.step.put_state(p, new)


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of ``optimizer``, group after group."""
    for group in optimizer.param_groups:
        yield from group["params"]
