"""User code's view of parameters that DeepSpeed holds.

Hooks see whole tensors, as under DDP (and as :mod:`lightning_zero.engines.fsdp2.view` does it for ``fully_shard``):

- ``p.grad`` is the averaged gradient, put together when it is read; writes to it count in the step.
- A stage-3 parameter is gathered when something reads it, on one rank alone, too (:mod:`lightning_zero.comm.meeting`);
  inside a step it stays for the step and its backward.
- Writes to a parameter, or to ``p.data`` and views of it, reach the module and the master. What user code has held of a
  stage-3 parameter since before a change (``state_dict()``, a view) is brought up to date when it is used.

Plain tensors pass with one check per argument.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.engines.aliases import Aliases
from lightning_zero.engines.refusals import refuse_gradients_in_backward, refuse_tracing, refuse_transforms
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
from lightning_zero.private.torch import GETTERS, as_traced, base_of, never_a_frame, pause_dynamo, storage_key

# slot wrappers are made anew at each access: compared by value
_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
_GRAD_GET, _GRAD_SET, _GRAD_DELETE = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__
_OF_GRADIENTS = (_GRAD_GET, _GRAD_SET, _GRAD_DELETE)
_GRAD_IN_HOOK = (
    "torch.autograd.grad of parameters outside of training_step: at stage 3 DeepSpeed has let go of them after the"
    " forward. Do it in training_step, or use stage=2 or engine='fsdp2'."
)
_HOOK_ON_ACCUMULATOR = (
    "a hook on the node in which autograd adds up a parameter's gradient (p.expand_as(p).grad_fn,"
    " torch.autograd.graph.register_multi_grad_hook): at stage 3 DeepSpeed makes that node anew for each step. Use"
    " p.register_hook before the run, on_after_backward, or stage=2 or engine='fsdp2'."
)
_DATA_GET, _DATA_SET = _DATA.__get__, _DATA.__set__
TRANSFORMS = "stage 3 of engine='deepspeed'", "stage=2, engine='fsdp2'"
"""The settings whose hooks have no rules for transforms of ``torch.func``, and those to use instead."""
_AS_THEY_ARE = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "dtype",
        "device",
        "layout",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_mkldnn",
        "name",
        "names",
        "output_nr",
        "retains_grad",
        "is_mps",
        "is_xpu",
        "is_cpu",
        "itemsize",
    )
    if hasattr(getattr(Tensor, name, None), "__get__")
).union(GETTERS)
_METADATA = frozenset(
    "requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad is_floating_point is_complex"
    " is_signed element_size is_inference __hash__ get_device is_tensor has_names __delete__".split()
)
_SHAPES = frozenset("size dim ndimension numel nelement stride __len__ is_contiguous is_same_size".split())
_SHAPE_GETTERS = frozenset(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "nbytes"))


class Holder(Protocol):
    """The engine's side of the view."""

    def holds(self, p: Any) -> bool: ...
    def is_away(self, p: Any) -> bool: ...
    def in_step(self) -> bool: ...
    def busy(self) -> bool: ...
    def is_lost_soon(self, p: Any) -> bool: ...
    def num_changes(self) -> int: ...
    def in_users_backward(self) -> bool: ...
    def fetch(self, p: Any) -> None: ...
    def keep_all(self) -> None: ...
    def whole(self, p: Any) -> Tensor: ...
    def shape_of(self, p: Any) -> torch.Size: ...
    def written(self, p: Any, value: Tensor | None) -> None: ...
    def see_grad(self, p: Any) -> Tensor | None: ...
    def set_grad(self, p: Any, value: Tensor | None) -> None: ...
    def user_backward(self, run: Callable[[], None]) -> None: ...


class Lent:
    """The whole tensors, and views of parameters, that user code was given in a parameter's stead, weakly; each with
    the parameter, with the number of changes that it shows, and with the element at which a view begins."""

    def __init__(self) -> None:
        self._lent: Any = WeakIdKeyDictionary()
        self._starts: Any = WeakIdKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._lent)

    def record(self, given: Tensor, p: Any, num_changes: int) -> None:
        """``given`` shows ``p``."""
        self._lent[given] = p, num_changes

    def record_view(self, view: Tensor, whole: Tensor, p: Any, num_changes: int) -> None:
        """``view`` was computed of ``whole``, which is ``p``, or stands for it or a part of it; does nothing if it is a
        copy."""
        try:
            memories = {storage_key(each.untyped_storage()) for each in (view, whole)}
        except RuntimeError:  # no memory of its own: inside a transform of torch.func
            return
        if view is not whole and len(memories) == 1:
            self._starts[view] = view.storage_offset() - whole.storage_offset() + self._starts.get(whole, 0)
            self.record(view, p, num_changes)

    def part_of(self, given: Tensor, value: Tensor) -> Tensor:
        """The part of ``value``, whole and contiguous, that ``given`` is."""
        if given not in self._starts or (given.is_contiguous() and given.numel() == value.numel()):
            return value.view(given.shape)
        return value.as_strided(given.shape, given.stride(), value.storage_offset() + self._starts[given])

    def forget(self, given: Tensor) -> None:
        """``given`` is no parameter's any more."""
        self._lent.pop(given, None)

    def owner(self, given: Tensor) -> Any:
        """The parameter that ``given`` shows, or ``None``."""
        return self._lent.get(given, (None,))[0]

    def outdated(self, values: Sequence[Any], num_changes: int) -> Iterator[tuple[Tensor, Any]]:
        """Those that ``values`` are or are views of, and their parameters, if they show fewer changes."""
        for value in tensors_in(values):
            for given in (base_of(value), value):
                p, shown = (None, 0) if given is None else self._lent.get(given, (None, 0))
                if p is not None and shown != num_changes:
                    yield given, p  # type: ignore[misc]

    def stepped(self, params: Container[Tensor]) -> None:
        """An optimizer has changed ``params``: graphs that saved what shows them must not go backward any more."""
        increment_version([given for given, (p, _) in self._lent.items() if p in params and not given.is_inference()])

    def end(self, values: Mapping[Tensor, Tensor]) -> None:
        """The run is over: what is held shows the ``values`` of its parameter a last time."""
        for given, (p, _) in self._lent.items():
            if (value := values.get(p)) is not None:
                _show(given, self.part_of(given, value.contiguous()))


class ShardView(TorchFunctionMode):
    """See the module's text.

    Args:
        holder: Of the parameters.
        lent: The tensors that user code was given.
    """

    def __init__(self, holder: Holder, lent: Lent | None = None) -> None:
        super().__init__()
        self.holder = holder
        self._lent = Lent() if lent is None else lent
        self._aliases = Aliases()

    @never_a_frame
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():  # what graphs are given is seen to when they run (see compiled)
            return as_traced(func)(*args, **(kwargs or {}))
        before = pause_dynamo(None)
        try:
            return self._translated(func, args, kwargs or {})
        finally:
            pause_dynamo(before)

    def _translated(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        holder, name = self.holder, func.__name__
        if name == "backward" and func == Tensor.backward and not holder.busy():
            return holder.user_backward(lambda: func(*args, **kwargs))
        if self._lent and not holder.busy():
            for given, p in self._lent.outdated((*args, *kwargs.values()), holder.num_changes()):
                self._update(given, p)
        held = self._held(args) if args else []
        if kwargs:
            held += self._held(tuple(kwargs.values()))
        if func == torch.autograd.grad and not holder.busy():
            if holder.in_step():
                holder.keep_all()
            elif any(map(holder.is_away, held)):
                raise ValueError(_GRAD_IN_HOOK)
        if held:
            return self._on_parameters(func, name, args, kwargs, held)
        result = func(*args, **kwargs)
        if func in IN_PLACE_COLLECTIVES:
            increment_version(list(tensors_in(args[:1])))  # which they leave as it is
        if not holder.busy():
            if self._lent and _takes_views(func, name):
                self._record_parts(args, result)
            if is_in_place(name) or func in IN_PLACE_COLLECTIVES:
                self._notice(args or tuple(kwargs.values())[:1])
            elif "out" in kwargs:
                self._notice((kwargs["out"],))
        return result

    def _held(self, values: Sequence[Any]) -> list[Any]:
        found = []
        for value in values:
            if isinstance(value, nn.Parameter):
                if self.holder.holds(value):
                    found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [v for v in value if isinstance(v, nn.Parameter) and self.holder.holds(v)]
        return found

    def _on_parameters(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], held: list[Any]
    ) -> Any:
        holder = self.holder
        if func in _OF_GRADIENTS and holder.in_users_backward():
            refuse_gradients_in_backward()
        if holder.busy():
            return func(*args, **kwargs)
        if func == _GRAD_GET:
            own = func(*args)
            return own if own is not None else holder.see_grad(args[0])
        if func in (_GRAD_SET, _GRAD_DELETE):
            return holder.set_grad(args[0], args[1] if func == _GRAD_SET else None)
        if func in _AS_THEY_ARE or name in _METADATA:
            return func(*args, **kwargs)
        if func == _DATA_SET:
            return self._assign(*args)
        away = [p for p in held if holder.is_away(p)]
        if away:
            refuse_tracing()
            refuse_transforms(*TRANSFORMS)
            if name in ("view_as", "expand_as") and args[0] is args[1]:
                raise ValueError(_HOOK_ON_ACCUMULATOR)
        if name in _SHAPES or func in _SHAPE_GETTERS:
            return func(
                *_instead(args, {id(p): torch.empty(holder.shape_of(p), device="meta") for p in away}), **kwargs
            )
        if is_in_place(name):
            return self._write(func, name, args, kwargs)
        if func in IN_PLACE_COLLECTIVES:
            return self._run_and_store(func, args, kwargs, self._held(args[:1]))
        if self._held((written_by_collective(func, args, kwargs),)):
            raise needs_own_tensor(name)
        if into := self._held((kwargs.get("out"),)):  # as nn.init.eye_ does
            if torch.is_grad_enabled() and any(p.requires_grad for p in into):
                raise needs_no_grad(name)
            return self._run_and_store(func, args, kwargs, into)
        if holder.in_step():
            for p in held:
                if holder.is_lost_soon(p):
                    holder.fetch(p)
            away = []
        wholes: dict[int, Tensor] = {}
        if not away:
            result = func(*args, **kwargs)
        else:
            wholes = {id(p): self._lend(p) for p in {id(p): p for p in away}.values()}
            result = func(*_instead(args, wholes), **{k: _instead([v], wholes)[0] for k, v in kwargs.items()})
        if "out" in kwargs:
            self._notice((kwargs["out"],))
        if _takes_views(func, name):
            source = wholes.get(id(held[0]), held[0])
            for view in tensors_in((result,)):
                self._lent.record_view(view, source, held[0], holder.num_changes())
            if func == _DATA_GET or name == "detach":
                self._aliases.taken(held[0], result)
        return result

    def _record_parts(self, args: Sequence[Any], result: Any) -> None:
        """``result`` may be parts of a view of a parameter, of which torch knows the parameter alone."""
        if args and isinstance(args[0], Tensor) and (p := self._lent.owner(args[0])) is not None:
            for view in tensors_in((result,)):
                self._lent.record_view(view, args[0], p, self.holder.num_changes())

    def _lend(self, p: Any) -> Tensor:
        whole = self.holder.whole(p)
        self._lent.record(whole, p, self.holder.num_changes())
        return whole

    @torch.no_grad()
    def _update(self, given: Tensor, p: Any) -> None:
        """Before a use of what was ``given`` for ``p`` before shards changed: under DDP it would have changed, too."""
        value = self.holder.whole(p) if self.holder.is_away(p) else p.data
        value = self._lent.part_of(given, value.contiguous())
        if value.data_ptr() != given.data_ptr():
            # Uncounted: it may have the version counter of ``p``, which the graph of the step has saved
            _show(given.data, value)
        self._lent.record(given, p, self.holder.num_changes())

    def _assign(self, p: Any, value: Tensor) -> None:
        """``p.data = value``."""
        shape = self.holder.shape_of(p)
        if value.shape != shape:
            raise ValueError(
                f"assigning a tensor of shape {tuple(value.shape)} to .data of a parameter of shape {tuple(shape)}:"
                " shapes must agree during a run; change the module before the run starts."
            )
        for alias in self._aliases.assign(p, value, lambda: self.holder.written(p, value)):
            self._lent.forget(alias)

    def _write(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        first, others, kwargs = by_position(args, kwargs)
        args = [*first, *others]
        targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        mine = [t for t in targets if isinstance(t, nn.Parameter) and self.holder.holds(t)]
        if torch.is_grad_enabled() and not initializes(func) and any(t.requires_grad and t.is_leaf for t in mine):
            raise needs_no_grad(name)
        self._run_and_store(func, args, kwargs, mine)
        if not mine:
            self._notice(args)
        return args[0]

    def _run_and_store(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[Any]
    ) -> Any:
        """Calls ``func`` with whole parameters; it writes to those that are ``written``."""
        held = {id(p): p for p in [*self._held(args), *self._held(tuple(kwargs.values()))]}
        wholes = {key: self.holder.whole(p) for key, p in held.items() if self.holder.is_away(p)}
        with torch.no_grad() if func in IN_PLACE_COLLECTIVES else nullcontext():
            result = func(*_instead(args, wholes), **{k: _instead([v], wholes)[0] for k, v in kwargs.items()})
        if hasattr(result, "wait"):  # of a collective with async_op: what comes is stored now
            result.wait()
        for p in written:
            self.holder.written(p, wholes.get(id(p)))
        return kwargs.get("out", result)

    def _notice(self, args: Sequence[Any]) -> None:
        """Something was written to in place: perhaps to what stands for a parameter, or to a view of it."""
        targets = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
        for target in targets:
            if isinstance(target, Tensor):
                base = base_of(target)
                base = target if base is None else base
                if isinstance(base, nn.Parameter) and self.holder.holds(base):
                    self._written_through(target, base)
                    continue
                if not self._lent:
                    continue
                p = self._lent.owner(base)
                if p is None:
                    p = self._lent.owner(target)
                if p is not None:
                    self.holder.written(p, base if base.shape == self.holder.shape_of(p) else None)

    @torch.no_grad()
    def _written_through(self, view: Tensor, p: Any) -> None:
        if not self.holder.is_away(p):
            self.holder.written(p, None)
            return
        if self._lent.owner(view) is not p:
            raise RuntimeError(
                "something was written to a part of a view of a parameter, which has been dropped since the view was"
                " taken: write to the parameter, or to the view itself."
            )
        whole = self.holder.whole(p).contiguous()
        self._lent.part_of(view, whole).copy_(view)
        self.holder.written(p, whole)


def _takes_views(func: Callable[..., Any], name: str) -> bool:
    return func == _DATA_GET or name in VIEWS or name == "detach" or func in VIEW_PROPERTIES


def _show(given: Tensor, value: Tensor) -> None:
    with torch.inference_mode() if given.is_inference() else nullcontext():
        given.detach().copy_(value)


def _instead(values: Sequence[Any], wholes: dict[int, Tensor]) -> list[Any]:
    def one(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(wholes.get(id(v), v) for v in value)
        return wholes.get(id(value), value)

    return [one(value) for value in values]
