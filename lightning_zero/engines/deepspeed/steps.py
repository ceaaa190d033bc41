"""The step of the users' optimizers, with closures and without."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.engines.deepspeed.optimizer_step import PieceStep, parameters
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.elementwise import is_known
from lightning_zero.engines.optimizer_family import family, own_methods
from lightning_zero.engines.optimizer_step import AgreedLosses, between_hooks
from lightning_zero.private.torch import DisableTorchFunction


class Steps:
    """Steps each attached optimizer on its pieces of the masters, and publishes these: masters of which the module does
    not know would be overwritten by what it holds.

    Args:
        params: All of the module's.
        settle: Makes count whatever user code wrote to parameters and gradients; before each look at a master.
        device: Parameters are computed with there.
        offloads: Whether masters lie in host memory.
    """

    def __init__(self, params: Parameters, settle: Callable[[], None], device: torch.device, offloads: bool) -> None:
        self._params, self._settle = params, settle
        self._device, self._offloads = device, offloads
        self._steps: weakref.WeakKeyDictionary[Optimizer, PieceStep] = weakref.WeakKeyDictionary()

    def add(self, optimizer: Optimizer, declared: Collection[str]) -> None:
        """Takes over ``optimizer`` and the states it has.

        Args:
            declared: Classes that the user has named as element-wise.

        Raises:
            ValueError: It steps by another optimizer.
        """
        inner = [type(member).__name__ for member in family(optimizer)[1:]]
        if inner:
            raise ValueError(
                f"engine='deepspeed' with {type(optimizer).__name__}, an optimizer around {inner[0]}: states"
                " lie in DeepSpeed's flats, one optimizer's for each parameter; use engine='fsdp2', or"
                f" {inner[0]} alone."
            )
        self._steps[optimizer] = PieceStep(optimizer, self._params.attached, declared, fuses=self._offloads)

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._steps

    def of(self, optimizer: Optimizer) -> PieceStep:
        """The object that steps ``optimizer`` and holds its states."""
        return self._steps[optimizer]

    def clear(self) -> None:
        """The optimizers are let go of."""
        self._steps.clear()

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """``optimizer.step``."""
        return between_hooks(optimizer, partial(self._step_one, optimizer), self._settle, closure, **kwargs)

    def _step_one(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if optimizer not in self._steps:
            raise ValueError(
                f"{type(optimizer).__name__} was made after the run began, and DeepSpeed keeps the states of those that"
                " configure_optimizers returned: change their param_groups instead, or use engine='fsdp2'."
            )
        step = self._steps[optimizer]
        if step.calls_closure and closure is not None:
            return self._step_with_closure(step, closure, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        with DisableTorchFunction():
            with step.stand_ins():
                result = optimizer.step(**kwargs)
            self._after_step(optimizer)
        return loss if result is None else result

    def _step_with_closure(self, step: PieceStep, closure: Callable[[], Any], **kwargs: Any) -> Any:
        self._settle()
        losses = AgreedLosses(self._device)
        with step.stand_ins() as swap:

            def evaluate() -> Any:
                with DisableTorchFunction(), torch.no_grad():
                    swap.release()
                    self._publish_all(step.optimizer)
                loss = closure()
                self._settle()
                with DisableTorchFunction():
                    swap.take()
                    return losses.mean(loss)

            result = step.optimizer.step(closure=evaluate, **kwargs)
        with DisableTorchFunction(), torch.no_grad():
            self._publish_all(step.optimizer)
        return losses.own(result)

    def _publish_all(self, optimizer: Optimizer) -> None:
        managed = self._params.attached
        managed.shards.publish(managed.flats(parameters(optimizer)))

    # -- whole tensors for methods of the optimizer's own ----------------------------------------------------------

    def lend_wholes(self, optimizer: Optimizer) -> None:
        """Methods of ``optimizer``'s own find whole tensors, until :meth:`take_back`."""
        for name in () if is_known(optimizer) else own_methods(optimizer):
            vars(optimizer)[name] = partial(self._on_wholes, optimizer, name)

    def take_back(self, optimizer: Optimizer) -> None:
        """The optimizer has its class's own methods again, and an ordinary ``state``."""
        if optimizer in self._steps:
            self._steps[optimizer].give_back()
        for name in own_methods(optimizer):
            optimizer.__dict__.pop(name, None)

    def _on_wholes(self, optimizer: Optimizer, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the optimizer's own: it finds whole parameters and states, and its writes count."""
        step, method = self._steps.get(optimizer), getattr(type(optimizer), name)
        if step is None or step.holds_stand_ins:
            return method(optimizer, *args, **kwargs)
        self._settle()
        with step.stand_ins(on_shards=False):
            result = method(optimizer, *args, **kwargs)
        with DisableTorchFunction(), torch.no_grad():
            self._publish_all(optimizer)
        return result

    # -- steps of others -----------------------------------------------------------------------------------------

    @contextmanager
    def stand_ins(self, optimizer: Optimizer, on_shards: bool | None = None) -> Iterator[Any]:
        """A loss scaler steps, or (``on_shards``) looks at gradients: it publishes nothing."""
        self._settle()
        with self._steps[optimizer].stand_ins(on_shards) as swap:
            yield swap
        if on_shards is None:
            self._after_step(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        managed = self._params.attached
        with DisableTorchFunction(), torch.no_grad():
            managed.shards.publish(managed.flats(p for p in parameters(optimizer) if p in managed.with_grad))
