"""``p.grad`` as user code sees it, while DeepSpeed holds averaged gradients in pieces.

A gradient is assembled when user code reads it, and stays full until residency closes it, or longer if user code holds
it: until :meth:`Gradients.flush` copies the user's writes into this rank's piece. No code may read a piece before the
flush: the piece may be out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.comm.agree import all_reduce_mean
from lightning_zero.engines.deepspeed.optimizer_step import parameters
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.reductions import Reductions
from lightning_zero.engines.residency import store_changed
from lightning_zero.private.torch import DisableTorchFunction, users_of

_NOT_YET = (
    "p.grad is read or assigned between the micro-batches of an accumulation, where DeepSpeed has only partial sums of"
    " gradients at stages 2 and 3: do it in on_before_optimizer_step, or use stage=1 or engine='fsdp2'."
)
_NOT_TRAINED = (
    "p.grad is assigned to a parameter that was frozen when the run began, and that DeepSpeed's stage 3 cannot step:"
    " train it from the start, or use stage=2 or engine='fsdp2'."
)


class Gradients:
    """Serves user code's reads and writes of the gradients of ``params``.

    Args:
        reductions: Knows whether an accumulation is unfinished, so that gradients are partial sums.
    """

    def __init__(self, params: Parameters, reductions: Reductions) -> None:
        self._params, self._reductions = params, reductions
        self._seen: dict[Tensor, tuple[Tensor, bool]] = {}  # the full gradient, and whether user code assigned it

    def read(self, p: Tensor, open_key: Callable[[], None]) -> Tensor | None:
        """Returns ``p.grad``; ``open_key`` has residency call :meth:`opened` with the full gradient (collective)."""
        shards = self._params.shards
        if p.grad is not None or shards is None:
            return p.grad
        if p not in shards.with_grad:
            if p in shards and self._reductions.window_open:
                raise ValueError(_NOT_YET)
            return None
        if p not in self._seen:
            open_key()
        return self._seen[p][0]

    def opened(self, p: Tensor, full: Tensor) -> None:
        """Takes ``full``, the assembled gradient of ``p``, as the one that user code reads."""
        self._seen[p] = full, False

    def is_held(self, p: Tensor) -> bool:
        """Whether user code has assigned the full gradient, or holds the one that it has read, or a view of it."""
        if p not in self._seen or self._seen[p][1]:
            return p in self._seen
        return sys.getrefcount(self._seen[p][0]) > 2 or users_of(self._seen[p][0].untyped_storage()) > 1

    def close(self, p: Tensor) -> None:
        """Stores a gradient that was read. One that user code holds may be written to until the flush."""
        if p in self._seen and not self.is_held(p):
            self._store(p)

    def assembled(self, p: Tensor) -> Tensor:
        """Returns the full gradient of ``p``, assembled from all ranks' pieces (collective)."""
        shards = self._params.attached
        # Not the assembled tensor itself: gloo's thread holds it a moment longer, so user code would seem to hold it.
        full = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        return full.copy_(shards.assembly(p, shards.grad(p))())

    def write(self, p: Tensor, value: Tensor | None) -> None:
        """Implements ``p.grad = value``."""
        shards = self._params.shards
        with DisableTorchFunction():
            if value is None:
                self._clear(p)
                return
            if shards is None or p not in shards:
                if self._params.stage3:
                    raise ValueError(_NOT_TRAINED)
                p.grad = value
                return
            if self._reductions.window_open:
                if p.grad is None:
                    raise ValueError(_NOT_YET)
                p.grad = value
                return
            p.grad = None
        self._seen[p] = value, True  # not cut before the flush: it may be this rank's own, for user code to reduce
        shards.with_grad.add(p)

    def flush(self, averages: bool = False) -> None:
        """Copies user code's writes into DeepSpeed's pieces.

        Args:
            averages: Whether to average assigned gradients over the ranks. Needed before a backward adds to them,
                because DDP averages the sum.
        """
        with DisableTorchFunction(), torch.no_grad():
            if averages:
                assigned = {p: grad.detach().clone() for p, (grad, is_assigned) in self._seen.items() if is_assigned}
                all_reduce_mean(list(assigned.values()))
                self._seen.update((p, (grad, True)) for p, grad in assigned.items())
            for p in list(self._seen):
                self._store(p)

    def _store(self, p: Tensor) -> None:
        """Stores the gradient whether it has changed or not: no version counter records ``p.grad.data.mul_(2)``."""
        shards, (grad, _) = self._params.attached, self._seen.pop(p)
        store_changed(shards.cut(p, grad), shards.grad(p))

    def zero_grad_of(self, optimizer: Optimizer) -> Callable[..., None]:
        """Makes the ``optimizer.zero_grad`` that also clears DeepSpeed's pieces."""

        def zero_grad(set_to_none: bool = True) -> None:
            with DisableTorchFunction():
                for p in parameters(optimizer):
                    self._clear(p, set_to_none)

        return zero_grad

    def _clear(self, p: Tensor, set_to_none: bool = True) -> None:
        shards = self._params.shards
        self._seen.pop(p, None)
        self._reductions.used.discard(p)  # the window has not ended
        p.grad = None
        if shards is None or p not in shards:
            return
        if set_to_none:
            shards.with_grad.discard(p)
        # An epoch may end in the middle of an accumulation; its partial sum is cleared, as in DDP.
        if p in shards.with_grad or self._reductions.window_open:
            shards.grad(p).zero_()
