"""Tracks which parameters were used between two agreements of the ranks (the others are DDP's unused parameters)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agree import IN_STEP, Agreement, all_reduce_mean
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.deepspeed.order import Order
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.private.torch import DisableTorchFunction


class Usage:
    """Records this rank's used parameters in a window: the time between two agreements, the micro-batches of one step.

    DeepSpeed holds zeros or the previous step's gradient for an unused parameter. After the agreement, parameters that
    no rank used have no gradient.

    Attributes:
        used: Parameters in DeepSpeed's flats that were used since the last agreement.
        window_open: True between a window's first backward and its agreement: gradients are partial sums.
    """

    def __init__(self, params: Parameters, config: ZeroConfig, agreement: Agreement | None) -> None:
        self._params, self._config, self._agreement = params, config, agreement
        self._order: dict[Tensor, int] = {}
        self.used: set[Tensor] = set()
        self.window_open = False

    def follow(self, trainable: Iterable[Tensor]) -> None:
        """Takes ``trainable``, the parameters in DeepSpeed's flats, and the odd parameters that require a gradient."""
        odd = (p for p in self._params.odd if p.requires_grad)
        self._order = {p: i for i, p in enumerate([*trainable, *odd])}

    def unfrozen(self) -> str | None:
        """Returns the name of a parameter that was frozen when DeepSpeed laid out its flats and is trainable now."""
        if self._params.shards is None:
            return None
        with DisableTorchFunction():
            named = self._params.named.items()
            return next((n for n, p in named if p.requires_grad and p not in self._order), None)

    def end_window(self, order: Order) -> None:
        """Averages odd gradients, then agrees on the used parameters (collective).

        The order matters: the agreement tells which averaged zeros are removed, since no rank had a gradient."""
        odd = [p for p in self._params.odd if p.requires_grad]
        filled = {p for p in odd if p.grad is None}
        for p in filled:
            p.grad = torch.zeros_like(p)
        if grads := [p.grad for p in odd if p.grad is not None]:
            all_reduce_mean(grads)
        self._agree_on_used(self.used.union(odd) - filled, filled, order)
        self.used.clear()
        self.window_open = False

    def _agree_on_used(self, used: set[Tensor], filled: set[Tensor], order: Order) -> None:
        """Sends one CPU message, an all-reduce with MAX (int64, 1-D): ``order.mark`` and its negative, and a flag for
        each used parameter. Gradients in ``filled`` that no rank used are removed."""
        shards = self._params.attached
        flags = torch.zeros(len(self._order), dtype=torch.int64, device="cpu")
        if self._config.find_unused_parameters:
            flags[[self._order[p] for p in used if p in self._order]] = 1
        else:
            flags[[i for p, i in self._order.items() if p.requires_grad]] = 1
        message = torch.cat([torch.tensor([order.mark, -order.mark], device="cpu"), flags])
        if self._agreement is not None:
            self._agreement.all_reduce(message, dist.ReduceOp.MAX, IN_STEP).wait()
        high, low, *by_any = message.tolist()
        order.compare(high, -low)
        for p, flag in zip(self._order, by_any, strict=True):
            if flag and p in shards:
                shards.with_grad.add(p)
            elif p in filled and not flag:
                p.grad = None
