"""A module that is sharded while ``configure_model`` builds it, by ``deepspeed.zero.Init``.

From a layer's ``__init__`` to the engine's start, its parameters are empty and each rank holds its part of rank 0's
values. User code and checkpoints meanwhile read and write whole tensors, one at a time (``deepspeed_view``):
initialization by a parent module, tied weights, ``load_state_dict``. All ranks must read and write the same ones.

Hugging Face's ``from_pretrained`` builds on the meta device unless it is told of stage 3; here it is, so it loads
tensor by tensor into sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.engines.base import OnWhole, unheard
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.view import ShardView
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
        self._entered: _BuildView | None = None

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around ``configure_model`` (collective)."""
        with private.environment(self._device):
            private.prepare(self._device)
            private.count_parameters_from_zero()
            with _told_to_transformers(self._made), private.sharding(self._made), _BuildView():
                yield

    @property
    def found(self) -> bool:
        """Whether parameters are sharded already: ``configure_model`` may have had nothing to build."""
        return any(map(private.is_partitioned, self.module.parameters()))

    def begin_view(self) -> None:
        """From here to :meth:`end_view` the module's tensors are read and written as if they were whole."""
        if self._entered is None and self.found:
            self._entered = _BuildView()
            self._entered.__enter__()

    def end_view(self) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None

    def restore(self, whole: bool, optimizers: Iterable[Any] = (), on_whole: OnWhole = unheard) -> None:
        """The module is an ordinary one again; for a run that ended before its engine started (collective)."""
        if whole:
            with torch.no_grad(), DisableTorchFunction():
                for p in self.module.parameters():
                    private.make_whole(p)
                    on_whole(p)


class _Parts:
    """The view's side of an engine, before there is one."""

    def __init__(self) -> None:
        self._num_changes = 0

    def holds(self, p: Any) -> bool:
        return private.is_managed(p)

    def is_away(self, p: Any) -> bool:
        return private.is_partitioned(p)

    def is_lost_soon(self, p: Any) -> bool:
        return False

    def in_step(self) -> bool:
        return False

    def busy(self) -> bool:
        return False

    def fetch(self, p: Any) -> None:
        raise AssertionError("outside a step")

    def keep_all(self) -> None:
        raise AssertionError("outside a step")

    def whole(self, p: Any) -> Tensor:
        with DisableTorchFunction(), torch.no_grad():
            return private.gathered_copy(p)

    def shape_of(self, p: Any) -> torch.Size:
        return private.whole_shape(p)

    def num_changes(self) -> int:
        return self._num_changes

    def written(self, p: Any, value: Tensor | None) -> None:
        self._num_changes += 1
        with DisableTorchFunction(), torch.no_grad():
            if private.is_partitioned(p):
                assert value is not None
                private.store(p, value)
            elif value is not None and value.data_ptr() != p.data_ptr():  # whole in the caller's GatheredParameters
                p.detach().copy_(value)

    def in_users_backward(self) -> bool:
        return False

    def see_grad(self, p: Any) -> Tensor | None:
        return None

    def set_grad(self, p: Any, value: Tensor | None) -> None:
        with DisableTorchFunction():
            p.grad = value

    def user_backward(self, run: Callable[[], None]) -> None:
        run()


class _BuildView(ShardView):
    """``detach()``, and so ``state_dict()``, gathers nothing until its tensors are used."""

    def __init__(self) -> None:
        super().__init__(_Parts())

    def _on_parameters(self, func: Any, name: str, args: Any, kwargs: Any, held: list[Any]) -> Any:
        if name == "detach" and self.holder.is_away(held[0]):
            return _lazily(held[0])
        return super()._on_parameters(func, name, args, kwargs, held)


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
