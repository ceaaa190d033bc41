"""The optimizer's step on this rank's shards.

Users' optimizers always hold the module's own parameters, ``DTensor`` shards during a run. For the length of one step
they are handed stand-ins:

- an *element-wise* optimizer (SGD, Adam, AdamW, ...; see :mod:`lightning_zero.engines.elementwise`) updates every
  element from that element's own history, so it steps on the local shards directly: no communication, no ``DTensor``
  dispatch;
- any other (Muon, LBFGS, LAMB, GaLore, Lookahead, ...) may look across elements, so it steps on whole tensors:
  parameters, gradients and states are gathered, every rank computes the same step, and the shards are stored again.
  Its stand-ins are the same objects at every step, empty in between, so that whatever it keeps by parameter is found
  again, and it is handed its closure, which it may call when and as often as it likes (LBFGS, SAM). They are filled
  when the closure has run for the first time, or when anything is computed before that.

Step hooks are user code like any other: they run outside all this, on the module's own parameters, as whole tensors.

With CPU offload the shards lie in host memory, and so does the step of an element-wise optimizer: for its length Adam
and AdamW get PyTorch's fused kernel, which reads and writes every element once, unless their user chose a kernel. The
others' whole tensors are gathered on the device.

Either way ``optimizer.state`` holds, between steps, one ``DTensor`` per state tensor that has its parameter's shape.
What a user has put there (``load_state_dict``) is whole until the next step.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.shards import as_shard, gathered, gathered_each, local, mesh_device, rows_of, shard_like
from lightning_zero.engines.elementwise import is_elementwise, is_known, keys_beside_elements
from lightning_zero.engines.optimizer_family import exchange, family, states
from lightning_zero.private import torch_optim
from lightning_zero.private.torch import DisableTorchFunction, version_of


class Files(Protocol):
    """Access to the shards that lie in files."""

    def in_parts(self, shards: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Local tensors, those in turn that come into memory together."""

    def keep(self, optimizer: Optimizer, shard: Tensor, key: str, value: Tensor) -> Tensor:
        """``value``, a state beside the local tensor ``shard``, in the file, or itself if it belongs into none."""


class ShardedStep:
    """Steps one optimizer; see the module's text.

    Args:
        optimizer: Holds the module's own parameters.
        fuses: Whether its shards lie in host memory, so that Adam is fused there.
        declared: ``ZeroConfig.elementwise_optimizers``.
        before: Makes parameters and gradients true for user code and optimizers that look before the closure has run.
        originals: Sharded parameter -> the user's, which the optimizer holds between steps, and whose class and
            attributes it may ask for.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        fuses: bool = False,
        declared: Collection[str] = (),
        before: Callable[[], None] = lambda: None,
        originals: Mapping[Tensor, Tensor] | None = None,
        files: Files | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.files = files
        self.fuses = fuses
        self.before = before
        self._declared = declared
        self._originals = originals or {}
        self.shards = {original: p for p, original in self._originals.items()}
        self._wholes: dict[Tensor, nn.Parameter] = {}  # sharded parameter -> its stand-in, empty between steps
        self._beside: frozenset[str] | None = None

    @property
    def elementwise(self) -> bool:
        return is_elementwise(self.optimizer, self._declared)

    @property
    def beside(self) -> frozenset[str]:
        """Keys of states that are no elements, of an element-wise optimizer."""
        if self._beside is None:
            self._beside = keys_beside_elements(self.optimizer)
        return self._beside

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One ``optimizer.step``. ``closure`` is evaluated first where the optimizer steps on shards, else it is the
        optimizer's to call."""
        return between_hooks(self.optimizer, self._step, self.before, closure, **kwargs)

    def _step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        takes_closure = "closure" in inspect.signature(type(self.optimizer).step).parameters
        computes = is_known(self.optimizer) and type(self.optimizer) is not torch.optim.LBFGS
        if self.elementwise or computes or not takes_closure or closure is None:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            plain = self.elementwise or computes
            quiet = DisableTorchFunction() if plain else nullcontext()
            with self.stand_ins() as swap, quiet:
                if self.files is not None and self.elementwise and computes:
                    result = self._step_in_parts(self.files, swap, **kwargs)
                else:
                    result = self.optimizer.step(**kwargs)
            return loss if result is None else result
        with DisableTorchFunction():
            swap = _WholeSwap(self)
        touch, losses = _FirstTouch(swap), AgreedLosses(self.optimizer.param_groups[0]["params"][0].device)
        try:
            with touch.watching():
                return losses.own(self.optimizer.step(closure=swap.around(closure, touch, losses), **kwargs))
        finally:
            with DisableTorchFunction():
                swap.undo()

    def _step_in_parts(self, files: Files, swap: _Swap, **kwargs: Any) -> Any:
        """``optimizer.step`` for some parameters after the others: for PyTorch's own, which keep nothing beside groups
        and states, these are as many steps of each parameter by itself."""
        groups = self.optimizer.param_groups
        held = [group["params"] for group in groups]
        group_of = {id(p): i for i, params in enumerate(held) for p in params}
        result = None
        try:
            for part in files.in_parts([p for params in held for p in params]):
                for group in groups:
                    group["params"] = []
                for p in part:
                    groups[group_of[id(p)]]["params"].append(p)
                self.optimizer.param_groups = [group for group in groups if group["params"]]
                result = self.optimizer.step(**kwargs)
                for p in part:
                    state = self.optimizer.state.get(p, {})
                    state.update((key, self.stored(p, key, value)) for key, value in list(state.items()))
        finally:
            self.optimizer.param_groups = groups
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
        return result

    def stored(self, shard: Tensor, key: str, value: Any) -> Any:
        """``value``, of a state beside the local tensor ``shard``, where it stays between steps."""
        if self.files is None or not isinstance(value, Tensor):
            return value
        return self.files.keep(self.optimizer, shard, key, value)

    def shard(self, part: Tensor, key: str, p: DTensor) -> DTensor:
        """A state's part of this rank, laid out as ``p``."""
        return as_shard(self.stored(local(p), key, part), p)

    @contextmanager
    def stand_ins(self, on_shards: bool | None = None) -> Iterator[_Swap]:
        """The optimizer holds tensors it can step on; what it did to them is stored on leaving.

        Args:
            on_shards: Local shards (``True``) or whole tensors (``False``); by default what the optimizer needs.
        """
        if on_shards is None:  # hooks that run inside, as under a loss scaler, look at whole tensors
            on_shards = self.elementwise and not any(torch_optim.step_hooks(self.optimizer))
        with DisableTorchFunction():  # our own work on shards needs no translation for user code
            swap = (_LocalSwap if on_shards else _WholeSwap)(self)
        try:
            with DisableTorchFunction():
                swap.fill()
            with fused(self.optimizer) if self.fuses and on_shards else nullcontext():
                yield swap
        finally:
            with DisableTorchFunction():
                swap.undo()

    def whole_parameter(self, p: DTensor) -> nn.Parameter:
        """The stand-in of ``p`` for whole steps, empty until it is filled; of the class of the user's parameter and
        with its attributes."""
        if p not in self._wholes:
            original = self._originals.get(p)
            kind = type(original) if isinstance(original, nn.Parameter) else nn.Parameter
            data = torch.empty(0, dtype=p.dtype, device=mesh_device(p))
            self._wholes[p] = torch_optim.make_parameter(kind, data, p.requires_grad)
        stand_in = self._wholes[p]
        vars(stand_in).update({**vars(p), **self.attributes(p)})
        return stand_in

    def attributes(self, p: DTensor) -> dict[str, Any]:
        """Those of the user's parameter."""
        original = self._originals.get(p)
        return {} if original is None else vars(original)

    # -- states as checkpoints have them -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``optimizer.state_dict()``, with this rank's shards where user code has no say in it (collective)."""
        if not self._has_own_form:
            return self.optimizer.state_dict()
        with self.stand_ins(on_shards=False) as swap:
            state = self.optimizer.state_dict()
            held = {id(stand_in) for _, stand_in in swap.pairs}
            return map_tensors(lambda path, t: t.detach() if id(t) in held else t, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads whole tensors, of which each rank keeps its shards (collective).

        Raises:
            ValueError: If they are of another number of parameters.
        """
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        saved = sum(len(group["params"]) for group in state.get("param_groups", ()))
        if saved != len(params) and "param_groups" in state:
            raise ValueError(
                f"the checkpoint's {type(self.optimizer).__name__} state is of {saved} parameters, the optimizer has"
                f" {len(params)}: resume with the module and configure_optimizers that saved it."
            )
        if self._has_own_form:
            with self.stand_ins(on_shards=False):
                self.optimizer.load_state_dict(map_tensors(lambda path, t: t.clone(), dict(state)))  # off the disk
            return

        def lay_out(index: int, key: str, value: Any) -> Any:
            p = self.shards.get(params[index], params[index])
            if isinstance(p, DTensor) and isinstance(value, Tensor) and _is_of_shape(value, p.shape):
                return self.shard(local(shard_like(value, p, value.dtype)), key, p)
            return map_tensors(lambda path, t: t.clone(), value)

        with torch.no_grad(), DisableTorchFunction():
            per_param = {
                index: {key: lay_out(index, key, value) for key, value in values.items()}
                for index, values in state["state"].items()
            }
            with self._holding_shards():
                self.optimizer.load_state_dict({**state, "state": per_param})

    @contextmanager
    def _holding_shards(self) -> Iterator[None]:
        """States are cast to the dtype of the parameters that the optimizer holds: to the shards'."""
        there = [(original, p) for original, p in self.shards.items()]
        self._exchange_held(there)
        try:
            yield
        finally:
            self._exchange_held([(p, original) for original, p in there])

    def _exchange_held(self, pairs: list[tuple[Any, Any]]) -> None:
        exchange([self.optimizer], {id(old): new for old, new in pairs}, hidden=False)
        for old, new in pairs:
            if old in self.optimizer.state:
                self.optimizer.state[new] = self.optimizer.state.pop(old)

    @property
    def _has_own_form(self) -> bool:
        own = torch_optim.has_own_state_dict(self.optimizer)
        return own or (not is_known(self.optimizer) and len(family(self.optimizer)) > 1)


def between_hooks(
    optimizer: Optimizer, step: Callable[..., Any], before_any: Callable[[], None], closure: Any, **kwargs: Any
) -> Any:
    """``step(closure, **kwargs)`` between the step hooks of ``optimizer``, called as PyTorch calls them.

    Args:
        before_any: Called first where a hook runs before: makes parameters and gradients true for user code. (Hooks
            that run after come after the step, which has done that.)
    """
    # else hooks for all optimizers are also those of the inner ones
    alone = is_known(optimizer) or len(family(optimizer)) == 1
    before, after = torch_optim.step_hooks(optimizer, with_global=alone)
    if not before and not after:
        return step(closure, **kwargs)
    args: tuple[Any, ...] = (optimizer,)
    kwargs = {"closure": closure, **kwargs}
    if before:
        before_any()
    for hook in before:
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    with torch_optim.without_step_hooks(optimizer, with_global=alone):
        result = step(*args[1:], **kwargs)
    for hook in after:
        hook(optimizer, args, kwargs)
    return result


def refuse_sharding(optimizers: Collection[Optimizer]) -> None:
    """Raises ``ValueError`` for an optimizer that shards its states itself."""
    for optimizer in optimizers:
        if any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__):
            inner = type(getattr(optimizer, "optim", optimizer)).__name__
            raise ValueError(
                f"ZeroRedundancyOptimizer shards the states of {inner} by itself, which every ZeRO stage does already:"
                f" return the {inner} from configure_optimizers."
            )


def whole_state_bytes(optimizers: Collection[Optimizer]) -> int:
    """Bytes that :func:`hand_back` would add on each rank if it made the states whole."""
    values = (
        value
        for optimizer in optimizers
        for state in states(family(optimizer))
        for entry in state.values()
        if isinstance(entry, dict)
        for value in entry.values()
    )
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, DTensor))


_NOTHING: dict[str, DTensor] = {}


class _Swap(ABC):
    """Replaces the sharded parameters of an optimizer and their states, and brings both back."""

    def __init__(self, step: ShardedStep) -> None:
        self.owner, self.optimizer = step, step.optimizer
        self.elementwise = step.elementwise
        self.knows_all = is_known(self.optimizer)
        """Whether groups and state are all that there is."""
        members = self._members()
        held: dict[Tensor, DTensor] = {}
        for original in (p for member in members for group in member.param_groups for p in group["params"]):
            p = step.shards.get(original, original)
            if isinstance(p, DTensor):
                held[original] = p
        self.pairs: list[tuple[DTensor, Tensor]] = [(p, self.stand_in(p)) for p in held.values()]
        self._held = list(held)  # beside ``pairs``
        self._stand_ins = [stand_in for _, stand_in in self.pairs]
        self._seen: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """id of a parameter's state -> that state, so that its id stays its own, and what users saw there."""
        self.filled = False
        self.hold()

    def _members(self) -> list[Optimizer]:
        return [self.optimizer] if self.knows_all else family(self.optimizer)

    def hold(self, with_states: bool = True) -> None:
        """The optimizer has stand-ins."""
        self._exchange(self._held, self._stand_ins, with_states)

    def release(self, with_states: bool = True) -> None:
        """The optimizer has the module's own parameters."""
        self._exchange(self._stand_ins, self._held, with_states)

    def _exchange(self, old: Sequence[Tensor], new: Sequence[Tensor], with_states: bool) -> None:
        members = self._members()  # anew: load_state_dict makes new groups and states
        exchange(members, dict(zip(map(id, old), new, strict=True)), hidden=not self.knows_all)
        for state in states(members) if with_states else ():
            for before, after in zip(old, new, strict=True):
                if before in state:
                    state[after] = state.pop(before)

    def saw(self, entry: dict[str, Any]) -> dict[str, DTensor]:
        """Remembers for :meth:`leave`, and returns, the shards that users see in a parameter's state and that its
        stand-in's state must not have."""
        sharded = {key: value for key, value in entry.items() if isinstance(value, DTensor)}
        self._seen[id(entry)] = entry, sharded
        return sharded

    def entries(self) -> Iterator[tuple[DTensor, Tensor, dict[str, Any]]]:
        """``(parameter, stand-in, state)``, the states being those of stand-ins."""
        for state in states(self._members()):
            for p, stand_in in self.pairs:
                entry = state.get(stand_in)
                if isinstance(entry, dict):
                    yield p, stand_in, entry

    def undo(self) -> None:
        with torch.no_grad():
            if self.filled:
                for p, stand_in in self.pairs:
                    self.store(p, stand_in)
                for p, stand_in, entry in self.entries():
                    _, seen = self._seen.get(id(entry), (entry, _NOTHING))
                    for key, value in entry.items():
                        entry[key] = self.leave(p, stand_in, key, value, seen.get(key))
            self.release()
            for _, stand_in in self.pairs:
                self.end(stand_in)

    @abstractmethod
    def fill(self) -> None:
        """Stand-ins, gradients and states have their values."""

    @abstractmethod
    def stand_in(self, p: DTensor) -> Tensor:
        """The tensor that the optimizer holds instead of ``p``."""

    @abstractmethod
    def store(self, p: DTensor, stand_in: Tensor) -> None:
        """Writes the values of the stand-in and its gradient into ``p``."""

    @abstractmethod
    def leave(self, p: DTensor, stand_in: Tensor, key: str, value: Any, seen: Any) -> Any:
        """A state value as users see it beside ``p``; ``seen`` is what they saw before."""

    def end(self, stand_in: Tensor) -> None:
        stand_in.grad = None


class _LocalSwap(_Swap):
    """Stand-ins are the local shards themselves."""

    def stand_in(self, p: DTensor) -> Tensor:
        shard = local(p)
        if not self.knows_all and type(shard) is Tensor:  # a subclass has what it is made of there
            vars(shard).update(self.owner.attributes(p))  # of now: user code may have changed them
        return shard

    def fill(self) -> None:
        self.filled = True
        for p, stand_in in self.pairs:
            stand_in.grad = None if p.grad is None else local(p.grad)
        for p, _, entry in self.entries() if self.elementwise else ():  # else nobody steps
            sharded = self.saw(entry)
            for key, value in entry.items():
                if key in sharded:
                    entry[key] = local(value)
                elif isinstance(value, Tensor) and key not in self.owner.beside and _is_of_shape(value, p.shape):
                    entry[key] = local(shard_like(value, p, value.dtype))  # whole: a user's

    def store(self, p: DTensor, stand_in: Tensor) -> None:
        pass  # stepped in place

    def leave(self, p: DTensor, stand_in: Tensor, key: str, value: Any, seen: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.dim() == 0:
            return value
        if not self.elementwise:
            return value
        if value.shape != stand_in.shape or key in self.owner.beside:
            return value
        if isinstance(seen, DTensor) and local(seen) is value:
            return seen
        return self.owner.shard(value, key, p)


class _WholeSwap(_Swap):
    """Stand-ins are whole tensors, the same on every rank."""

    def stand_in(self, p: DTensor) -> Tensor:
        return self.owner.whole_parameter(p)

    def fill(self) -> None:
        if self.filled:
            return
        self.filled = True
        with torch.no_grad():
            entries = [entry for _, _, entry in self.entries()]
            for entry in entries:
                self.saw(entry)
            inside = [(entry, key, value) for entry in entries for key, value in entry.items()]
            with_grad = [(stand_in, p.grad) for p, stand_in in self.pairs if p.grad is not None]
            sharded: list[Tensor] = [value for _, _, value in inside if isinstance(value, DTensor)]
            wholes = iter(gathered_each([*(p for p, _ in self.pairs), *(grad for _, grad in with_grad), *sharded]))
            for p, stand_in in self.pairs:
                stand_in.data = next(wholes)
                stand_in.requires_grad_(p.requires_grad)
                stand_in.grad = None
            for stand_in, _ in with_grad:
                stand_in.grad = next(wholes)
            for entry, key, value in inside:
                entry[key] = (
                    next(wholes) if isinstance(value, DTensor) else map_tensors(lambda path, t: gathered(t), value)
                )
            self._remember_grads()

    def _remember_grads(self) -> None:
        self._given = {id(s): (s.grad, version_of(s.grad)) for _, s in self.pairs if s.grad is not None}

    def store(self, p: DTensor, stand_in: Tensor) -> None:
        start, length = rows_of(p)
        local(p).copy_(stand_in.detach().narrow(0, start, length))
        grad = stand_in.grad
        given, version = self._given.get(id(stand_in), (None, 0))
        if grad is None or p.grad is None:
            p.grad = None if grad is None else shard_like(grad.to(p.dtype), p)
        elif grad is not given or version_of(grad) != version:
            local(p.grad).copy_(grad.detach().narrow(0, start, length))

    def leave(self, p: DTensor, stand_in: Tensor, key: str, value: Any, seen: Any) -> Any:
        if not isinstance(value, Tensor) or not _is_of_shape(value, p.shape):
            return value
        if isinstance(seen, DTensor) and seen.dtype == value.dtype:
            start, length = rows_of(seen)
            local(seen).copy_(value.detach().narrow(0, start, length))
            return seen
        return self.owner.shard(local(shard_like(value, p, value.dtype)), key, p)

    def end(self, stand_in: Tensor) -> None:
        stand_in.grad = None
        stand_in.data = torch.empty(0, dtype=stand_in.dtype, device=stand_in.device)

    def around(self, closure: Callable[[], Any], touch: _FirstTouch, losses: AgreedLosses) -> Callable[[], Any]:
        """``closure`` as the optimizer may call it while it holds stand-ins: user code finds its own parameters."""

        def evaluate() -> Any:
            touch.end()
            filled = self.filled
            with DisableTorchFunction(), torch.no_grad():
                for p, stand_in in self.pairs if filled else ():
                    self.store(p, stand_in)
                self.release(with_states=not filled)
            loss = closure()
            with DisableTorchFunction(), torch.no_grad():
                self.hold(with_states=not filled)
                if filled:
                    self._refill()
                else:
                    self.fill()
                return losses.mean(loss)

        return evaluate

    def _refill(self) -> None:
        """In place, because the optimizer may keep views of the stand-ins."""
        with_grad = [(stand_in, p.grad) for p, stand_in in self.pairs if p.grad is not None]
        wholes = iter(gathered_each([*(p for p, _ in self.pairs), *(grad for _, grad in with_grad)]))
        for _, stand_in in self.pairs:
            stand_in.data.copy_(next(wholes))
            stand_in.grad = None
        for stand_in, _ in with_grad:
            stand_in.grad = next(wholes)
        self._remember_grads()


class AgreedLosses:
    """A closure's losses as an optimizer has them, which may decide by them: the mean of all ranks'.

    Each rank keeps the rows that it has stepped, so all have to decide alike: LBFGS how often it evaluates, AliG how
    far it goes. The user is given this rank's own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._told: list[tuple[Any, Any]] = []

    def mean(self, loss: Any) -> Any:
        is_number = isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1)
        if not is_number or dist.get_world_size() == 1:
            return loss
        total = torch.as_tensor(loss).detach().to(self._device, copy=True)
        dist.all_reduce(total)
        mean = total / dist.get_world_size()
        # No number but where the user's closure has made one of its loss, and waited for it already
        self._told.append((mean if isinstance(loss, Tensor) else mean.item(), loss))
        return self._told[-1][0]

    def own(self, result: Any) -> Any:
        """``result`` of the optimizer's step, the loss of this rank's batch where it is a mean."""
        return next((loss for mean, loss in self._told if result is mean), result)


class _FirstTouch(TorchFunctionMode):
    """Fills stand-ins when anything is computed before the closure has run.

    Until then the optimizer holds empty tensors, so that a forward and backward have the memory to themselves.
    """

    def __init__(self, swap: _WholeSwap) -> None:
        super().__init__()
        self.swap = swap
        self._depth = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.swap.filled and self._depth:
            with DisableTorchFunction():
                self.swap.owner.before()
                self.swap.fill()
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.__enter__()
        self._depth = torch_optim.num_function_modes()
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """User code runs without it. What an optimizer has entered above it stays, and so does this one below."""
        if self._depth and self._depth == torch_optim.num_function_modes():
            self.__exit__(None, None, None)
            self._depth = 0


def _is_of_shape(value: Tensor, shape: torch.Size) -> bool:
    """Whether each rank can keep its rows of ``value``: a plain whole tensor of its parameter's shape."""
    # A subclass made of other tensors (DTensor, torchao's 8 bits) is no array of elements that rows could be cut from
    plain = not hasattr(type(value), "__tensor_flatten__") and value.layout == torch.strided
    return plain and value.dim() > 0 and value.shape == shape


def hand_back(optimizer: Optimizer, originals: Mapping[Tensor, Tensor], whole: bool) -> None:
    """The optimizer holds the module's own parameters again (collective).

    Args:
        whole: Beside ordinary tensors as states, on the CPU; else they stay shards until they are saved.
    """
    members = family(optimizer)
    exchange(members, {id(sharded): original for sharded, original in originals.items()}, hidden=True)
    for state in states(members):
        for sharded, original in originals.items():
            if sharded in state:
                state[original] = state.pop(sharded)
            if whole and original in state:
                state[original] = _whole_entry(state[original])


def _whole_entry(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    for key, value in entry.items():
        entry[key] = map_tensors(lambda path, t: gathered(t).cpu() if isinstance(t, DTensor) else t, value)
    return entry


def fusible_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of an Adam or AdamW for PyTorch's fused kernel: floating-point shards in host memory, and no kernel
    was chosen."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return []

    def fits(group: dict[str, Any]) -> bool:
        chosen = any(group[key] is not None for key in ("fused", "foreach"))
        special = group["capturable"] or group["differentiable"]
        tensors = any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
        return not (chosen or special or tensors)

    def on_host(group: dict[str, Any]) -> bool:
        params = [local(p) for p in group["params"]]
        return all(p.is_floating_point() for p in params) and any(p.device.type == "cpu" for p in params)

    return [group for group in optimizer.param_groups if fits(group) and on_host(group)]


@contextmanager
def fused(optimizer: Optimizer) -> Iterator[None]:
    """For the length of a step; what users and checkpoints see of the groups stays as it was."""
    groups = fusible_groups(optimizer)
    for group in groups:
        group["fused"] = True
        for p in group["params"]:  # the kernel wants the counter of a replicated parameter beside it on the device
            state = optimizer.state.get(p)
            if state and p.device != state["step"].device:
                state["step"] = state["step"].to(p.device)
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None
