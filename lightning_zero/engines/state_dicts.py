"""Full tensors in ``state_dict()`` of the modules of a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.private.torch import DisableTorchFunction, own_parameters, run_first


class WholeStateDicts:
    """Has ``state_dict()`` of each module of a run return full plain tensors (collective). Tied parameters share one
    tensor, because transformers and safetensors look for tensors that share memory.

    Args:
        module: Each of its modules gets a hook, until :meth:`undo`.
        whole: ``(parameter, torch's entry)`` -> the full tensor, or ``None`` to keep torch's entry.
    """

    def __init__(
        self,
        module: nn.Module,
        whole: Callable[[Tensor, Tensor], Tensor | None],
    ) -> None:
        self._whole = whole
        self._call: Callable[[], Any] = lambda: None  # the dict that is being filled, if it is still alive
        self._seen: dict[Tensor, Tensor] = {}  # during one call: parameters -> full values
        self._handles = []
        for m in module.modules():
            handle = m.register_state_dict_post_hook(partial(self._complete))  # torch sets an attribute on it
            run_first(m, handle)  # user hooks must see full values, too
            self._handles.append(handle)

    def undo(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _complete(self, module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        if self._call() is not state:  # a previous call may have failed or had a prefix; its values may be stale
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
        if not prefix:  # the module whose state_dict() was called
            self._call = lambda: None
            self._seen.clear()
