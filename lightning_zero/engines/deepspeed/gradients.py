"""``p.grad`` as user code sees it, while DeepSpeed has averaged gradients in pieces.

A gradient is put together when it is read, and stays whole until :meth:`Gradients.flush`, which copies what user code
has written to it into this rank's piece. Nothing may read a piece before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm.agree import all_reduce_mean
from lightning_zero.engines.deepspeed.optimizer_step import parameters
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay
from lightning_zero.engines.deepspeed.usage import Usage
from lightning_zero.engines.refusals import refuse_gradients_in_backward
from lightning_zero.private.torch import DisableTorchFunction, in_backward

_NONE = (
    "p.grad is None between the micro-batches of an accumulation: DeepSpeed keeps gradients for itself until the last"
    " one. Look at them in on_before_optimizer_step, or use engine='fsdp2'."
)
_NOT_YET = (
    "p.grad is assigned between the micro-batches of an accumulation, when DeepSpeed keeps gradients for itself: do it"
    " in on_before_optimizer_step, or use engine='fsdp2'."
)


class Gradients:
    """The user's side of the gradients of ``params``.

    Args:
        under_way: The engine's current activities.
        usage: Says whether gradients of a backward wait for those of a later one.
    """

    def __init__(self, params: Parameters, under_way: UnderWay, usage: Usage) -> None:
        self._params, self._under_way, self._usage = params, under_way, usage
        self._has_warned = False
        self._seen: dict[Tensor, tuple[Tensor, bool]] = {}  # whole ones, and whether user code has assigned them

    def _refuse_in_backward(self) -> None:
        """In ``LightningModule.backward``, outside of autograd."""
        if Phase.BACKWARD in self._under_way and not in_backward():
            refuse_gradients_in_backward()

    def read(self, p: Tensor, whole: Callable[[], Tensor]) -> Tensor | None:
        """``p.grad``; ``whole`` puts it together (collective)."""
        self._refuse_in_backward()
        managed = self._params.managed
        with DisableTorchFunction():
            own = p.grad
        if own is not None or managed is None or Phase.BACKWARD in self._under_way:
            return own
        if p not in managed.with_grad:
            if p in managed and self._usage.window_open and not self._has_warned:
                self._has_warned = True
                if dist.get_rank() == 0:
                    warnings.warn(_NONE, stacklevel=2)
            return None
        if p not in self._seen:
            self._seen[p] = whole(), False
        return self._seen[p][0]

    def assembled(self, p: Tensor) -> Tensor:
        """Of this rank's and the others' pieces (collective)."""
        managed = self._params.attached
        return managed.assemble(p, managed.shards.grad(p)).to(dtype=p.dtype, device=p.device)

    def write(self, p: Tensor, value: Tensor | None) -> None:
        """``p.grad = value``."""
        self._refuse_in_backward()
        managed = self._params.managed
        with DisableTorchFunction():
            if Phase.BACKWARD in self._under_way:
                p.grad = value
                return
            if value is not None and managed is not None and p in managed and self._usage.window_open:
                if p.grad is None:
                    raise ValueError(_NOT_YET)
                p.grad = value
                return
            p.grad = None
        self._seen.pop(p, None)
        if managed is None or p not in managed:
            return
        if value is None:
            managed.with_grad.discard(p)
            return
        self._seen[p] = value, True  # whole until it is flushed: maybe this rank's own, which user code will reduce
        managed.with_grad.add(p)

    def flush(self, averages: bool = False) -> None:
        """Copies user code's writes into DeepSpeed's pieces.

        Args:
            averages: A backward adds to them, so what was assigned is averaged over the ranks, as DDP averages the sum.
        """
        managed = self._params.managed
        if averages and managed is not None:
            assigned = {p: grad.detach().clone() for p, (grad, is_assigned) in self._seen.items() if is_assigned}
            with DisableTorchFunction():
                all_reduce_mean(list(assigned.values()))
            self._seen.update((p, (grad, True)) for p, grad in assigned.items())
        if self._seen and managed is not None:
            with DisableTorchFunction(), torch.no_grad():
                for p, (grad, is_assigned) in self._seen.items():
                    piece, new = managed.shards.grad(p), managed.cut(p, grad)
                    if is_assigned:
                        piece.copy_(new)
                    else:  # no version tells of p.grad.data.mul_(2); what is as it was keeps the piece's precision
                        new = new.to(piece.device)
                        piece.copy_(torch.where(new == piece.to(new.dtype), piece, new.to(piece.dtype)))
        self._seen.clear()

    def zero_grad_of(self, optimizer: Optimizer) -> Callable[..., None]:
        """``optimizer.zero_grad``, as its pieces need it."""

        def zero_grad(set_to_none: bool = True) -> None:
            managed = self._params.attached
            with DisableTorchFunction():
                for p in parameters(optimizer):
                    self._seen.pop(p, None)
                    self._usage.forget(p)
                    if p not in managed:
                        if set_to_none:
                            p.grad = None
                        elif p.grad is not None:
                            p.grad.detach_().zero_()
                        continue
                    p.grad = None
                    if set_to_none:
                        managed.with_grad.discard(p)
                    # an epoch may have ended between the micro-batches of a step: DDP's gradients go, too
                    if p in managed.with_grad or self._usage.window_open:
                        managed.shards.grad(p).zero_()

        return zero_grad
