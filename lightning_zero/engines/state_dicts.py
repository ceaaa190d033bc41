"""``state_dict()`` of the modules of a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.private.torch import DisableTorchFunction, own_parameters, run_first


class WholeStateDicts:
    """``state_dict()`` of any module of a run holds whole plain tensors, a tied one once, because transformers and
    safetensors look for tensors that share memory (collective).

    Args:
        module: Each module below gets a hook, until :meth:`undo`.
        whole: ``(parameter, what torch has put there)`` -> what is to stand there, ``None`` to leave it.
        begin: Called with all parameters of a module whose ``state_dict()`` begins.
        end: Called when it ends.
    """

    def __init__(
        self,
        module: nn.Module,
        whole: Callable[[Tensor, Tensor], Tensor | None],
        begin: Callable[[list[Tensor]], None],
        end: Callable[[], None],
    ) -> None:
        self._whole, self._begin, self._end = whole, begin, end
        self._asked: nn.Module | None = None  # whose state_dict() is under way, unless it has failed
        self._raw = False
        self._call: Callable[[], Any] = lambda: None  # the dictionary that is being filled, if it still lives
        self._seen: dict[Tensor, Tensor] = {}  # during one call: parameters -> whole values
        self._handles = []
        for m in module.modules():
            self._handles.append(m.register_state_dict_pre_hook(self._begin_with))
            handle = m.register_state_dict_post_hook(partial(self._complete))  # torch sets an attribute on it
            run_first(m, handle)  # hooks of users look at values, too
            self._handles.append(handle)

    def undo(self) -> None:
        """Takes the hooks back."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def raw(self) -> Iterator[None]:
        """The engine's own calls get what torch puts there."""
        self._raw = True
        try:
            yield
        finally:
            self._raw = False

    def _begin_with(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._raw or keep_vars or (self._asked is not None and prefix):
            return
        self._asked = module
        self._begin(list(module.parameters()))

    def _complete(self, module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        if self._raw:
            return
        if self._call() is not state:  # another call's values may be old; it may have failed, or had a prefix
            self._seen.clear()
            self._call = weakref.ref(state) if type(state) is not dict else lambda: state
        with torch.no_grad(), DisableTorchFunction():
            for name, p in own_parameters(module).items():
                value = state.get(prefix + name)
                if p is None or value is None or value is p:
                    continue
                if p not in self._seen:
                    made = self._whole(p, value)
                    if made is None:
                        continue
                    self._seen[p] = made
                state[prefix + name] = self._seen[p]
        if not prefix:  # the module that was asked
            self._call = lambda: None
            self._seen.clear()
        if module is self._asked:
            self._asked = None
            self._end()
