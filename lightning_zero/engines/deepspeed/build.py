"""A module that is sharded while ``configure_model`` builds it, by ``deepspeed.zero.Init``.

From a layer's ``__init__`` to the engine's start, its parameters are empty and each rank holds its part of rank 0's
values. User code and checkpoints meanwhile read and write whole tensors, which come as they are touched
(:mod:`~lightning_zero.engines.residency`): initialization by a parent module, tied weights, ``load_state_dict``. All
ranks must read the same ones.

Hugging Face's ``from_pretrained`` builds on the meta device unless it is told of stage 3; here it is, so it loads
tensor by tensor into sharded parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.engines.base import OnWhole, unheard
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.store import BuiltStore
from lightning_zero.engines.residency import Memories, Mode, Residency
from lightning_zero.private.torch import DisableTorchFunction


class Build:
    """One run's building.

    Args:
        module: The LightningModule.
        made: The config for ``deepspeed.initialize``.
        device: Parameters are computed with on it.
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
        """Around ``configure_model`` (collective)."""
        with private.environment(self._device):
            private.prepare(self._device)
            private.count_parameters_from_zero()
            with _told_to_transformers(self._made), private.sharding(self._made, self._store.add), self._view:
                yield
            self._residency.end_window()

    @property
    def found(self) -> bool:
        """Whether parameters are sharded already: ``configure_model`` may have had nothing to build."""
        return any(map(private.is_partitioned, self.module.parameters()))

    def begin_view(self) -> None:
        """From here to :meth:`end_view` the module's tensors are read and written as if they were whole."""
        if not self._is_entered and self.found:
            self._is_entered = True
            self._view.__enter__()

    def end_view(self, stores: bool = True) -> None:
        """``stores``: what was written counts (collective); not after an error, which other ranks may not have."""
        if self._is_entered:
            self._is_entered = False
            self._view.__exit__(None, None, None)
        if stores:
            self._residency.end_window()
        with DisableTorchFunction():
            for p in filter(private.is_partitioned, self._residency.forget()):
                private.empty(p)

    def restore(self, whole: bool, optimizers: Iterable[Any] = (), on_whole: OnWhole = unheard) -> None:
        """The module is an ordinary one again; for a run that ended before its engine started (collective)."""
        if whole:
            with torch.no_grad(), DisableTorchFunction():
                for p in self.module.parameters():
                    private.make_whole(p)
                    on_whole(p)


class _BuildMode(Mode):
    """``detach()``, and so ``state_dict()``, gathers nothing until its tensors are used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach and private.is_managed(args[0]) and private.is_partitioned(args[0]):
            return _lazily(args[0])
        return super().__torch_function__(func, types, args, kwargs)


def _lazily(p: Any) -> Tensor:
    def read(start: int, stop: int) -> Tensor:
        with DisableTorchFunction(), torch.no_grad():
            return private.gathered_copy(p)[start:stop].cpu()

    return LazyTensor(private.whole_shape(p), p.dtype, read)


class _Stage3:
    """In the form that transformers asks: its own class for this needs accelerate."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def _told_to_transformers(made: dict[str, Any]) -> Iterator[None]:
    if find_spec("transformers") is None:
        yield
        return
    from transformers.integrations import deepspeed as integration  # only where it is there

    if integration.is_deepspeed_zero3_enabled():  # by the user
        yield
        return
    facts = _Stage3(made)  # transformers keeps a weak reference
    integration.set_hf_deepspeed_config(facts)
    try:
        yield
    finally:
        integration.unset_hf_deepspeed_config()
        del facts
