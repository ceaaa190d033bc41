"""Residency: gathers a parameter when user code touches it.

The user's ``nn.Parameter`` is the gathered parameter during the whole run; only its memory is allocated and freed.
While its unit is resharded, no code may compute with the parameter. Therefore every torch call that takes a parameter
is intercepted here.

[Window] User code between two calls of the engine: one or several hooks. Parameters are opened and closed in a window.

[Opening] Every torch call opens its parameters, except calls that read metadata (:data:`_METADATA`; a name that is
missing there costs time and never correctness). Tensors that are gathered together have one *key*. Opening gathers the
key, allocates full memory for the user's tensors and fills it with the values; the call then runs unchanged. Gradients
(``p.grad``) and optimizer states (``optimizer.state[p]``) that are read have keys as well. When a memory budget is
exceeded, the keys that were opened first are closed.

[Closing] The engine ends the window. Each rank then copies *its rows* of all open tensors into its shards. It does so
without looking at version counters, so writes through ``.data``, views, lists, ``out=``, NumPy and collectives are
stored. Views are meant for the hook, or the forward of the unit, in which they are taken: memory that user code holds
longer is left to it, with the values of that moment, and a warning says so.

[Inside a step] The engine gathers the parameters of running units. A parameter that is touched while its unit is not
running is *brought*, that is, gathered until the backward is over, if it may need a gradient. Otherwise it is opened
until its unit or the engine runs next.

[One rank alone] may open a key between steps: the other ranks send their shards when they reach the end of the window
(:mod:`lightning_zero.comm.barrier`). Inside a step all ranks run the same code.

[Interception] :class:`Mode` intercepts every torch call of user code.

An engine provides a :class:`Store`; this file depends on nothing else of it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from lightning_zero.comm.agree import Agreement
from lightning_zero.comm.barrier import FORWARD, Barrier
from lightning_zero.comm.shards import before_host_write, gathered, local, mesh_device, rows_of
from lightning_zero.engines.refusals import refuse_tracing, warn_of_views
from lightning_zero.engines.torch_functions import (
    AS_THEY_ARE,
    IN_PLACE_COLLECTIVES,
    getters,
    tensors_in,
)
from lightning_zero.host import available_host_bytes
from lightning_zero.private.torch import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    Graph,
    as_traced,
    backwards_inside,
    in_transform,
    never_a_frame,
    outside_transforms,
    pause_dynamo,
    pytree,
    set_data,
    storage_key,
    takes_saved_tensors_hooks,
    users_of,
    version_of,
)

BUDGET_BYTES = 1 << 30
"""Budget outside of a run, where ranks cannot agree on the free memory."""


def budget_bytes(device: torch.device, agreement: Agreement | None) -> int:
    """Bytes of full tensors that may be open at a time, in addition to those of the current call (collective).

    It is an eighth of the free memory of the device, or of this rank's share of the host's. All ranks take
    the minimum, because inside a step they must close and gather the same keys.
    """
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
    " retain_grad __len__ __hash__ is_same_size is_tensor is_storage _is_view has_names"
    " _has_compatible_shallow_copy_type".split()
)
_OF_DTYPE = frozenset("element_size is_floating_point is_complex is_signed".split())
"""Metadata that is read from the shard: a gathered parameter may have another dtype."""
_OF_LAYOUT = _OF_DTYPE | frozenset("data_ptr new_empty new_zeros new_ones new_full".split())

_NEW_MEMORY = frozenset(
    "linear bilinear embedding layer_norm rms_norm group_norm batch_norm instance_norm conv1d conv2d conv3d mm addmm"
    " matmul __matmul__ __rmatmul__ bmm mul __mul__ __rmul__ add __add__ __radd__ sub __sub__ __rsub__".split()
)
"""Functions whose result is never a view. A name that is missing costs time only."""
_GETTERS_OF_LAYOUT = getters("dtype nbytes itemsize device")
_GRAD, _DATA, _DEVICE = (getattr(Tensor, name) for name in ("grad", "data", "device"))
_ASSIGN_GRAD = (_GRAD.__set__, _GRAD.__delete__)
_OF_GRAD = (_GRAD.__get__, *_ASSIGN_GRAD)
_SET_REQUIRES_GRAD = (Tensor.requires_grad.__set__, Tensor.requires_grad_)  # type: ignore[attr-defined]
BACKWARDS = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])
_OF_A_PARAMETER: frozenset[Any] = frozenset(
    [_GRAD.__get__, *_ASSIGN_GRAD, *_SET_REQUIRES_GRAD, _DATA.__get__, _DATA.__set__]
)
"""Functions that need other code for a user parameter than for a plain tensor."""
_PLAIN = frozenset([Tensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size])
"""Types of arguments of most calls; none of them is or holds a parameter."""
_WITHOUT_VERSION = IN_PLACE_COLLECTIVES | {_DATA.__get__}
"""Functions after which a write may not have increased the version counter of a parameter."""
_WITHOUT_GRAPH = (_DATA.__get__, Tensor.detach)


def needs_no_values(func: Any) -> bool:
    """Whether ``func`` reads or sets only attributes that a tensor without memory has, too."""
    return (
        func in AS_THEY_ARE
        or func in _GETTERS_OF_LAYOUT
        or func in _SET_REQUIRES_GRAD
        or func in _OF_GRAD
        or func.__name__ in _METADATA
        or func.__name__ in _OF_DTYPE
    )


class Store(Protocol):
    """An engine's interface: parameters and gradients by their keys."""

    @property
    def own(self) -> Mapping[int, Any]:
        """``id`` of each user parameter. Empty while all parameters are full."""

    only_brings: bool
    """Whether inside a step a parameter can only be brought, not opened."""

    views: Views
    """Views of parameters that user code has taken."""

    @property
    def states(self) -> States:
        """The optimizer states, which have all keys from ``states.first`` on."""

    def key_of(self, p: Tensor) -> int:
        """The key of a user parameter."""

    def is_there(self, p: Tensor) -> bool:
        """Whether the engine has gathered ``p``."""

    def is_here(self, key: int) -> bool:
        """Whether this rank has all values of ``key``, so that :meth:`gather` does not communicate."""

    def gather(self, key: int) -> list[Tensor]:
        """The full tensors of ``key``, in memory that the caller owns (collective)."""

    def open(self, key: int, values: list[Tensor]) -> None:
        """Allocates full memory for the user's tensors of ``key``, and copies ``values`` into it."""

    def close(self, key: int) -> None:
        """Copies this rank's rows of the user's tensors of ``key`` to its shards; frees full memory, or leaves it to
        user code that holds it."""

    def is_held(self, key: int) -> bool:
        """Whether user code, or a graph, holds memory of the open ``key``."""

    def bring(self, p: Tensor) -> None:
        """Gathers the unit of ``p`` inside a step, until its backward is over (collective)."""

    def shard_of(self, p: Tensor) -> Tensor:
        """The tensor that has the dtype, device and shape of a parameter: its shard, if that is a ``DTensor``."""

    def address(self, p: Tensor) -> int:
        """A number that identifies a parameter during the run."""

    def name(self, key: int) -> str:
        """The name of ``key`` in errors."""

    def grad_of(self, p: Tensor) -> Tensor | None:
        """Returns ``p.grad``."""

    def assign_grad(self, p: Tensor, value: Tensor | None) -> None:
        """Does ``p.grad = value``."""

    def before_collective(self, tensors: Sequence[Any]) -> None:
        """User code is about to call a collective that writes to ``tensors``."""

    def assign_data(self, p: Tensor, value: Tensor) -> None:
        """Does ``p.data = value`` for an open or gathered parameter."""

    def backward(self, func: Any, run: Callable[[], Any]) -> Any:
        """Calls ``run``, which calls ``func``, one of :data:`BACKWARDS`."""

    def aliased(self, p: Tensor, alias: Any) -> None:
        """User code has taken ``alias``, which may share the memory of ``p``: a tensor or a tuple of them."""

    def written(self, p: Tensor) -> None:
        """The gathered ``p`` may be written to without a change of its version counter."""

    refill: Callable[[Tensor], None] | None
    """Gathers a parameter again for the backward of an operator that used it in a step, if its unit's own backward has
    not; ``None`` if parameters stay gathered until the backward is over."""


def views_of(p: Tensor, result: Any) -> list[Tensor]:
    """Returns the other tensors in ``result``, the result of a call, that share the memory of ``p``."""
    with DisableTorchFunction():
        memory = storage_key(p.untyped_storage())
        found = [] if in_transform() else [t for t in tensors_in((result,)) if t.layout == torch.strided]
        return [t for t in found if t is not p and storage_key(t.untyped_storage()) == memory]


class Views:
    """Views of full parameters that user code still holds when the parameters are closed or dropped.

    The memory is left to the views, with the values of that moment. They may be read. A view that is still held an
    optimizer step later causes a warning, because it does not follow the training. A write to one in the same step
    would be lost, so it is an error.

    Args:
        names: ``id`` of each user parameter -> its name.
        refill: Gathers a parameter in its place, in a backward; ``None`` if its memory cannot be freed before.

    Attributes:
        parameter_of: ``id`` of each view that user code has taken in this step -> its parameter.
    """

    def __init__(self, names: Mapping[int, str], refill: Callable[[Tensor], None] | None = None) -> None:
        self._names, self.refill = names, refill
        self.parameter_of: dict[int, Tensor] = {}
        # Taken since the parameter was gathered, by its id. An alias has the memory and the version of its view.
        self._with_graph: dict[int, list[weakref.ref[Tensor]]] = {}
        self._aliases: dict[int, list[tuple[weakref.ref[Tensor], Tensor]]] = {}
        self._left: list[tuple[str, StorageWeakRef, list[tuple[Any, int]]]] = []  # since the last step
        self._older: list[tuple[str, StorageWeakRef]] = []  # from the step before
        self._num_moves: Counter[Tensor | None] = Counter()
        self._has_warned = False

    def take(self, p: Tensor, result: Any, in_step: bool = False) -> None:
        """Records the views of the full ``p`` in ``result``, the result of a call that may return some."""
        for view in views_of(p, result):
            if in_step:
                self.parameter_of[id(view)] = p
            reference = weakref.ref(view, partial(self._is_gone, id(view)))
            if view.requires_grad:
                self._with_graph.setdefault(id(p), []).append(reference)
            else:
                self._aliases.setdefault(id(p), []).append((reference, view.detach()))

    def _is_gone(self, number: int, reference: Any) -> None:
        self.parameter_of.pop(number, None)

    def moved(self, p: Tensor) -> None:
        """User code has given ``p`` other memory: no view of before follows ``p``, under DDP either."""
        self._forget(p)
        self._num_moves[p] += 1
        name = self._names.get(id(p), "?")
        self._left = [each for each in self._left if each[0] != name]
        self._older = [each for each in self._older if each[0] != name]

    def _forget(self, p: Tensor) -> None:
        taken = [*self._with_graph.pop(id(p), ()), *(each for each, _ in self._aliases.pop(id(p), ()))]
        for reference in taken:
            if (view := reference()) is not None:
                self.parameter_of.pop(id(view), None)

    def leave_in_step(self, p: Tensor, memory: Callable[[], tuple[Any, int]]) -> bool:
        """As :meth:`leave`, for a ``p`` that is about to be dropped. Graphs of calls without hooks hold memory, too."""
        return (id(p) in self._with_graph or id(p) in self._aliases) and self.leave(p, *memory())

    def computing(self, params: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Context of a call with ``params`` or views of them, whose graph then gathers views again instead of holding
        their memory. Hooks that are on already, as in a recomputation, decide themselves what a graph holds."""
        if self.refill is None or not any(id(p) in self._with_graph or id(p) in self._aliases for p in params):
            return nullcontext()
        if in_transform() or not takes_saved_tensors_hooks():
            return nullcontext()
        return saved_tensors_hooks(partial(self._pack, params), self._unpack)

    def _pack(self, params: Sequence[Tensor], tensor: Tensor) -> Any:
        with DisableTorchFunction():
            kept, place = tensor.detach(), None  # they share a version counter
            if tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg()):
                memory = storage_key(tensor.untyped_storage())
                for p in params:
                    if storage_key(p.untyped_storage()) == memory:
                        place = p, self._num_moves[p], tensor.storage_offset(), tensor.size(), tensor.stride()
                        set_data(kept, kept.new_empty(0))
            return kept, version_of(kept), place

    def _unpack(self, packed: Any) -> Tensor:
        kept, version, place = packed
        p, num_moves, *where = place or (None, 0)
        if version_of(kept) != version or num_moves != self._num_moves[p]:
            raise RuntimeError(
                "a step computed with a view of a parameter, and before the backward it wrote to a tensor of that call"
                " in place, or assigned p.data: compute with view.clone()."
            )
        if p is None:
            return kept  # type: ignore[no-any-return]
        with DisableTorchFunction():
            self.refill(p)  # type: ignore[misc]
            return kept.new_empty(0).set_(p.untyped_storage(), *where)  # type: ignore[no-any-return]

    def are_held(self, p: Tensor, num_others: int) -> bool:
        """Whether user code or a graph holds memory of ``p``; ``num_others`` tensors there are not the engine's."""
        return num_others > len(self._aliases.get(id(p), ()))

    def leave(self, p: Tensor, storage: Any, num_others: int) -> bool:
        """Leaves ``storage``, the memory of ``p``, to user code that holds it; returns whether any does.

        ``num_others`` is the number of tensors in it that are not the engine's own.
        """
        if is_held := self.are_held(p, num_others):
            versions: list[tuple[Any, int]] = []
            for each in self._with_graph.get(id(p), ()):  # by weak references: a graph may be gone before the step
                if (view := each()) is not None:
                    versions.append((each, version_of(view)))
            for each, alias in self._aliases.get(id(p), ()):
                if each() is not None:  # else nobody can write to it any more
                    set_data(alias, alias.new_empty(0))  # keeps the version counter, not the memory
                    versions.append((alias, version_of(alias)))
            self._left.append((self._names.get(id(p), "?"), StorageWeakRef(storage), versions))
        self._forget(p)
        return is_held

    def settle(self) -> None:
        """Checks the memory left to views, before an optimizer steps.

        Raises:
            RuntimeError: If one was written to.
        """
        held = [name for name, memory in self._older if not memory.expired()]
        for name, _, versions in self._left:
            known = [(each() if isinstance(each, weakref.ref) else each, version) for each, version in versions]
            if any(view is not None and version_of(view) != version for view, version in known):
                raise RuntimeError(
                    f"parameter {name!r} or a view of it (.data, detach(), a slice) was written to after the hook, or"
                    " the forward of the unit, in which the view was taken. Since then the view has memory of its own:"
                    " take it again, or clone() it."
                )
        self._older = [(name, memory) for name, memory, _ in self._left]
        self._left.clear()
        if held and not self._has_warned:
            self._has_warned = True
            warn_of_views(held)


class _Open(NamedTuple):
    nbytes: int
    by_all: bool
    """Whether all ranks have opened the key."""


_WATCHED = frozenset([*BACKWARDS, *IN_PLACE_COLLECTIVES])


class Residency:
    """Opens and closes keys, and handles intercepted calls; see the file's docstring.

    Args:
        store: The engine's store.
        is_between: Whether no step is in progress.
        barrier: The barrier of the ranks; ``None`` with one rank or outside of a run.
        budget_bytes: See :func:`budget_bytes`.
    """

    def __init__(
        self,
        store: Store,
        is_between: Callable[[], bool] = lambda: True,
        barrier: Barrier | None = None,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self._store, self._is_between, self._barrier = store, is_between, barrier
        self._budget_bytes = budget_bytes
        self._open: dict[int, _Open] = {}  # in the order of opening
        self._dumps = self._is_together = False
        self._parameter_of = store.views.parameter_of
        self.mode = Mode(self)
        store.states.residency = self

    def _holder(self, key: int) -> Store | States:
        return self._store if key < self._store.states.first else self._store.states

    # -- windows -------------------------------------------------------------------------------------------------

    def end_window(self) -> None:
        """Closes all keys."""
        while self._open:
            self.close(next(iter(self._open)))

    def close(self, key: int) -> None:
        """Closes ``key``, if it is open."""
        if self._open.pop(key, None) is not None:
            with _quietly():
                self._holder(key).close(key)

    def wait_for_reads(self) -> None:
        """Waits until all ranks have finished their user code. Meanwhile this rank sends its shards to ranks that read
        (collective)."""
        if self._barrier is None or not self._is_between():
            return
        with _quietly():
            self._barrier.end(self._serve)

    def all_run(self) -> bool:
        """Whether all ranks are about to run a forward without gradients; ``False`` if some ranks have already finished
        their loop (collective)."""
        if self._barrier is None or not self._is_between():
            return True
        with _quietly():
            return self._barrier.ask(FORWARD, lambda: "a forward of validation, test or prediction", self._serve)

    @contextmanager
    def together(self, are: bool) -> Iterator[None]:
        """Context in which, with ``are``, all ranks touch the same tensors, so that gathers need no barrier."""
        before, self._is_together = self._is_together, are
        try:
            yield
        finally:
            self._is_together = before

    def _serve(self, served: int) -> None:
        if served != FORWARD:
            key = served - 1 - FORWARD
            self._holder(key).gather(key)

    @contextmanager
    def dumping(self) -> Iterator[None]:
        """Context in which ``detach()`` and ``data`` of a parameter return its shard: for a sharded ``state_dict``."""
        self._dumps = True
        try:
            yield
        finally:
            self._dumps = False

    def touch(self, tensors: Iterable[Any], brings: bool = False) -> None:
        """Opens parameters, gradients and states among ``tensors``. With ``brings``, inside a step,
        parameters stay gathered until the backward is over."""
        keys: dict[int, None] = {}
        away: list[Tensor] = []
        self._look_at(tensors, keys, away)
        self._make_there(keys, away, brings)

    def before_transform(self, values: Iterable[Any]) -> None:
        """Touches ``values``, which ``torch.func`` is about to wrap in other objects."""
        self.touch(values, brings=torch.is_grad_enabled())

    def _make_there(self, keys: dict[int, None], away: list[Tensor], brings: bool) -> None:
        if (brings or self._store.only_brings) and not self._is_between():
            for p in away:
                if not self._store.is_there(p):  # bringing the previous one may have gathered it
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

    def open_again(self, key: int) -> None:
        """Opens ``key`` with the values of now."""
        self.close(key)
        self._make_there({key: None}, [], brings=False)

    def _open_key(self, key: int) -> None:
        with _quietly():
            values, by_all = self.gather(key)
            nbytes = sum(value.nbytes for value in values)
            self._holder(key).open(key, values)
        self._open[key] = _Open(nbytes, by_all)

    def gather(self, key: int) -> tuple[list[Tensor], bool]:
        """Returns the full tensors of ``key``, and whether all ranks have requested them (collective)."""
        waits = self._barrier is not None and self._is_between() and not self._is_together
        holder = self._holder(key)
        if not waits or holder.is_here(key):
            return holder.gather(key), True
        assert self._barrier is not None
        # Numbers above FORWARD are keys, from 0 on; _serve decodes them.
        by_all = self._barrier.ask(key + 1 + FORWARD, lambda: f"a read of {holder.name(key)}", self._serve)
        return holder.gather(key), by_all

    def _make_room(self, keys: Mapping[int, None]) -> None:
        total = sum(each.nbytes for each in self._open.values())
        for key, each in list(self._open.items()):
            if total <= self._budget_bytes:
                return
            # The current call needs its keys whatever the budget, and closing held memory would free nothing.
            if key not in keys and not self._holder(key).is_held(key):
                self.close(key)
                total -= each.nbytes

    # -- calls ---------------------------------------------------------------------------------------------------

    def passes(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> bool:
        """Whether a call has nothing to do with parameters, as far as a look at its arguments' types shows."""
        if kwargs or func in _WATCHED or not _PLAIN.issuperset(map(type, args)):
            return False
        return not self._parameter_of or self._parameter_of.keys().isdisjoint(map(id, args))

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs ``func(*args, **kwargs)``, a call in user code, on open tensors."""
        # This runs for each intercepted call: the cheap exits come first, and only what is left searches arguments.
        own = self._store.own
        first = args[0] if args else None
        if func in BACKWARDS:
            with backwards_inside(self.mode):
                return self._store.backward(func, lambda: func(*args, **kwargs))
        if id(first) in own and (func in _OF_A_PARAMETER or func.__name__ == "register_post_accumulate_grad_hook"):
            return self._of_a_parameter(func, args, kwargs)
        name = func.__name__
        if name in _METADATA:
            return func(*args, **kwargs)
        if name == "_cudnn_rnn_flatten_weight":  # for speed alone, it would move parameters out of their memory
            return None
        if name == "new_tensor":  # reads the values of its arguments alone
            self.touch([*args[1:], *kwargs.values()])
            return func(self._of_layout(Tensor.new_empty, (first, 0), {}), *args[1:], **kwargs)
        if name.endswith("_like") or name in _OF_LAYOUT or func in _GETTERS_OF_LAYOUT:
            return self._of_layout(func, args, kwargs)
        if func in IN_PLACE_COLLECTIVES and own:
            self._store.before_collective(args)
        keys: dict[int, None] = {}
        away: list[Tensor] = []
        touched = self._look_at([*args, *kwargs.values()], keys, away)
        if not (touched or keys):
            return func(*args, **kwargs)
        if len(touched) > 1:  # perhaps many views of one parameter
            touched = list({id(p): p for p in touched}.values())
        if self._dumps and name == "detach" and id(first) in own:
            return self._store.shard_of(args[0]).detach()
        self._make_there(keys, away, torch.is_grad_enabled() and func not in _WITHOUT_GRAPH)
        if func is Tensor.__iter__:
            return iter(self.call(Tensor.unbind, args, kwargs))
        with self._store.views.computing(touched):
            result = func(*args, **kwargs)
        if func in _WITHOUT_VERSION:
            for p in filter(self._store.is_there, touched):
                self._store.written(p)
        if touched:
            if name not in _NEW_MEMORY:
                for p in touched:
                    self._store.aliased(p, result)
            self._computed(touched, result)
        return result

    def owns(self, p: Tensor) -> bool:
        """Whether ``p`` is one of the run's parameters, and not full in memory of its own."""
        return id(p) in self._store.own

    def call_graph(self, graph: Graph, args: tuple[Any, ...], params: Sequence[Tensor]) -> Any:
        """Calls ``graph(*args)``, one of Dynamo's graphs, which computes with ``params``."""
        given = [p for p in params if self.owns(p)]
        gradients = [value for value in args if type(value) is Resharded]
        with DisableTorchFunction():  # the mode intercepts user code; the graph's operators are not user code
            if given or gradients:
                self.touch([*given, *gradients], brings=torch.is_grad_enabled())
            result = graph(*args)
            for p in given:
                self._store.aliased(p, result)
            if given:
                self._computed(given, result)
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
                return store.assign_data(p, args[1])
        if func == _DATA.__get__:
            if self._dumps:
                return store.shard_of(p).detach()
            self.touch([p])
            if store.is_there(p):
                store.written(p)
            result = func(p)
            store.aliased(p, result)
            return result
        raise ValueError(
            f"{func.__name__} on a parameter in a run would never be called, because the gradient is complete only as"
            " a shard: use on_after_backward or on_before_optimizer_step."
        )

    def _of_layout(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a function that reads only dtype, shape and device, which shards have, too."""
        own = self._store.own
        shards: set[int] = set()  # ids of those among the arguments

        def known(value: Any) -> Any:
            if id(value) in own and not self._store.is_there(value):
                value = self._store.shard_of(value)
                shards.add(id(value))
            return value

        if func.__name__ == "data_ptr":
            return self._pointer(args[0])
        args = [known(value) for value in args]
        first = args[0] if args else None
        if func == _DEVICE.__get__:
            return mesh_device(first) if id(first) in shards and isinstance(first, DTensor) else func(*args)
        if func.__name__ in _OF_DTYPE or func in _GETTERS_OF_LAYOUT:
            return func(*args, **kwargs)
        args = [_stand_in(value) if id(value) in shards and isinstance(value, DTensor) else value for value in args]
        return func(*args, **kwargs)

    def _pointer(self, tensor: Any) -> int:
        """The address of ``tensor``. User code recognizes tied parameters by it, so two parameters must not get one
        address in turn: beyond the budget, the result is a number that identifies the parameter."""
        if id(tensor) in self._store.own and not self._store.is_there(tensor):
            nbytes = self._store.shard_of(tensor).nbytes + sum(each.nbytes for each in self._open.values())
            if nbytes > self._budget_bytes:
                return self._store.address(tensor)
        self.touch([tensor])
        return int(tensor.data_ptr())

    def _look_at(self, values: Iterable[Any], keys: dict[int, None], away: list[Tensor]) -> list[Tensor]:
        """Returns the user's parameters among ``values``, and those of views. Adds resharded ones to ``away``, and the
        keys of closed gradients and states to ``keys``."""
        own, store = self._store.own, self._store
        found: list[Tensor] = []
        for value in values:
            kind = type(value)
            if kind is Tensor:
                if id(value) in self._parameter_of:
                    found.append(self._parameter_of[id(value)])
                continue
            if id(value) in own:
                found.append(value)
                if not store.is_there(value):
                    away.append(value)
            elif kind in (list, tuple):
                found += self._look_at(value, keys, away)
            elif kind is dict:
                found += self._look_at(value.values(), keys, away)
            elif isinstance(value, Resharded):
                keys[value.key] = None
            elif isinstance(value, (list, tuple)):
                found += self._look_at(value, keys, away)
        return found

    def _computed(self, params: Sequence[Tensor], result: Any) -> None:
        """Has each operator of ``result``, a call with ``params``, gather them again, if needed, before its backward.

        A unit gathers its parameters when gradients of its output arrive. A term that a layer keeps (a router's
        auxiliary loss), features that a hook captures, and outputs in objects that are not containers of tensors start
        their backward without that, perhaps before it. A window may be over by then.
        """
        in_step = not self._is_between()
        if (in_step and self._store.refill is None) or not torch.is_grad_enabled():
            return
        nodes = {t.grad_fn for t in tensors_in((result,)) if t.grad_fn is not None}
        if nodes:
            opened = () if in_step else (self._open.get(self._store.key_of(p)) for p in params)
            alone = any(each is not None and not each.by_all for each in opened)
            before = partial(self._refill, params) if in_step else partial(self._before_node, params, alone)
            for node in nodes:
                node.register_prehook(before)

    def _refill(self, params: Sequence[Tensor], grads: Any) -> None:
        for p in params:
            self._store.refill(p)  # type: ignore[misc]

    def _before_node(self, params: Sequence[Tensor], alone: bool, grads: Any) -> None:
        """Opens ``params`` for a backward in user code; their window may be over."""
        if alone:
            raise RuntimeError(
                "backward through a parameter that not all ranks have read: gradients are averaged over all ranks, so"
                " run this computation on every rank."
            )
        self.touch(params)


@contextmanager
def showing_full() -> Iterator[None]:
    """Context in which user code reads and writes the full tensors of shards (collective)."""
    mode = _ShowingFull()
    with mode:
        yield
    mode.store(keep=0)


class _ShowingFull(TorchFunctionMode):
    """Calls torch functions with full tensors in place of shards; at most :data:`BUDGET_BYTES` of them stay."""

    def __init__(self) -> None:
        super().__init__()
        self._full: dict[int, tuple[DTensor, Tensor]] = {}  # by id of the shard, in the order of gathering

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        shards = [t for t in tensors_in((*args, *(kwargs or {}).values())) if isinstance(t, DTensor)]
        if not shards or needs_no_values(func):
            return func(*args, **(kwargs or {}))
        for shard in shards:
            found = self._full.pop(id(shard), None)
            self._full[id(shard)] = (shard, gathered(shard).clone()) if found is None else found
        self.store(keep=len(shards))
        args, kwargs = pytree.tree_map(self._full_of, (tuple(args), kwargs or {}))
        result = func(*args, **kwargs)
        return next((shard for shard in shards if result is self._full_of(shard)), result)

    def _full_of(self, value: Any) -> Any:
        return self._full[id(value)][1] if isinstance(value, DTensor) else value

    def store(self, keep: int) -> None:
        """Stores all full tensors, or as many of the oldest as exceed the budget if the latest are to be kept. One of
        which user code holds a view stays."""
        total = sum(full.nbytes for _, full in self._full.values())
        with DisableTorchFunction():
            for number, (shard, full) in list(self._full.items())[: len(self._full) - keep]:
                is_held = users_of(full.untyped_storage()) > 1
                if not keep or (total > BUDGET_BYTES and not is_held):
                    store_rows(full, shard)
                    del self._full[number]
                    total -= full.nbytes


def store_rows(full: Tensor, sharded: DTensor) -> None:
    """Copies this rank's rows of ``full`` to its shard, as :func:`store_changed` does."""
    start, length = rows_of(sharded)
    if length:
        before_host_write(sharded)
        store_changed(full.detach().narrow(0, start, length), local(sharded))


def store_changed(values: Tensor, part: Tensor) -> None:
    """Copies ``values`` into ``part``. From values in lower precision it copies only changed elements, so that the
    others keep their precision."""
    values = values.to(part.device)
    if values.dtype != part.dtype:
        values = torch.where(part.to(values.dtype) == values, part, values.to(part.dtype))
    part.copy_(values)


@contextmanager
def _quietly() -> Iterator[None]:
    """Context for the engine's own work: leaves modes and transforms of the user code that calls it."""
    leaves_inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with outside_transforms(), DisableTorchFunction(), leaves_inference, torch.no_grad():
        yield


def _stand_in(shard: DTensor) -> Tensor:
    """A one-element tensor expanded to the full shape, for functions that read only shape, dtype and device."""
    return torch.empty((), dtype=shard.dtype, device=mesh_device(shard)).expand(shard.shape)


class Resharded(Tensor):
    """Class of a gradient or optimizer state while it is closed; while it is open, it is a plain tensor."""

    key: int
    residency: Residency | None
    """``None`` after the run."""

    @staticmethod
    def close(full: Any, key: int, residency: Residency, frees: bool = True) -> None:
        """Changes the class of ``full``. With ``frees``, frees its memory unless other tensors use it."""
        with DisableTorchFunction():
            storage = full.untyped_storage()
            if frees and users_of(storage) == 1 and storage.resizable():
                storage.resize_(0)
        full.key, full.residency = key, residency
        full.__class__ = Resharded

    def open(self, value: Tensor) -> None:
        """Becomes a plain tensor with ``value``."""
        with DisableTorchFunction():
            storage = self.untyped_storage()
            if not storage.nbytes():
                storage.resize_(self.numel() * self.element_size())
            self.become_plain()
            self.copy_(value)

    def become_plain(self) -> None:
        """Becomes a plain tensor with the memory that it has, without attributes that copies would get."""
        del self.key, self.residency
        self.__class__ = Tensor  # type: ignore[assignment]

    @classmethod
    @never_a_frame
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # call_graph opens the inputs when the graph runs
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for value in tensors_in((*args, *(kwargs or {}).values())):
            if isinstance(value, Resharded):
                with DisableTorchFunctionSubclass():
                    if value.residency is None:
                        raise RuntimeError(
                            "the run of this gradient or state has ended: read it during the run, or keep a clone."
                        )
                    return value.residency.call(func, args, kwargs or {})
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class States:
    """Optimizer states between steps: tensors of full shape in ``optimizer.state``, which are opened when touched.

    All ranks must create them in the same order, because that order gives the keys. Methods with a key are those of
    :class:`Store`.

    Args:
        first: The lowest key; lower ones are the store's.
        gather: Returns the full tensor of a key and this rank's part of it (collective).
        store: Copies this rank's part out of a full tensor.
    """

    residency: Residency

    def __init__(self, first: int, gather: Callable[[int, Any], Tensor], store: Callable[[Tensor, Any], None]) -> None:
        self.first = self._next = first
        self._gather, self._store = gather, store
        self._by_key: dict[int, tuple[weakref.ref[Any], Any]] = {}  # the full tensor, and this rank's part
        self._keys: dict[int, int] = {}  # id of the full tensor -> its key

    def show(self, part: Any, like: Tensor, device: torch.device) -> Tensor:
        """Creates the tensor that user code sees for ``part``, with the shape and dtype of ``like``."""
        full: Any = torch.empty(like.shape, dtype=like.dtype, device=device)
        key, number = self._next, id(full)

        def forget(reference: Any) -> None:
            self._by_key.pop(key, None)
            self._keys.pop(number, None)

        self._next += 1
        self._by_key[key], self._keys[number] = (weakref.ref(full, forget), part), key
        Resharded.close(full, key, self.residency)
        return full  # type: ignore[no-any-return]

    def part_of(self, value: Any) -> Any:
        """The part that ``value`` shows; ``None`` for other values."""
        key = self._keys.get(id(value))
        return None if key is None else self._by_key[key][1]

    def end(self, entries: Iterable[dict[str, Any]], left: Callable[[Any, Tensor], Any]) -> None:
        """Ends the run: ``entries``, the states of each parameter, hold ``left(part, full tensor)`` from now on."""
        for entry in entries:
            for name, full in entry.items():
                if (part := self.part_of(full)) is not None:
                    entry[name] = left(part, full)
        for key in list(self._by_key):
            if (full := self._full(key)) is not None:
                full.residency = None

    def _full(self, key: int) -> Any:
        """The full tensor; ``None`` if nobody holds it any more."""
        return self._by_key[key][0]() if key in self._by_key else None

    def name(self, key: int) -> str:
        return "an optimizer's state"

    def is_here(self, key: int) -> bool:
        return False

    def gather(self, key: int) -> list[Tensor]:
        if key not in self._by_key:
            raise RuntimeError("read of an optimizer state that other ranks do not have: read it on every rank")
        return [self._gather(key, self._by_key[key][1])]

    def open(self, key: int, values: list[Tensor]) -> None:
        if (full := self._full(key)) is not None:
            full.open(values[0])

    def close(self, key: int) -> None:
        if (full := self._full(key)) is not None:
            self._store(full, self._by_key[key][1])
            Resharded.close(full, key, self.residency)

    def is_held(self, key: int) -> bool:
        full = self._full(key)
        return full is not None and users_of(full.untyped_storage()) > 1


class Mode(TorchFunctionMode):
    """Passes each torch call to ``residency``."""

    def __init__(self, residency: Residency) -> None:
        super().__init__()
        self._residency = residency

    @never_a_frame
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in AS_THEY_ARE:
            return func(*args)
        compiles = torch.compiler.is_compiling()
        if not compiles and self._residency.passes(func, args, kwargs):
            return func(*args)
        if compiles:
            return as_traced(func)(*args, **(kwargs or {}))
        before = pause_dynamo(None)
        try:
            return self._residency.call(func, args, kwargs or {})
        finally:
            pause_dynamo(before)
