"""Residency: where user code meets parameters. A parameter that is touched is there.

The user's ``nn.Parameter`` is the gathered parameter for the whole run; only its memory comes and goes. While its unit
is resharded, nobody may compute with it, so every call of torch that is given one comes here first.

[Window] User code between two calls of the engine: a hook, or several. Parameters are opened and closed in it.

[What opens a parameter] Any call of torch but those that ask for metadata (:data:`_METADATA`; a name that is missing
there is slow, never wrong). The *key* of the parameter, which stands for all that is gathered with it, is gathered, the
user's tensors lie in full memory with its values, and the call runs untouched. A gradient that is read (``p.grad``) and
a state of an optimizer (``optimizer.state[p]``) have keys as well. Beyond a budget the keys that were opened first are
closed again.

[What closes it] The end of the window, which the engine calls. Each rank then copies *its rows* of everything that was
opened into its shards, always, without a look at versions: so writes through ``.data``, views, lists, ``out=``, NumPy
and collectives count. Memory that user code still holds is left to it, and the next gather fills it: views of a
parameter go on to show its values, and writes to them count whenever they are touched.

[Inside a step] Parameters whose unit runs are gathered by the engine. One that is touched while its unit is not is
*brought*, and stays until the backward is over, if a gradient may be wanted of it; else it is opened, until its unit
or the engine is next.

[One rank alone] may open a key between steps: the others give their parts when they come to the end of the window
(see :mod:`lightning_zero.comm.barrier`). Inside a step all ranks run the same code.

[How calls come here] Between steps by :class:`Mode`, which sees each call of torch. Inside a step by :class:`Guards`:
parameters are of a *guarded class*, a subclass of their own class with the same name, so that only calls with a
parameter come here. Where something is compiled the mode stays, as Dynamo knows a plain class best.

An engine provides a :class:`Store`; nothing else here knows of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from lightning_zero.comm.agree import Agreement
from lightning_zero.comm.barrier import FORWARD, Barrier
from lightning_zero.comm.shards import before_host_write, gathered, local, mesh_device, rows_of
from lightning_zero.engines.graphs import end_graph
from lightning_zero.engines.refusals import refuse_tracing
from lightning_zero.engines.torch_functions import (
    AS_THEY_ARE,
    IN_PLACE_COLLECTIVES,
    VIEW_PROPERTIES,
    VIEWS,
    getters,
    tensors_in,
)
from lightning_zero.host import available_host_bytes
from lightning_zero.private.torch import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    as_traced,
    backwards_inside,
    disabled_torch_function,
    has_compiled,
    in_backward,
    never_a_frame,
    outside_transforms,
    pause_dynamo,
    put_below,
    set_torch_function,
    storage_behind,
    storage_key,
    torch_function_of,
    users_of,
    without_modes,
)

BUDGET_BYTES = 1 << 30
"""The budget outside of a run, where ranks have no agreement on what is free."""


def budget_bytes(given: int | None, device: torch.device, agreement: Agreement | None) -> int:
    """Bytes of full tensors that may be open at a time, beside those of the call that is under way (collective).

    By default an eighth of what is free now on the device, or of this rank's share of the host. All ranks take the
    least of it: inside a step they close and gather the same keys.
    """
    if given is not None:
        return given
    if agreement is None:
        return BUDGET_BYTES
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        free = module.mem_get_info(device)[0]
    else:
        free = available_host_bytes() // agreement.world_size
    return int(min(agreement.gather(free // 8, "the strategy's set-up")))


_METADATA = frozenset(
    "size dim ndimension numel nelement stride storage_offset is_contiguous is_inference get_device register_hook"
    " retain_grad __len__ __hash__ is_same_size is_tensor is_storage _is_view has_names".split()
)
_SHAPES = frozenset("size dim ndimension numel nelement stride __len__ is_contiguous is_same_size".split())
_OF_DTYPE = frozenset("element_size is_floating_point is_complex is_signed".split())
"""Names of metadata that the shard knows: a gathered parameter may be of another dtype."""
_OF_LAYOUT = _OF_DTYPE | frozenset("data_ptr new_empty new_zeros new_ones new_full new_tensor".split())


_GETTERS_OF_SHAPE = getters("shape ndim nbytes")
_GETTERS_OF_LAYOUT = getters("dtype nbytes itemsize device")
_GRAD, _DATA, _DEVICE = (getattr(Tensor, name) for name in ("grad", "data", "device"))
_ASSIGN_GRAD = (_GRAD.__set__, _GRAD.__delete__)
_SET_REQUIRES_GRAD = (Tensor.requires_grad.__set__, Tensor.requires_grad_)  # type: ignore[attr-defined]
BACKWARDS = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])
_OF_A_PARAMETER: frozenset[Any] = frozenset(
    [_GRAD.__get__, *_ASSIGN_GRAD, *_SET_REQUIRES_GRAD, _DATA.__get__, _DATA.__set__]
)
"""Functions that mean something else to a parameter of the user's than to a plain tensor."""
_LOOKED_AT = _OF_A_PARAMETER | BACKWARDS | IN_PLACE_COLLECTIVES
"""Calls that are never as those of plain tensors."""
_WITHOUT_GRAPH = (_DATA.__get__, Tensor.detach)


def needs_no_values(func: Any) -> bool:
    """Whether ``func`` asks only for what a tensor without memory knows as well, or sets that."""
    return (
        func in AS_THEY_ARE
        or func in _GETTERS_OF_LAYOUT
        or func in _SET_REQUIRES_GRAD
        or func.__name__ in _METADATA
        or func.__name__ in _OF_DTYPE
    )


class Store(Protocol):
    """An engine's part: parameters, gradients and states by their keys."""

    @property
    def own(self) -> Mapping[int, Any]:
        """``id`` of each of the user's parameters. Empty while all of them are full."""

    hides_shapes: bool
    """Whether a parameter that is not there has no shape of its own."""
    only_brings: bool
    """Whether inside a step a parameter can be brought, and not opened."""

    def key_of(self, p: Tensor) -> int:
        """The key of a parameter of the user's."""

    def key_of_sharded(self, tensor: DTensor) -> int | None:
        """The key of an optimizer's state, or of another tensor that the engine keeps as a shard."""

    def parameters(self, key: int) -> Sequence[Tensor]:
        """The user's parameters of ``key``; none, if it is of gradients or of a state."""

    def is_there(self, p: Tensor) -> bool:
        """Whether the engine has gathered ``p``."""

    def is_here(self, key: int) -> bool:
        """Whether this rank has all of ``key``, so that :meth:`gather` needs no other."""

    def gather(self, key: int) -> list[Tensor]:
        """The full tensors of ``key``, of memory that is the caller's (collective)."""

    def open(self, key: int, values: list[Tensor]) -> list[Tensor]:
        """The user's tensors of ``key`` have full memory, and ``values``; returns them."""

    def close(self, key: int) -> None:
        """This rank's rows of the user's tensors of ``key`` become its shards; full memory goes, unless it is held."""

    def bring(self, p: Tensor) -> None:
        """Gathers the unit of ``p`` inside a step, until its backward is over (collective)."""

    def shard_of(self, p: Tensor) -> Tensor:
        """What knows the dtype, device and shape of a parameter: its shard, where that is a ``DTensor``."""

    def address(self, tensor: Tensor) -> int:
        """A number of the own of a parameter, or of what has :meth:`key_of_sharded`, for as long as the run lasts."""

    def name(self, key: int) -> str:
        """For errors."""

    def grad_of(self, p: Tensor) -> Tensor | None:
        """``p.grad``."""

    def assign_grad(self, p: Tensor, value: Tensor | None) -> None:
        """``p.grad = value``."""

    def before_collective(self, tensors: Sequence[Any]) -> None:
        """User code is about to call a collective that writes to ``tensors``."""

    def assign_data(self, p: Tensor, value: Tensor) -> None:
        """``p.data = value``, of an open or gathered parameter."""

    def backward(self, func: Any, run: Callable[[], Any]) -> Any:
        """``run()``, which is a call of ``func``, one of :data:`BACKWARDS`."""

    def aliased(self, p: Tensor, alias: Tensor) -> None:
        """User code has taken ``alias``, which is ``p.data`` or ``p.detach()``."""

    def written(self, p: Tensor) -> None:
        """The gathered ``p`` may be written to in a way that its version does not tell."""

    def used(self, params: Sequence[Tensor], result: Any, aliases: bool, first: Any) -> None:
        """In a step, ``result`` was computed of the gathered ``params``, by a call whose first argument is ``first``.
        ``aliases``: it may lie in their memory."""


class _Place(NamedTuple):
    """A tensor's place in memory that is not kept alive by it."""

    ref: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor | None:
        """A tensor there; ``None`` when the memory is gone."""
        storage = storage_behind(self.ref)
        if storage is None:
            return None
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.offset, self.size, self.stride)


class Memories:
    """Full memory that was closed and that user code may hold a part of. ``key`` and ``slot`` say whose it is.

    Attributes:
        kept: By storage: key, slot, and whether nobody holds it any more.
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[int, int, Callable[[], bool]]] = {}
        self._places: dict[tuple[int, int], _Place] = {}

    def __bool__(self) -> bool:
        return bool(self.kept)

    def keep(self, key: int, slot: int, tensor: Tensor, is_free: Callable[[], bool] | None = None) -> None:
        """``tensor`` lies in such memory. ``is_free`` tells whether nobody holds it any more, and gives it up; by
        default that is so when its storage is gone."""
        self.forget(key, slot)
        ref = StorageWeakRef(tensor.untyped_storage())
        self.kept[ref.cdata] = key, slot, is_free or ref.expired
        self._places[key, slot] = _Place(
            ref, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        )

    def forget(self, key: int, slot: int) -> None:
        """That memory has become somebody else's."""
        if (place := self._places.pop((key, slot), None)) is not None:
            self.kept.pop(place.ref.cdata, None)

    def again(self, key: int, slot: int) -> Tensor | None:
        """A tensor in that memory, if it is still there."""
        place = self._places.get((key, slot))
        return None if place is None else place.tensor()

    def is_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Whose memory ``tensor`` lies in: key and slot."""
        try:
            with DisableTorchFunctionSubclass():
                if tensor.layout != torch.strided:
                    return None
                found = self.kept.get(storage_key(tensor.untyped_storage()))
        except RuntimeError:  # no memory of its own: inside a transform of torch.func
            return None
        return None if found is None else found[:2]

    def behind(self, tensor: Tensor) -> int | None:
        """The key whose memory ``tensor`` lies in."""
        found = self.is_of(tensor)
        return None if found is None else found[0]

    def held(self) -> Iterator[tuple[int, int, Tensor]]:
        """Key, slot and a tensor in the memory, of all that are there."""
        for (key, slot), place in self._places.items():
            if (tensor := place.tensor()) is not None:
                yield key, slot, tensor

    def prune(self) -> None:
        """Forgets what is not held any more."""
        for key, slot, is_free in list(self.kept.values()):
            if is_free():
                self.forget(key, slot)


class _Open(NamedTuple):
    nbytes: int
    by_all: bool
    """Whether all ranks have opened it."""
    full: Tensor | None
    """Of an optimizer's state."""


class Residency:
    """See the module's text.

    Args:
        store: The engine's.
        is_between: Whether no step is under way.
        meeting: Of the ranks; ``None`` where there is one rank, or no run.
        memories: Those that the store keeps.
        budget_bytes: See :func:`budget_bytes`.
    """

    def __init__(
        self,
        store: Store,
        is_between: Callable[[], bool] = lambda: True,
        meeting: Barrier | None = None,
        memories: Memories | None = None,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self._store, self._is_between, self._meeting = store, is_between, meeting
        self._memories = Memories() if memories is None else memories
        self._budget_bytes = budget_bytes
        self._open: dict[int, _Open] = {}  # the one that was opened first in front
        self._dumps = self._is_together = False
        self.as_they_are = AS_THEY_ARE - _GETTERS_OF_SHAPE if store.hides_shapes else AS_THEY_ARE
        """Getters that no parameter needs to be there for."""
        self.mode = Mode(self)

    # -- windows -------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether anything is."""
        return bool(self._open)

    def end_window(self) -> None:
        """Closes everything."""
        while self._open:
            self.close(next(iter(self._open)))
        if self._memories:
            with DisableTorchFunction():
                self._memories.prune()

    def close(self, key: int) -> None:
        """Closes ``key``, if it is open."""
        if self._open.pop(key, None) is not None:
            with _quietly():
                self._store.close(key)

    def forget(self) -> list[Tensor]:
        """Nothing that is open is stored any more. Returns its parameters, which are full still."""
        params = [p for key in self._open for p in self._store.parameters(key)]
        self._open.clear()
        return params

    def meet(self) -> None:
        """Waits until all ranks are done with their user code, and gives its parts to those that are not
        (collective)."""
        if self._meeting is None or not self._is_between():
            return
        with _quietly():
            self._meeting.end(self._serve)

    def all_run(self) -> bool:
        """Whether all ranks are about to run a forward without gradients, and not some of them while others have
        finished their loop (collective)."""
        if self._meeting is None or not self._is_between():
            return True
        with _quietly():
            return self._meeting.ask(FORWARD, lambda: "a forward of validation, test or prediction", self._serve)

    @contextmanager
    def together(self, are: bool) -> Iterator[None]:
        """With ``are`` all ranks touch the same inside, and none reads alone: gathers need no meeting."""
        before, self._is_together = self._is_together, are
        try:
            yield
        finally:
            self._is_together = before

    def _serve(self, served: int) -> None:
        if served != FORWARD:
            self._store.gather(served - 1 - FORWARD)

    @contextmanager
    def dumping(self) -> Iterator[None]:
        """``detach()`` and ``data`` of a parameter are its shard: for a ``state_dict`` of shards."""
        self._dumps = True
        try:
            yield
        finally:
            self._dumps = False

    def held(self) -> list[tuple[Tensor, Tensor]]:
        """The memory that user code holds of parameters, each with its parameter."""
        return [
            (place, self._store.parameters(key)[slot])
            for key, slot, place in self._memories.held()
            if self._store.parameters(key)
        ]

    def touch(self, tensors: Iterable[Any], brings: bool = False) -> None:
        """``tensors``, as far as they are parameters, gradients or views of them, are there. ``brings``: where that
        is inside a step, parameters stay until the backward is over."""
        keys: dict[int, None] = {}
        away: list[Tensor] = []
        self._look_at(tensors, keys, away, [])
        self._make_there(keys, away, brings)

    def _make_there(self, keys: dict[int, None], away: list[Tensor], brings: bool) -> None:
        if (brings or self._store.only_brings) and not self._is_between():
            for p in away:
                if not self._store.is_there(p):  # it may have come with the one before
                    self.close(self._store.key_of(p))
                    with _quietly():
                        self._store.bring(p)
        else:
            keys.update((self._store.key_of(p), None) for p in away)
        closed = [key for key in keys if key not in self._open]
        if closed:
            refuse_tracing()
            for key in closed:
                self._open_key(key)
            self._make_room(keys)

    def _open_key(self, key: int) -> None:
        with _quietly():
            values, by_all = self.gather(key)
            nbytes = sum(value.nbytes for value in values)
            full = self._store.open(key, values)
        self._open[key] = _Open(nbytes, by_all, full[0] if full else None)

    def gather(self, key: int) -> tuple[list[Tensor], bool]:
        """The full tensors of ``key``, and whether all ranks have asked for them (collective)."""
        meets = self._meeting is not None and self._is_between() and not self._is_together
        if not meets or self._store.is_here(key):
            return self._store.gather(key), True
        assert self._meeting is not None
        by_all = self._meeting.ask(key + 1 + FORWARD, lambda: f"a read of {self._store.name(key)}", self._serve)
        return self._store.gather(key), by_all

    def _make_room(self, keys: Mapping[int, None]) -> None:
        total = sum(each.nbytes for each in self._open.values())
        for key, each in list(self._open.items()):
            if total <= self._budget_bytes:
                return
            if key not in keys:
                self.close(key)
                total -= each.nbytes

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``, of user code."""
        own = self._store.own
        first = args[0] if args else None
        if func in self.as_they_are:
            return func(*args)
        if func in BACKWARDS:
            with backwards_inside(self.mode):
                return self._store.backward(func, lambda: func(*args, **kwargs))
        if id(first) in own and (func in _OF_A_PARAMETER or func.__name__ == "register_post_accumulate_grad_hook"):
            return self._of_a_parameter(func, args, kwargs)
        name = func.__name__
        if self._store.hides_shapes and (name in _SHAPES or func in _GETTERS_OF_SHAPE):
            return func(*map(self._in_shape, args), **kwargs)
        if name in _METADATA:
            return func(*args, **kwargs)
        if name.endswith("_like") or name in _OF_LAYOUT or func in _GETTERS_OF_LAYOUT:
            return self._of_layout(func, args, kwargs)
        if name == "__deepcopy__" and isinstance(first, DTensor):
            return self._deep_copy(first, args[1])
        if func in IN_PLACE_COLLECTIVES and own:
            self._store.before_collective(args)
        keys: dict[int, None] = {}
        away: list[Tensor] = []
        sharded: list[DTensor] = []
        touched = self._look_at([*args, *kwargs.values()], keys, away, sharded)
        if not (touched or sharded or keys or away):
            return func(*args, **kwargs)
        if self._dumps and name == "detach" and id(first) in own:
            return self._store.shard_of(args[0]).detach()
        self._make_there(keys, away, torch.is_grad_enabled() and func not in _WITHOUT_GRAPH)
        if sharded:
            return self._on_full(func, args, kwargs, sharded)
        result = func(*args, **kwargs)
        if func in IN_PLACE_COLLECTIVES:  # which no version counts
            for p in filter(self._store.is_there, touched):
                self._store.written(p)
        if touched:
            if func is Tensor.detach:
                self._store.aliased(args[0], result)
            self.computed(touched, result, func, first)
        return result

    def _of_a_parameter(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        store, p = self._store, args[0]
        if func == _GRAD.__get__:
            return store.grad_of(p)
        if func in _ASSIGN_GRAD:
            value = args[1] if len(args) == 2 else None
            self.touch([value])
            return store.assign_grad(p, value)
        if func in _SET_REQUIRES_GRAD:
            func(store.shard_of(p), *args[1:], **kwargs)
            return func(*args, **kwargs)
        if func == _DATA.__set__:
            self.touch(args)
            with _quietly():
                return store.assign_data(p, self._full_of(args[1]))
        if func == _DATA.__get__:
            if self._dumps:
                return store.shard_of(p).detach()
            self.touch([p])
            result = func(p)
            store.aliased(p, result)
            if store.is_there(p):
                store.written(p)
                store.used([p], result, True, p)
            return result
        raise ValueError(
            f"{func.__name__} on a parameter in a run would never be called: its gradient is complete only when it is"
            " sharded. Use on_after_backward or on_before_optimizer_step."
        )

    def _in_shape(self, value: Any) -> Any:
        """Something of the shape and dtype of a parameter that is not there; others as they are."""
        if id(value) not in self._store.own or self._store.is_there(value):
            return value
        return torch.empty(self._store.shard_of(value).shape, dtype=value.dtype, device="meta")

    def _of_layout(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A function that asks for dtype, shape and device alone, which shards know."""
        own = self._store.own

        def known(value: Any) -> Any:
            if id(value) in own:
                return value if self._store.is_there(value) else self._store.shard_of(value)
            return value

        if func.__name__ == "data_ptr":
            return self._pointer(args[0])
        args = [known(value) for value in args]
        first = args[0] if args else None
        if func == _DEVICE.__get__:
            return mesh_device(first) if isinstance(first, DTensor) else func(*args)
        if func.__name__ in _OF_DTYPE or func in _GETTERS_OF_LAYOUT:
            return func(*args, **kwargs)
        args = [_stand_in(value) if isinstance(value, DTensor) else value for value in args]
        return func(*args, **kwargs)

    def _pointer(self, tensor: Any) -> int:
        """The address of ``tensor``. Code counts tied parameters once by it, so it is no memory that goes while others
        are asked: beyond the budget it is a number of the parameter's own."""
        shard: Tensor | None = tensor if isinstance(tensor, DTensor) else None
        if id(tensor) in self._store.own and not self._store.is_there(tensor):
            shard = self._store.shard_of(tensor)
        if shard is not None and shard.nbytes + sum(each.nbytes for each in self._open.values()) > self._budget_bytes:
            return self._store.address(tensor)
        self.touch([tensor])
        return int(self._full_of(tensor).data_ptr())

    def _on_full(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], sharded: Sequence[DTensor]
    ) -> Any:
        """Full tensors in the place of states."""
        shard_of = {id(self._full_of(tensor)): tensor for tensor in sharded}
        full = [self._full_in(value) for value in args]
        result = func(*full, **{key: self._full_in(value) for key, value in kwargs.items()})
        return shard_of.get(id(result), result)

    def _full_in(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._full_in, value))
        return self._full_of(value)

    def _full_of(self, tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        key = self._store.key_of_sharded(tensor)
        assert key is not None
        full = self._open[key].full
        assert full is not None
        return full

    def _deep_copy(self, tensor: DTensor, memo: dict[int, Any]) -> Tensor:
        """A full one, in ``memo`` under the name of what was copied: a temporary's would pass on to the next."""
        if id(tensor) not in memo:
            self.touch([tensor])
            memo[id(tensor)] = self._full_of(tensor).detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    def _look_at(
        self, values: Iterable[Any], keys: dict[int, None], away: list[Tensor], sharded: list[DTensor]
    ) -> list[Tensor]:
        """The user's parameters among ``values``. Collects those that are not there, and the other keys."""
        own, memories, store = self._store.own, self._memories, self._store
        found: list[Tensor] = []
        for value in values:
            kind = type(value)
            if kind is Tensor:
                if memories and (key := memories.behind(value)) is not None:
                    self._look_behind(key, keys, away)
            elif id(value) in own:
                found.append(value)
                if not store.is_there(value):
                    away.append(value)
            elif kind in (list, tuple):
                found += self._look_at(value, keys, away, sharded)
            elif kind is dict:
                found += self._look_at(value.values(), keys, away, sharded)
            elif isinstance(value, DTensor):
                if (key := store.key_of_sharded(value)) is not None:
                    sharded.append(value)
                    keys[key] = None
            elif isinstance(value, Resharded):
                keys[value.key] = None
            elif isinstance(value, Tensor) and memories and (key := memories.behind(value)) is not None:
                self._look_behind(key, keys, away)
            elif isinstance(value, (list, tuple)):
                found += self._look_at(value, keys, away, sharded)
        return found

    def _look_behind(self, key: int, keys: dict[int, None], away: list[Tensor]) -> None:
        """A view of what has ``key`` is touched."""
        params = self._store.parameters(key)
        if not self._store.own:  # all are full in memory of their own
            return
        if not params:
            keys[key] = None
        elif self._store.is_there(params[0]):
            for p in params:
                self._store.written(p)
        else:
            away.append(params[0])

    def computed(self, params: Sequence[Tensor], result: Any, func: Any = None, first: Any = None) -> None:
        """``result`` was computed of ``params``, which may have gone when its backward comes; ``first`` is the first
        argument of ``func``."""
        if not self._is_between():
            self._store.used(params, result, func is not None and may_alias(func), first)
        elif torch.is_grad_enabled() and (nodes := {t.grad_fn for t in tensors_in((result,)) if t.grad_fn is not None}):
            opened = (self._open.get(self._store.key_of(p)) for p in params)
            before = partial(self._before_node, params, any(each is not None and not each.by_all for each in opened))
            for node in nodes:
                node.register_prehook(before)

    def _before_node(self, params: Sequence[Tensor], alone: bool, grads: Any) -> None:
        """A backward of user code needs ``params``, whose window may be over."""
        if alone:
            raise RuntimeError(
                "backward through a parameter that not all ranks have read: gradients are averaged over all of them,"
                " so compute it on every rank."
            )
        self.touch(params)

    def passes(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether this is a call of plain tensors and gathered parameters, as most are. It leaves :meth:`notice` to the
        caller."""
        if func in _LOOKED_AT:
            return False
        own, is_there = self._store.own, self._store.is_there
        for value in args:
            if type(value) is Tensor:
                continue
            if id(value) in own:
                if not is_there(value):
                    return False
            elif isinstance(value, (DTensor, Resharded, list, tuple)):
                return False
        return not self._memories.kept

    def notice(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """As :meth:`call`, after a call that :meth:`passes`."""
        aliases = may_alias(func)
        if aliases or torch.is_grad_enabled():
            own = self._store.own
            if params := [value for value in args if id(value) in own]:
                self._store.used(params, result, aliases, args[0])

    @property
    def watches_plain_tensors(self) -> bool:
        """Whether a call may matter in which there is no parameter: user code holds memory of one."""
        return bool(self._memories)


class _NoParameters:
    """The :class:`Store` where there are shards alone."""

    own: Mapping[int, Any] = {}
    hides_shapes = only_brings = False

    def __init__(self) -> None:
        self._shards: list[DTensor] = []

    def key_of_sharded(self, tensor: DTensor) -> int:
        for key, shard in enumerate(self._shards):
            if shard is tensor:
                return key
        self._shards.append(tensor)
        return len(self._shards) - 1

    def parameters(self, key: int) -> Sequence[Tensor]:
        return ()

    def backward(self, func: Any, run: Callable[[], Any]) -> Any:
        return run()

    def gather(self, key: int) -> list[Tensor]:
        return [gathered(self._shards[key]).clone()]

    def open(self, key: int, values: list[Tensor]) -> list[Tensor]:
        self._full = {**getattr(self, "_full", {}), key: values[0]}
        return values

    def close(self, key: int) -> None:
        store_rows(self._full.pop(key), self._shards[key])


@contextmanager
def looking_whole() -> Iterator[None]:
    """User code reads and writes the full tensors of shards (collective)."""
    residency = Residency(_NoParameters())  # type: ignore[arg-type]
    with residency.mode:
        yield
    residency.end_window()


_ALIASES = VIEWS | {"detach"}
_PROPERTIES = VIEW_PROPERTIES | {_DATA.__get__}


def may_alias(func: Any) -> bool:
    """Whether the result of ``func`` may share the memory of its argument."""
    name = func.__name__
    return name in _ALIASES or (name == "__get__" and func in _PROPERTIES)


def store_rows(whole: Tensor, sharded: DTensor) -> None:
    """This rank's rows of ``whole``; of a gathered copy in low precision only those elements that have changed."""
    shard, (start, length) = local(sharded), rows_of(sharded)
    if not length:
        return
    rows = whole.detach().narrow(0, start, length).to(shard.device)
    if rows.dtype != shard.dtype:
        rows = torch.where(shard.to(rows.dtype) == rows, shard, rows.to(shard.dtype))
    before_host_write(sharded)
    shard.copy_(rows)


@contextmanager
def _quietly() -> Iterator[None]:
    """The engine's own work, whatever user code it is called from."""
    leaves_inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with outside_transforms(), DisableTorchFunction(), leaves_inference, torch.no_grad():
        yield


def _stand_in(shard: DTensor) -> Tensor:
    """Enough of a full tensor for functions that read only its shape, dtype and device."""
    return torch.empty((), dtype=shard.dtype, device=mesh_device(shard)).expand(shard.shape)


class Resharded(Tensor):
    """A gradient or state whose full memory is closed; it is a plain tensor while it is open."""

    key: int
    residency: Residency | None
    """``None`` after the run."""

    @staticmethod
    def close(full: Any, key: int, residency: Residency) -> None:
        """Gives up the memory of ``full``, unless somebody else has it."""
        with DisableTorchFunction():
            storage = full.untyped_storage()
            if users_of(storage) == 1 and storage.resizable():
                storage.resize_(0)
        full.key, full.residency = key, residency
        full.__class__ = Resharded

    def open(self, value: Tensor) -> None:
        """A plain tensor with ``value``, whose attributes nobody copies with it."""
        with DisableTorchFunction():
            storage = self.untyped_storage()
            if not storage.nbytes():
                storage.resize_(self.numel() * self.element_size())
            vars(self).clear()
            self.__class__ = Tensor  # type: ignore[assignment]
            self.copy_(value)

    @classmethod
    @never_a_frame
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # what graphs are given is seen to when they run
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for value in tensors_in((*args, *(kwargs or {}).values())):
            if isinstance(value, Resharded):
                with DisableTorchFunctionSubclass():
                    if value.residency is None:
                        raise RuntimeError("a gradient of a run that has ended: read it during the run, or clone it.")
                    return value.residency.call(func, args, kwargs or {})
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Mode(TorchFunctionMode):
    """Has each call of torch come to ``residency``."""

    def __init__(self, residency: Residency) -> None:
        super().__init__()
        self._residency = residency

    @never_a_frame
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in self._residency.as_they_are:
            return func(*args)
        if torch.compiler.is_compiling():
            if any(isinstance(value, DTensor) for value in args):
                end_graph()  # and what is asked for is asked again, outside
            return as_traced(func)(*args, **(kwargs or {}))
        before = pause_dynamo(None)
        try:
            return self._residency.call(func, args, kwargs or {})
        finally:
            pause_dynamo(before)


class Guards:
    """Has calls with parameters come to ``residency`` by their class, in the place of its mode.

    Args:
        parameters: The user's own.
    """

    def __init__(self, residency: Residency, parameters: Iterable[Tensor]) -> None:
        self._residency = residency
        self._parameters = list(parameters)
        self._guarded = {kind: guarded(kind, self._ask) for kind in {type(p) for p in self._parameters}}
        self._plain = {guarded: kind for kind, guarded in self._guarded.items()}
        # functions of torch that are written in Python name plain tensors, too
        self._ours = frozenset([*self._plain, *self._guarded, DTensor, Tensor, Resharded])
        # A class that translates calls itself must go on to do so
        self._possible = all(torch_function_of(kind) is disabled_torch_function for kind in self._guarded)
        self._on = self._has_mode = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def instead_of_mode(self) -> Iterator[None]:
        """For the length of a step."""
        is_needed = self._has_mode or self._residency.watches_plain_tensors
        if self._on or is_needed or not self._possible or has_compiled():
            yield
            return
        with without_modes(Mode):
            self._set(True, self._parameters)
            try:
                yield
            finally:
                self._set(False, self._parameters)
                self._has_mode = False

    def watch_all(self) -> None:
        """For the rest of the step, if one is under way, the mode sees each call: plain tensors matter now."""
        if self._on:
            self._set(False, self._parameters)
            put_below(self._residency.mode)
            self._has_mode = True

    @contextmanager
    def _lifted(self, parameters: Iterable[Any]) -> Iterator[None]:
        parameters = [p for p in parameters if type(p) in self._plain]
        self._set(False, parameters)
        try:
            yield
        finally:
            if not self._has_mode:
                self._set(True, parameters)

    def _set(self, on: bool, parameters: Iterable[Tensor]) -> None:
        self._on, self._thread = on, threading.current_thread()
        classes = self._guarded if on else self._plain
        for p in parameters:
            p.__class__ = classes.get(type(p), type(p))
        set_torch_function(DTensor, self._ask_of_shard if on else disabled_torch_function)

    def _ask(self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any], kwargs: Any) -> Any:
        residency = self._residency
        ours = self._ours.issuperset(types)
        values = (*args, *kwargs.values()) if kwargs else args
        if ours and residency.passes(func, values):
            with DisableTorchFunctionSubclass():
                try:
                    result = func(*args, **(kwargs or {}))
                except TypeError:  # of make_fx, which knows plain parameters only
                    refuse_tracing()
                    raise
                residency.notice(func, values, result)
            return result
        if func in BACKWARDS:  # user code runs inside
            with self._lifted(self._parameters):
                return residency.call(func, args, kwargs or {})
        if not ours:  # another class of tensor that translates calls has its say, too
            with self._lifted(_each((args, kwargs))):
                return residency.call(func, args, kwargs or {})
        with DisableTorchFunctionSubclass():
            return residency.call(func, args, kwargs or {})

    def _ask_of_shard(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if threading.current_thread() is not self._thread and not in_backward():  # writes a file; no mode is on there
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return self._ask(func, types, args, kwargs)


def _each(value: Any) -> Iterator[Any]:
    """The leaves of the arguments of a call."""
    if isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _each(inner)
    else:
        yield value


def guarded(kind: Any, ask: Callable[..., Any]) -> Any:
    """A subclass of ``kind`` that passes for it, and whose copies are of ``kind``."""

    @never_a_frame
    def asked(
        cls: type, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        before = pause_dynamo(None)
        try:
            return ask(func, types, args, kwargs)
        finally:
            pause_dynamo(before)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        copy = kind.__deepcopy__(self, memo)
        copy.__class__ = kind
        return copy

    def reduced(self: Any, protocol: Any) -> Any:
        return _with_kind(kind.__reduce_ex__(self, protocol))

    def _with_kind(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(_with_kind, value))
        return kind if value is made else value

    table = {
        "__torch_function__": classmethod(asked),
        "__deepcopy__": copied,
        "__reduce_ex__": reduced,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    made: Any = type(kind)(kind.__name__, (kind,), table)
    return made
