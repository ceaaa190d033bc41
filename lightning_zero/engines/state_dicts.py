"""``state_dict()`` of the modules of a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
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
    """

    def __init__(
        self,
        module: nn.Module,
        whole: Callable[[Tensor, Tensor], Tensor | None],
    ) -> None:
        self._whole = whole
        self._call: Callable[[], Any] = lambda: None  # the dictionary that is being filled, if it still lives
        self._seen: dict[Tensor, Tensor] = {}  # during one call: parameters -> whole values
        self._handles = []
        for m in module.modules():
            handle = m.register_state_dict_post_hook(partial(self._complete))  # torch sets an attribute on it
            run_first(m, handle)  # hooks of users look at values, too
            self._handles.append(handle)

    def undo(self) -> None:
        """Takes the hooks back."""
        for handle in self._handles:
            handle.remove()

    def _complete(self, module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
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
