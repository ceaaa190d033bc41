"""Inside a step the view costs nothing but where a call touches a parameter or a shard.

A ``TorchFunctionMode`` takes a microsecond of each torch call, whatever it does. So for the length of a forward or a
backward the view's mode is off, and torch itself finds out which calls concern it: the user's parameters are instances
of a *guarded class*, a subclass of their own of the same name whose ``__torch_function__`` asks the view, and so does
that of ``DTensor``. Between steps, where calls are few and types are asked for, parameters have their own class and the
mode is on. So it is from when user code has been given a copy of a parameter that it may write to.

Where anything is compiled the mode stays on: Dynamo looks at the classes of parameters, and knows a plain one best. A
function that is compiled in the middle of a step is traced through the guarded class, and once more in the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.engines.fsdp2.view import BACKWARDS, WholeView
from lightning_zero.engines.refusals import refuse_tracing
from lightning_zero.private.torch import (
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    has_compiled,
    in_backward,
    never_a_frame,
    pause_dynamo,
    put_below,
    set_torch_function,
    torch_function_of,
    without_modes,
)


class Guards:
    """Has ``view`` asked by class instead of by a mode.

    Args:
        view: Not on the stack of modes.
        parameters: The user's own.
    """

    def __init__(self, view: WholeView, parameters: Iterable[Tensor]) -> None:
        self._view = view
        self._parameters = list(parameters)
        self._guarded = {kind: _guarded(kind, self._ask) for kind in {type(p) for p in self._parameters}}
        self._plain = {guarded: kind for kind, guarded in self._guarded.items()}
        # functions of torch that are written in Python name plain tensors, too
        self._ours = frozenset([*self._plain, *self._guarded, DTensor, Tensor])
        # A class that translates calls itself must go on to do so
        self._possible = all(torch_function_of(kind) is disabled_torch_function for kind in self._guarded)
        self._on = self._has_mode = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def instead_of_mode(self) -> Iterator[None]:
        """For the length of a step."""
        is_needed = self._has_mode or self._view.watches_plain_tensors
        if self._on or is_needed or not self._possible or has_compiled():
            yield
            return
        with without_modes(WholeView):
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
            put_below(self._view)
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
        ours = self._ours.issuperset(types)
        if ours and self._view.passes(func, (*args, *kwargs.values()) if kwargs else args):
            with DisableTorchFunctionSubclass():
                try:
                    result = func(*args, **(kwargs or {}))
                except TypeError:  # of make_fx, which knows plain parameters only
                    refuse_tracing()
                    raise
                self._view.notice(func, args, kwargs, result)
            return result
        if func in BACKWARDS:  # user code runs inside
            with self._lifted(self._parameters):
                return self._view.__torch_function__(func, types, args, kwargs)
        if not ours:  # another class of tensor that translates calls has its say, too
            with self._lifted(_each((args, kwargs))):
                return self._view.__torch_function__(func, types, args, kwargs)
        with DisableTorchFunctionSubclass():
            return self._view.__torch_function__(func, types, args, kwargs)

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


def _guarded(kind: Any, ask: Callable[..., Any]) -> Any:
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
        return kind if value is guarded else value

    table = {
        "__torch_function__": classmethod(asked),
        "__deepcopy__": copied,
        "__reduce_ex__": reduced,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    guarded: Any = type(kind)(kind.__name__, (kind,), table)
    return guarded
