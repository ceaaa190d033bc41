"""Hands gradients to DeepSpeed in an order that gives all ranks the same buckets, and agrees on those that no rank has.

Ranks may use different parameters, and DeepSpeed reduces gradients in the order of their arrival. At stages 1 and 2
gradients are therefore handed over in one sequence that all ranks share: from the last parameter to the first, as in
the first backward of DDP. A gradient waits on its parameter for those before it. The end of the backward hands over the
rest, with zeros where a rank has no gradient. So buckets are reduced while the backward runs, if modules run in about
the order in which they were made.

At stage 3 gradients must not wait, because all full gradients together may not fit in memory. If ranks run the same
modules but use different parameters of them, ``order`` detects the difference.

DeepSpeed holds zeros or the previous step's gradient for an unused parameter. After the agreement at the end of a
*window* (the micro-batches of one step), parameters that no rank used have no gradient, as under DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm.agree import IN_STEP, Agreement
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.order import Order
from lightning_zero.engines.deepspeed.parameters import Parameters, Phase

_OUTSIDE = (
    "loss.backward() outside of training_step: at stages 2 and 3 DeepSpeed adds each gradient to the step as it"
    " arrives. Call it in training_step, or use engine='fsdp2' (or stage=1)."
)
_AGAIN = (
    "a parameter got a second gradient in one backward (it is used in several blocks that are recomputed with"
    " use_reentrant=True), which DeepSpeed does not support: use use_reentrant=False, or engine='fsdp2'."
)


class Reductions:
    """Follows the gradients of one window after the other.

    Args:
        agreement: Channel to all ranks; ``None`` if they use the same parameters.

    Attributes:
        used: Parameters in DeepSpeed's flats that this rank has used in the window.
        window_open: True between a window's first backward and its agreement: gradients are partial sums.
    """

    def __init__(self, params: Parameters, config: ZeroConfig, agreement: Agreement | None) -> None:
        self._params, self._stage = params, config.stage
        self._fills, self._agreement = config.find_unused_parameters, agreement
        self._trained: Sequence[nn.Parameter] = ()
        self._arrived: set[Tensor] = set()  # in this backward
        self._next: list[Tensor] = []  # not handed over yet in this backward; the next one is the last in the list
        self._in_turn = False
        self.used: set[Tensor] = set()
        self.window_open = False

    def follow(self, engine: Any, trained: Sequence[nn.Parameter]) -> None:
        """Takes the gradients of ``trained``, the parameters in the flats of DeepSpeed's ``engine``."""
        self._trained = trained
        self._give = private.take_gradients(engine, trained, self._arrives)

    # -- one backward --------------------------------------------------------------------------------------------

    def begin(self, reduces: bool) -> None:
        """Starts a backward. ``reduces`` tells whether DeepSpeed reduces its gradients, or accumulates them on the
        parameters."""
        self._arrived.clear()
        fills = self._fills and reduces
        self._in_turn = fills and self._stage < 3
        self._next = [p for p in self._trained if p.requires_grad] if fills else []

    def _arrives(self, p: Tensor) -> None:
        """Is called for each gradient that autograd has accumulated on ``p``.

        Raises:
            ValueError: If the gradient comes from a backward outside the engine's step, or is the second one of ``p``
                in a backward that reduces.
        """
        if self._params.phase is not Phase.BACKWARD:
            if self._stage > 1:
                raise ValueError(_OUTSIDE)
            return
        if p in self._arrived and (self._in_turn or self._stage > 1):
            raise ValueError(_AGAIN)
        self._arrived.add(p)
        if not self._in_turn:
            self._give(p)
        while self._in_turn and self._next and self._next[-1] in self._arrived:
            self._give(self._next.pop())

    def end(self) -> None:
        """Hands over the remaining gradients. Must run before DeepSpeed's own epilogue, which reduces the last
        bucket."""
        while self._next:
            p = self._next.pop()
            if self._in_turn or p not in self._arrived:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                self._give(p)
        self.used |= self._arrived

    # -- the end of a window -------------------------------------------------------------------------------------

    def end_window(self, order: Order) -> None:
        """Agrees on the parameters that any rank used (collective). One CPU message, an all-reduce with MAX (int64,
        1-D): ``order.mark`` and its negative, and a flag for each parameter."""
        flags = [int(p in self.used if self._fills else p.requires_grad) for p in self._trained]
        message = torch.tensor([order.mark, -order.mark, *flags], dtype=torch.int64, device="cpu")
        if self._agreement is not None:
            self._agreement.all_reduce(message, dist.ReduceOp.MAX, IN_STEP).wait()
        high, low, *flags = message.tolist()
        order.compare(high, -low)
        self._params.attached.with_grad.update(compress(self._trained, flags))
        self.used.clear()
        self.window_open = False
