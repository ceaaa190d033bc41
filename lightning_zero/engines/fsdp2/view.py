"""User code sees whole tensors: what happens when a hook or a step touches a sharded parameter.

A sharded parameter is a ``DTensor``. Its own dispatch answers ``p.norm().item()`` with *this rank's* norm, refuses
``plain + p`` and knows only part of the operators, so code written for DDP would fail or, worse, be silently wrong.
While a :class:`WholeView` is active, every torch function that meets a ``DTensor``, or one of the user's own parameters
while it is not gathered (see :mod:`.identity`),

- **reads** it whole: the shards are gathered (a collective; what not all ranks read between two steps is sent to those
  that do, see :mod:`lightning_zero.comm.reads`), differentiably where a gradient is wanted: it is averaged over the
  ranks, as DDP averages gradients;
- **writes** it back: an in-place function runs on the shards where it is element-wise, else on the gathered tensor,
  whose shards are then stored;
- **views** of it write back, too (see :mod:`.lent_views`), between steps; inside one torch raises on the attempt. Reads
  of them show what they would show under DDP, after later steps, too.

Parameters that are gathered for a step are plain tensors, and what is written to them in place counts too, because
their version tells. It does not tell of ``p.data``: whoever owns such parameters is told when that is taken, and an
assignment to it becomes a copy.

With CPU offload a shard lies in host memory while its mesh is of an accelerator. What is read then lies on the device,
where ``p.device`` says it is, and what is written waits for copies of the old values that are still under way.

What Dynamo traces passes untouched but for shards, since a look at each tensor would break its graphs: what its graphs
are given is seen to when they run (see :mod:`.graphs`).

Between steps the view is a mode and sees each call; plain tensors pass with one check per argument. Inside a step it is
asked only about calls that touch a parameter or a shard (see :mod:`.guards`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_zero.comm.shards import (
    before_host_write,
    gathered,
    is_off_mesh,
    local,
    mesh_device,
    shard_like,
    whole,
)
from lightning_zero.engines.aliases import Aliases
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.assigned import AssignedGradients, require_shape
from lightning_zero.engines.fsdp2.in_use import Write
from lightning_zero.engines.fsdp2.lent_views import LentViews
from lightning_zero.engines.graphs import end_graph
from lightning_zero.engines.reads import Reader, leaf
from lightning_zero.engines.refusals import refuse_tracing
from lightning_zero.engines.torch_functions import (
    IN_PLACE_COLLECTIVES,
    VIEW_PROPERTIES,
    VIEWS,
    by_position,
    initializes,
    is_in_place,
    needs_no_grad,
    needs_own_tensor,
    tensors_in,
    written_by_collective,
)
from lightning_zero.private.torch import (
    as_traced,
    backwards_inside,
    beside_transforms,
    in_transform,
    never_a_frame,
    pause_dynamo,
    without_transforms,
)

_METADATA = frozenset(
    "size dim ndimension numel nelement stride element_size storage_offset is_floating_point is_complex is_contiguous"
    " is_signed is_inference get_device register_hook register_post_accumulate_grad_hook retain_grad detach"
    " requires_grad_ __len__ __hash__ __repr__ __str__ __format__ is_same_size is_tensor is_storage _is_view"
    " untyped_storage storage has_names type_as_metadata backward".split()
)
_ALIASES = VIEWS | {"detach"}
_ELEMENTWISE = frozenset(
    "add_ sub_ mul_ div_ neg_ abs_ clamp_ clamp_min_ clamp_max_ clip_ zero_ fill_ copy_ lerp_ addcmul_ addcdiv_"
    " nan_to_num_ sign_ sqrt_ square_ pow_ exp_ log_ __iadd__ __isub__ __imul__ __itruediv__"
    " _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_zero_ _foreach_lerp_ _foreach_clamp_min_"
    " _foreach_clamp_max_ _foreach_copy_".split()
)
_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_SETTERS: dict[Any, str] = {getattr(Tensor, name).__set__: name for name in ("data", "grad")}
_AS_THEY_ARE = frozenset(
    getattr(Tensor, name).__get__ for name in "shape requires_grad is_leaf grad_fn ndim layout".split()
)
"""Getters of what is read most and is the same of a shard and of a whole; they take the shortest way."""
_GRAD: Any = Tensor.grad  # a descriptor
_GET_GRAD, _ASSIGN_GRAD = _GRAD.__get__, (_GRAD.__set__, _GRAD.__delete__)
_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__, Tensor.requires_grad_  # type: ignore[attr-defined]
_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
BACKWARDS = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])
_OF_A_PARAMETER = frozenset([_GET_GRAD, *_ASSIGN_GRAD, *_SET_REQUIRES_GRAD, *_DATA, *BACKWARDS, *IN_PLACE_COLLECTIVES])
"""Functions that mean something else to a gathered parameter of the user's than to a plain tensor."""
_BY_IDENTITY = frozenset("register_hook retain_grad __hash__".split())
"""Functions for which a parameter is a leaf of the graph, whether it is gathered or away."""


class WholeView(TorchFunctionMode):
    """Lets code written for whole tensors work on sharded ones; see the module's text.

    Args:
        writing: Entered while sharded tensors change, the call's, with how they do.
        on_data: Called with a gathered parameter whose ``data`` is read or assigned.
        own: ``id`` -> what is known of each of the user's parameters.
        whole: Reads a shard differentiably.
        on_use: Called with gathered parameters, with the nodes of what was computed of them, and with whether that was
            of nothing else that is trained: their backward may come while the parameters are away.
        reader: Asked before shards are gathered for a read.
        assigned: Keeps gradients that user code assigns, and is told of those that it reads.
        views: The gathered copies that user code was given.
        on_alias: Called with a gathered parameter and a view that was taken of it, or several.
    """

    def __init__(
        self,
        writing: Callable[..., AbstractContextManager[object]] = lambda shards, how: nullcontext(),
        on_data: Callable[[Tensor], None] = lambda tensor: None,
        own: Mapping[int, private.ShardedParam] | None = None,
        whole: Callable[..., Tensor] = whole,
        on_use: Callable[[Sequence[Tensor], Sequence[Node], bool], None] | None = None,
        reader: Reader | None = None,
        assigned: AssignedGradients | None = None,
        views: LentViews | None = None,
        on_alias: Callable[[Tensor, Any], None] = lambda tensor, view: None,
    ) -> None:
        super().__init__()
        self._assigned = assigned or AssignedGradients()
        self._writing, self._on_data, self._reader = writing, on_data, reader
        self._own: Mapping[int, private.ShardedParam] = {} if own is None else own
        self._whole, self._on_use = whole, on_use
        self._views = LentViews() if views is None else views
        self._on_alias = on_alias
        self._aliases = Aliases()

    @never_a_frame
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _AS_THEY_ARE:
            return func(*args)
        if torch.compiler.is_compiling():
            if _any_sharded(args):
                end_graph()  # and what is asked for is asked again, outside
            return as_traced(func)(*args, **(kwargs or {}))
        before = pause_dynamo(None)
        try:
            return self._translated(func, args, kwargs or {})
        finally:
            pause_dynamo(before)

    def _translated(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func == _GET_GRAD:
            known = self._own.get(id(args[0]))
            grad = func(*args) if known is None else self._assigned.grad_of(known)
            if grad is not None and (known is not None or isinstance(args[0], DTensor)):
                self._assigned.noticed(args[0] if known is None else known.sharded_param, grad)
            return grad
        if func in BACKWARDS:
            with backwards_inside(self):
                return func(*args, **kwargs)
        if args and (known := self._own.get(id(args[0]))) is not None:
            if func in _SET_REQUIRES_GRAD:
                func(known.sharded_param, *args[1:], **kwargs)
                return func(*args, **kwargs)
            if func in _ASSIGN_GRAD:
                value = args[1] if len(args) == 2 else None
                if value is not None:
                    self._assigned.noticed(known.sharded_param, value)
                self._assigned.assign(known, value)
                return None
            if func in _DATA and not private.is_away(known):
                self._on_data(args[0])
                if len(args) == 2:
                    self._aliases.assign(known.sharded_param, args[1], lambda: _copy_into(*args))
                    return None
                alias = self._aliases.taken(known.sharded_param, func(*args), counted=False)
                self._on_alias(args[0], alias)
                return alias
        if func in IN_PLACE_COLLECTIVES:  # which no version counter counts
            for p in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if (known := self._own.get(id(p))) is not None and not private.is_away(known):
                    self._on_data(p)
        if self._views:
            targets, others, named = by_position(args, kwargs)
            writes = is_in_place(func.__name__) or func in IN_PLACE_COLLECTIVES
            if (writes and self._views.owns(targets)) or self._views.owns(kwargs.get("out")):
                return self._write_to_view(func, targets, others, named)
            for p in self._views.gathered_behind([*(targets if writes else ()), kwargs.get("out")]):
                self._on_data(p)  # the view may have been taken in an earlier step
            if self._views.owns(written_by_collective(func, args, kwargs)):
                raise needs_own_tensor(func.__name__)
            for view in self._views.outdated((*args, *kwargs.values())):
                self._update(view)
        if not self._concerns(args) and not (kwargs and self._concerns(kwargs.values())):
            result = func(*args, **kwargs)
            self.notice(func, args, kwargs, result)
            return result
        if func.__name__ in _BY_IDENTITY and not _any_sharded(args):
            return func(*args, **kwargs)
        away = args
        args, kwargs = self._shards(args), dict(zip(kwargs, self._shards(kwargs.values()), strict=True))
        result = self._on_shards(func, args, kwargs)
        return away[0] if away and args and result is args[0] else result

    def whole_argument(self, value: Any) -> Any:
        """The argument for ``torch.func`` to transform in the place of ``value``; to be called where user code is."""
        if isinstance(value, Tensor) and self._concerns((value,)):
            return value.clone()
        return value

    def passes(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether this is a call of plain tensors and gathered parameters, which the view would let through: most are.
        It leaves :meth:`notice` to the caller."""
        if func in _OF_A_PARAMETER:
            return False
        own = self._own
        for value in args:
            if type(value) is Tensor:
                continue
            known = own.get(id(value))
            if known is None:
                if isinstance(value, (DTensor, list, tuple)):
                    return False
            elif private.is_away(known):
                return False
        return True

    def _concerns(self, values: Iterable[Any]) -> bool:
        """Whether one of ``values``, or of a list among them, is a shard or a parameter that is away."""
        own = self._own
        for value in values:
            if type(value) is Tensor:
                continue
            if isinstance(value, DTensor):
                return True
            if isinstance(value, (list, tuple)):
                if any(isinstance(v, DTensor) or (id(v) in own and private.is_away(own[id(v)])) for v in value):
                    return True
            elif id(value) in own and private.is_away(own[id(value)]):
                return True
        return False

    def notice(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Any, result: Any) -> None:
        """``result`` was computed of ``args`` and ``kwargs``."""
        name = func.__name__
        may_share = name in _ALIASES or (name == "__get__" and func in VIEW_PROPERTIES)
        if may_share and args and id(args[0]) in self._own:
            self._on_alias(args[0], result)
        if self._on_use is not None and torch.is_grad_enabled():
            given = list(tensors_in((*args, *kwargs.values()) if kwargs else args))
            used = [p for p in given if id(p) in self._own]
            if self._views:
                used += self._views.originals(given)
            if used and (nodes := [t.grad_fn for t in tensors_in((result,)) if t.grad_fn is not None]):
                first = args[0] if args else None
                is_alone = id(first) in self._own or not (isinstance(first, Tensor) and first.requires_grad)
                self._on_use(used, nodes, is_alone)

    def _shards(self, values: Iterable[Any]) -> list[Any]:
        """``values`` with shards in the place of parameters that are away."""
        own = self._own

        def one(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(map(one, value))
            known = own.get(id(value))
            return known.sharded_param if known is not None and private.is_away(known) else value

        return [one(value) for value in values]

    def _on_shards(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        refuse_tracing()
        name = func.__name__
        if func in _SETTERS:
            assign = partial(_assign, _SETTERS[func], *args)
            if _SETTERS[func] == "grad":
                return assign()
            with self._changing(args[:1], Write.OTHER_MEMORY):
                self._aliases.assign(args[0], args[1], assign)
            return None
        if name == "__get__":
            if func == _DEVICE:
                return mesh_device(args[0])
            if func in _DATA:
                with beside_transforms():
                    return self._aliases.taken(args[0], func(*args), counted=False)
            return func(*args) if func not in VIEW_PROPERTIES else func(self._read(args, is_view=True)(args[0]))
        if name in ("register_hook", "register_post_accumulate_grad_hook") and args[0].is_leaf:
            raise ValueError(
                f"{name} on a sharded parameter would never be called: its gradient is made on the gathered parameter."
                " Call register_hook before the run, in __init__ or configure_model, or use on_after_backward."
            )
        if name == "detach":
            # inside inference mode, a shard has no version to pass on
            with beside_transforms(), torch.inference_mode(False), torch.no_grad():
                return self._aliases.taken(args[0], func(*args))
        if name == "data_ptr":  # by which code counts tied parameters once
            origin = self._aliases.origin(args[0])
            return local(origin).data_ptr() or id(origin)
        if name in _METADATA or name in ("__set__", "__delete__"):
            return func(*args, **kwargs)
        if name == "__deepcopy__":
            return self._deep_copy(*args)
        if func in IN_PLACE_COLLECTIVES:
            with self._changing(args[:1], Write.THROUGH_DATA):
                return self._collect(func, args, kwargs)
        if _any_sharded([written_by_collective(func, args, kwargs)]):
            raise needs_own_tensor(name)
        if is_in_place(name):
            targets, others, named = by_position(args, kwargs)
            if _any_sharded(targets):
                with self._changing(targets):
                    return _write(func, name, [*targets, *others], named)
        if _any_sharded([kwargs.get("out")]):
            with self._changing([kwargs["out"]]):
                return _write_out(func, name, args, kwargs)
        if name.endswith("_like"):
            return func(*_map(_stand_in, args), **kwargs)
        if name in ("view_as", "expand_as") and args[0] is args[1]:
            # how torch finds a leaf's node in the graph (register_multi_grad_hook): a view adds one of its own
            return self._read(args[:1], is_view=False, as_leaf=True)(args[0])
        read = self._read([*args, *kwargs.values()], name in VIEWS)
        result = func(*_map(read, args), **{key: _map(read, [value])[0] for key, value in kwargs.items()})
        if isinstance(result, np.ndarray):
            result.flags.writeable = False  # what is written to its memory would be lost
        return result

    @torch.no_grad()
    def _collect(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A collective of user code that writes to its first argument."""
        self._assigned.require_whole(list(_shards_in(args[:1])))
        read, wholes = self._read(args[:1], is_view=False), {}
        for shard in _shards_in(args[:1]):
            wholes[shard] = read(shard)
        work = func(*_map(wholes.__getitem__, args), **kwargs)
        if hasattr(work, "wait"):  # with async_op: what comes is stored now
            work.wait()
        for shard, value in wholes.items():
            before_host_write(shard)
            local(shard).copy_(local(shard_like(value, shard)))
        return work

    def _changing(self, values: Iterable[Any], how: Write | None = None) -> AbstractContextManager[object]:
        shards = list(_shards_in(values))
        if how is None:
            how = Write.COUNTED if all(map(self._aliases.counted, shards)) else Write.THROUGH_DATA
        return self._writing(map(self._aliases.origin, shards), how)

    def _read(self, values: Iterable[Any], is_view: bool, as_leaf: bool = False) -> Callable[[DTensor], Tensor]:
        """A function that reads the shards among ``values``; ``is_view``: its result shares their memory; ``as_leaf``:
        it follows in the graph upon the user's parameter, between steps, too."""
        with beside_transforms():
            read = self._reading(values, is_view, as_leaf)
        return without_transforms()(read) if in_transform() else read

    def _reading(self, values: Iterable[Any], is_view: bool, as_leaf: bool) -> Callable[[DTensor], Tensor]:
        alone = {} if self._reader is None else self._reader.alone(list(_shards_in(values)), self._aliases.origin)
        if not alone:
            return (
                self._read_only
                if is_view
                else partial(self._whole, as_leaf=True)
                if as_leaf and self._own
                else self._whole
            )

        def one(tensor: DTensor) -> Tensor:
            value = alone[id(tensor)]
            if torch.is_grad_enabled() and tensor.requires_grad:
                return leaf(value)
            if not is_view:
                return value
            with torch.inference_mode():  # read-only: what this rank alone writes to it would be lost
                return value.clone()

        return one

    def _deep_copy(self, tensor: Any, memo: dict[int, Any]) -> Tensor:
        """A whole one. In ``memo`` under the name of what was copied: a gathered temporary's passes on to the next."""
        if id(tensor) not in memo:
            with torch.no_grad():
                copied = self._read([tensor], is_view=False)(tensor).detach().clone()
                if (grad := self._assigned.whole(tensor)) is not None:
                    grad = grad.detach().clone()
                elif tensor.grad is not None:
                    grad = self._read([tensor.grad], is_view=False)(tensor.grad)
            copied.requires_grad_(tensor.requires_grad).grad = grad
            memo[id(tensor)] = copied
        return memo[id(tensor)]

    def _read_only(self, tensor: DTensor) -> Tensor:
        differentiable = torch.is_grad_enabled() and tensor.requires_grad
        lent = self._whole(tensor) if differentiable else gathered(tensor).clone()
        self._views.record(lent, tensor, origin=self._aliases.origin(tensor))
        return lent

    def _write_to_view(
        self, func: Callable[..., Any], targets: Sequence[Any], others: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        name = func.__name__
        is_collective = func in IN_PLACE_COLLECTIVES
        if not isinstance(targets[0], Tensor) or not (is_in_place(name) or is_collective):
            how = "a list of" if is_in_place(name) else "out="
            raise RuntimeError(
                f"torch.{name} writes to {how} views of sharded parameters or values of state_dict(), which would be"
                " lost: write to one at a time by its own method (value.mul_(...), value.copy_(...)), or to parameters."
            )
        if torch.is_grad_enabled() and targets[0].requires_grad and not initializes(func) and not is_collective:
            raise needs_no_grad(name)
        refuse_tracing()
        owner, original = self._views.owner(targets[0])
        known = self._own.get(id(original)) if original is not None else None
        is_gathered = known is not None and not private.is_away(known)
        with nullcontext() if is_gathered else self._writing([owner], Write.COUNTED):
            with torch.no_grad():
                others = _map(gathered, self._shards(others))
                values = dict(zip(kwargs, _map(gathered, self._shards(kwargs.values())), strict=True))
            return self._views.write(func, targets[0], others, values, original if is_gathered else None)

    def _update(self, view: Tensor) -> None:
        """Before a read of a view that was lent before shards changed: under DDP it would have changed with them."""
        owner, original = self._views.owner(view)
        known = self._own.get(id(original)) if original is not None else None
        with torch.no_grad():
            is_gathered = known is not None and not private.is_away(known)
            now = original if is_gathered and original is not None else self._read([owner], is_view=False)(owner)
            self._views.update(view, now)

    @property
    def watches_plain_tensors(self) -> bool:
        """Whether a call may matter in which there is neither a parameter nor a shard."""
        return self._views.are_held


def _any_sharded(values: Any) -> bool:
    for value in values:
        if isinstance(value, DTensor):
            return True
        if isinstance(value, (list, tuple)) and any(isinstance(v, DTensor) for v in value):
            return True
    return False


def _shards_in(values: Iterable[Any]) -> Iterator[DTensor]:
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _shards_in(value)


def _map(fn: Callable[[DTensor], Tensor], values: Sequence[Any]) -> list[Any]:
    def one(value: Any) -> Any:
        if isinstance(value, DTensor):
            return fn(value)
        if type(value) in (list, tuple) and _any_sharded(value):
            return type(value)(one(v) for v in value)
        return value

    return [one(v) for v in values]


def _stand_in(tensor: Tensor) -> Tensor:
    """Enough of a whole tensor for functions that read only its shape, dtype and device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh_device(tensor))


@torch.no_grad()
def _copy_into(target: Tensor, value: Tensor) -> None:
    """``p.data = x`` for a gathered ``p``, whose memory is the engine's."""
    require_shape("data", target, value)
    target.copy_(gathered(value))  # counted: a backward that needs the values of before raises


def _assign(attribute: str, target: Tensor, value: Tensor | None) -> None:
    """``p.data = x`` and ``p.grad = x``, where either may be sharded."""
    if isinstance(target, DTensor) and value is not None and not isinstance(value, DTensor):
        require_shape(attribute, target, value)
        value = shard_like(value, target)
    elif not isinstance(target, DTensor) and isinstance(value, DTensor):
        value = gathered(value)
    if attribute == "data" and isinstance(target, DTensor):
        assert isinstance(value, DTensor)
        before_host_write(target)
        with torch.no_grad():  # into the engine's own buffer: it gathers from there, and looks at its version
            local(target).copy_(local(value))
    else:
        setattr(target, attribute, value)


def _write(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    targets = list(target) if isinstance(target, (list, tuple)) else [target]
    if torch.is_grad_enabled() and not initializes(func) and any(t.requires_grad and t.is_leaf for t in targets):
        raise needs_no_grad(name)
    before_host_write(targets[0])
    with torch.no_grad():
        on_shards = name in _ELEMENTWISE and _fits_shards(targets, args[1:], kwargs)
        if on_shards:
            like = targets[0]
            func(*_to_local(args, like), **{key: _to_local([value], like)[0] for key, value in kwargs.items()})
        else:
            gathered = [whole(t) if isinstance(t, DTensor) else t for t in targets]
            first = type(target)(gathered) if isinstance(target, (list, tuple)) else gathered[0]
            func(first, *_map(whole, args[1:]), **{key: _map(whole, [value])[0] for key, value in kwargs.items()})
            for t, new in zip(targets, gathered, strict=True):
                if isinstance(t, DTensor):
                    local(t).copy_(local(shard_like(new, t)))
    return target


def _write_out(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func(..., out=p)``, as ``nn.init.eye_`` does; ``out`` may be several."""
    out = kwargs["out"]
    targets = list(out) if isinstance(out, (list, tuple)) else [out]
    if torch.is_grad_enabled() and any(t.requires_grad for t in targets):
        raise needs_no_grad(name)
    with torch.no_grad():
        kwargs = {key: _map(whole, [value])[0] for key, value in kwargs.items()}
        func(*_map(whole, args), **kwargs)
        values = list(kwargs["out"]) if isinstance(out, (list, tuple)) else [kwargs["out"]]
        for t, new in zip(targets, values, strict=True):
            if isinstance(t, DTensor):
                require_shape("out", t, new)
                before_host_write(t)
                local(t).copy_(local(shard_like(new, t)))
    return out


def _fits_shards(targets: list[Tensor], others: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an element-wise function can run shard by shard: the other tensors are scalars or laid out alike."""
    shapes = {t.shape for t in targets}

    def fits(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return len(value) == len(targets) and all(
                not isinstance(v, Tensor)
                or v.dim() == 0
                or (isinstance(v, DTensor) and isinstance(t, DTensor) and v.placements == t.placements)
                for v, t in zip(value, targets, strict=True)
            )
        if isinstance(value, DTensor):
            return len(targets) == 1 and value.shape in shapes and value.placements == targets[0].placements  # type: ignore[attr-defined]
        return not isinstance(value, Tensor) or value.dim() == 0 or (len(targets) == 1 and value.shape in shapes)

    return all(map(fits, others)) and all(map(fits, kwargs.values()))


def _to_local(values: Sequence[Any], like: Tensor) -> list[Any]:
    def one(value: Any) -> Any:
        if isinstance(value, DTensor):
            return local(value)
        if isinstance(value, (list, tuple)):
            return type(value)(beside(v) if isinstance(v, Tensor) else v for v in value)
        if isinstance(value, Tensor) and value.dim() > 0 and isinstance(like, DTensor):
            return local(shard_like(value, like, value.dtype))
        return beside(value) if isinstance(value, Tensor) else value

    def beside(value: Tensor) -> Tensor:
        value = local(value)  # a scalar made on the device, where the shards are not
        return value.to(local(like).device) if is_off_mesh(like) and not value.dim() else value

    return [one(v) for v in values]
