"""The step of the users' optimizers: on tensors in memory at once, on files flat by flat, with closures."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.optimizer_step import CpuAdam, Only, PieceStep, fused, parameters
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
        cpu_adam: Whether DeepSpeed's CPU Adam can be used.
    """

    def __init__(
        self, params: Parameters, settle: Callable[[], None], device: torch.device, offloads: bool, cpu_adam: bool
    ) -> None:
        self._params, self._settle = params, settle
        self._device, self._offloads, self._cpu_adam = device, offloads, cpu_adam
        self._steps: weakref.WeakKeyDictionary[Optimizer, PieceStep] = weakref.WeakKeyDictionary()
        self._kernels: weakref.WeakKeyDictionary[Optimizer, CpuAdam] = weakref.WeakKeyDictionary()

    def add(self, optimizer: Optimizer, declared: Collection[str]) -> None:
        """Takes over ``optimizer`` and the states it has.

        Args:
            declared: Classes that the user has named as element-wise.

        Raises:
            ValueError: It steps by another optimizer, or needs tensors in memory that lie in files.
        """
        managed = self._params.attached
        inner = [type(member).__name__ for member in family(optimizer)[1:]]
        if inner:
            raise ValueError(
                f"engine='deepspeed' with {type(optimizer).__name__}, an optimizer around {inner[0]}: states"
                " lie in DeepSpeed's flats, one optimizer's for each parameter; use engine='fsdp2', or"
                f" {inner[0]} alone."
            )
        step = PieceStep(optimizer, managed, declared)
        if not step.elementwise and any(map(managed.shards.is_swapped, managed.flats(parameters(optimizer)))):
            raise ValueError(
                f"offload='nvme' with {type(optimizer).__name__}, which looks across elements and so needs"
                " whole masters and states: use offload='cpu', or an element-wise optimizer such as AdamW."
            )
        self._steps[optimizer] = step

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
            result = self._step_on(step, **kwargs)
        return loss if result is None else result

    def _step_on(self, step: PieceStep, **kwargs: Any) -> Any:
        """Steps tensors in memory at once, then those in files flat by flat."""
        managed, optimizer = self._params.attached, step.optimizer
        shards = managed.shards
        flats = managed.flats(p for p in parameters(optimizer) if p in managed.with_grad)
        in_files = [i for i in flats if shards.is_swapped(i)]
        result = None
        here = set(flats) - set(in_files)
        if not in_files:
            result = self._call(step, None, **kwargs)
        elif here or any(p not in managed for p in parameters(optimizer)):
            result = self._call(step, lambda p: p not in managed or managed.piece(p).flat in here, **kwargs)
        with torch.no_grad():
            # Published as soon as stepped, flats in files in the order of their numbers: at stages 1 and 2 publishing
            # gathers, so all ranks come here in one order, and a flat's file is written back before the next is loaded.
            shards.publish(here)
            for i in in_files:
                with shards.loaded(i, write=True):
                    in_it = {p for p in managed.shards.pieces if managed.piece(p).flat == i}
                    result = self._call(step, in_it.__contains__, **kwargs)
                    shards.publish([i])
        return result

    def _call(self, step: PieceStep, only: Only | None, **kwargs: Any) -> Any:
        """One ``optimizer.step`` on the parameters of ``only``, masters in host memory by a kernel made for it."""
        optimizer = step.optimizer
        if not self._offloads or not step.elementwise or not CpuAdam.knows(optimizer):
            with step.stand_ins(only=only):
                return optimizer.step(**kwargs)
        chosen = [p for p in parameters(optimizer) if only is None or only(p)]
        in_host = {p for p in chosen if self._is_in_host(p)}
        rest = set(chosen) - in_host
        if in_host and self._cpu_adam:
            kernel = self._kernels.get(optimizer)
            if kernel is None or kernel.decoupled != CpuAdam.is_decoupled(optimizer):
                with private.environment(self._device):
                    self._kernels[optimizer] = CpuAdam(optimizer)
            with step.stand_ins(only=in_host.__contains__):
                self._kernels[optimizer].step()
        elif in_host:
            with step.stand_ins(only=in_host.__contains__), fused(optimizer):
                optimizer.step(**kwargs)
        if rest:
            with step.stand_ins(only=rest.__contains__):
                return optimizer.step(**kwargs)
        return None

    def _is_in_host(self, p: Tensor) -> bool:
        managed = self._params.attached
        if p not in managed:
            return False
        master = managed.shards.master(managed.piece(p).flat)
        return master.device.type == "cpu" and master.dtype == torch.float32

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
