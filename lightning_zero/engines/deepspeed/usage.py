"""Tracks which parameters were used between two agreements of the ranks (the others are DDP's unused parameters)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agree import IN_STEP, Agreement, all_reduce_mean
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.deepspeed.order import Order
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.reductions import Reductions
from lightning_zero.private.torch import DisableTorchFunction


class Usage:
    """Records this rank's used parameters in a window: the time between two agreements, the micro-batches of one step.

    DeepSpeed holds zeros or the previous step's gradient for an unused parameter. After the agreement, parameters that
    no rank used have no gradient.

    Attributes:
        trained: Parameters that required a gradient when DeepSpeed laid out its flats.
        window_open: True between a window's first backward and its agreement: gradients are partial sums.
    """

    def __init__(self, params: Parameters, config: ZeroConfig, agreement: Agreement | None) -> None:
        self._params, self._config, self._agreement = params, config, agreement
        self._order: dict[Tensor, int] = {}
        self._touched: set[Tensor] = set()  # since the last agreement
        self._touched_now: set[Tensor] = set()  # in this backward
        self._handles: list[Any] = []
        self.trained: set[Tensor] = set()
        self.window_open = False

    def follow(self, trainable: Iterable[Tensor]) -> None:
        """Starts recording uses of ``trainable`` and of odd parameters, until :meth:`close`."""
        self._order = {p: i for i, p in enumerate([*trainable, *self._params.odd])}
        self.trained = {p for p in self._order if p.requires_grad}
        self._handles = [p.register_post_accumulate_grad_hook(self._touch) for p in self._order if p.requires_grad]

    def _touch(self, p: Tensor) -> None:
        self._touched_now.add(p)

    def forget(self, p: Tensor) -> None:
        """Drops the use of ``p``, whose gradient was cleared before the window has ended."""
        self._touched.discard(p)

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def unfrozen(self) -> str | None:
        """Returns the name of a parameter that was frozen when DeepSpeed laid out its flats and is trainable now."""
        if self._params.managed is None:
            return None
        with DisableTorchFunction():
            named = self._params.named.items()
            return next((n for n, p in named if p.requires_grad and p not in self.trained), None)

    # -- one backward --------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Forgets the uses of a backward that did not end."""
        self._touched_now.clear()

    def end_backward(self) -> None:
        """Adds the parameters used in this backward to those of the window."""
        self._touched |= self._touched_now

    # -- the end of a window -------------------------------------------------------------------------------------

    def end_window(self, reductions: Reductions, order: Order) -> None:
        """Averages odd gradients, then agrees on the used parameters (collective).

        The order matters: the agreement tells which averaged zeros are removed, since no rank had a gradient."""
        self._agree_on_used(self._reduce_odd(), reductions, order)
        self.window_open = False

    def _reduce_odd(self) -> set[Tensor]:
        """Averages the gradients of odd parameters; returns those that had no gradient here and were zero-filled."""
        trainable = [p for p in self._params.odd if p.requires_grad]
        filled = {p for p in trainable if p.grad is None}
        for p in filled:
            p.grad = torch.zeros_like(p)
        grads = [p.grad for p in trainable if p.grad is not None]
        if grads:
            all_reduce_mean(grads)
        return filled

    def _agree_on_used(self, filled: set[Tensor], reductions: Reductions, order: Order) -> None:
        """Sends one CPU message, an all-reduce with MAX (int64, 1-D): ``order.mark`` and its negative, a flag for each
        used parameter, and, in the first window only, rank 0's order of gradients."""
        managed, num = self._params.attached, len(self._order)
        used = torch.zeros(num, dtype=torch.int64, device="cpu")
        used[[self._order[p] for p in self._touched]] = 1
        if not self._config.find_unused_parameters:
            used[[i for p, i in self._order.items() if p.requires_grad]] = 1
        places = torch.zeros(num if reductions.is_learning else 0, dtype=torch.int64, device="cpu")
        if reductions.is_learning and dist.get_rank() == 0:
            places[[self._order[p] for p in reductions.arrived]] = torch.arange(1, len(reductions.arrived) + 1)
        message = torch.cat([torch.tensor([order.mark, -order.mark], device="cpu"), used, places])
        if self._agreement is not None:
            self._agreement.all_reduce(message, dist.ReduceOp.MAX, IN_STEP).wait()
        (high, low), flags, came = message[:2].tolist(), message[2 : 2 + num].tolist(), message[2 + num :].tolist()
        order.compare(high, -low)
        if reductions.is_learning:
            place = dict(zip(self._order, came, strict=True))
            reductions.learn(sorted(filter(place.get, place), key=place.__getitem__))
        for p, flag in zip(self._order, flags, strict=True):
            if flag and p in managed:
                managed.with_grad.add(p)
            elif p in filled and not flag:  # a gradient from before the window is kept
                p.grad = None
        self._touched.clear()
