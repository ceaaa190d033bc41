"""Sharding a module while ``configure_model`` builds it, with ``deepspeed.zero.Init``.

From the end of a layer's ``__init__`` to the engine's start, the layer's parameters are empty, and each rank holds its
shard of rank 0's values. Until then user code and checkpoints read and write full tensors, which are gathered when
they are touched (:mod:`~lightning_zero.engines.residency`): initialization by a parent module, tied weights,
``load_state_dict``. All ranks must read the same parameters.

Hugging Face's ``from_pretrained`` builds on the meta device unless transformers knows that stage 3 is in use. Here
transformers is told, so ``from_pretrained`` loads tensor by tensor into sharded parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.store import BuiltStore
from lightning_zero.engines.residency import Memories, Mode, Residency
from lightning_zero.private.torch import DisableTorchFunction


class Build:
    """Builds one run's module sharded.

    Args:
        module: The LightningModule.
        made: The config for ``deepspeed.initialize``.
        device: The device of this rank's forward and backward.
    """

    def __init__(self, module: nn.Module, made: dict[str, Any], device: torch.device) -> None:
        self.module = module
        self._made, self._device = made, device
        memories = Memories()
        self._store = BuiltStore(True, memories)
        self._residency = self._store.residency = Residency(self._store, memories=memories)
        self._view = _BuildMode(self._residency)
        self._is_entered = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """Wraps ``configure_model``: layers created inside are sharded (collective)."""
        with private.environment(self._device):
            private.prepare(self._device)
            private.count_parameters_from_zero()
            with _told_to_transformers(self._made), private.sharding(self._made, self._store.add), self._view:
                yield
            self._residency.end_window()

    @property
    def found(self) -> bool:
        """Whether any parameter is sharded: ``configure_model`` may have had nothing to build."""
        return any(map(private.is_partitioned, self.module.parameters()))

    def begin_view(self) -> None:
        """Starts presenting the module's tensors as full to user code, until :meth:`end_view`."""
        if not self._is_entered and self.found:
            self._is_entered = True
            self._view.__enter__()

    def end_view(self, stores: bool = True) -> None:
        """Ends the view of :meth:`begin_view`.

        Args:
            stores: Whether writes are stored (collective); not after an error, which other ranks may not have.
        """
        if self._is_entered:
            self._is_entered = False
            self._view.__exit__(None, None, None)
        if stores:
            self._residency.end_window()
        with DisableTorchFunction():
            for p in filter(private.is_partitioned, self._residency.forget()):
                private.empty(p)

    def restore(self, whole: bool) -> None:
        """Unshards the module, for a run that ended before its engine started (collective)."""
        if whole:
            with torch.no_grad(), DisableTorchFunction():
                for p in self.module.parameters():
                    private.make_whole(p)


class _BuildMode(Mode):
    """Makes ``detach()``, and thereby ``state_dict()``, return tensors that are gathered only when they are used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach and private.is_managed(args[0]) and private.is_partitioned(args[0]):
            return _lazily(args[0])
        return super().__torch_function__(func, types, args, kwargs)


def _lazily(p: Any) -> Tensor:
    def read(start: int, stop: int) -> Tensor:
        with DisableTorchFunction(), torch.no_grad():
            return private.gathered_copy(p)[start:stop].cpu()

    return LazyTensor(private.whole_shape(p), p.dtype, read)


class _Facts(SimpleNamespace):
    """Tells transformers that stage 3 is in use. The class that transformers has for this needs accelerate."""


@contextmanager
def _told_to_transformers(made: dict[str, Any]) -> Iterator[None]:
    if find_spec("transformers") is None:
        yield
        return
    from transformers.integrations import deepspeed as integration  # optional dependency

    if integration.is_deepspeed_zero3_enabled():  # the user has set it
        yield
        return
    facts = _Facts(config=made, is_zero3=lambda: True)  # transformers keeps only a weak reference
    integration.set_hf_deepspeed_config(facts)
    try:
        yield
    finally:
        integration.unset_hf_deepspeed_config()
        del facts
