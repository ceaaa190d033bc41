"""Hands the gradients of a backward to DeepSpeed in an order that gives all ranks the same buckets.

Ranks may use different parameters, and DeepSpeed reduces gradients in the order of their arrival. At stages 1 and 2
gradients are therefore handed over in one sequence that all ranks share: from the last parameter to the first, as in
the first backward of DDP. A gradient waits on its parameter for those before it. The end of the backward hands over the
rest, with zeros where a rank has no gradient. So buckets are reduced while the backward runs, if modules run in about
the order in which they were made.

At stage 3 gradients must not wait, because all full gradients together may not fit in memory. If ranks run the same
modules but use different parameters of them, ``order`` detects the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay

_OUTSIDE = (
    "loss.backward() outside of training_step: at stages 2 and 3 DeepSpeed adds each gradient to the step as it"
    " arrives. Call it in training_step, or use engine='fsdp2' (or stage=1)."
)
_AGAIN = (
    "LightningModule.backward of this module goes backward more than once, which DeepSpeed's stage {} does not support:"
    " call backward once, on the sum of the losses; or use manual optimization with self.manual_backward(loss,"
    " retain_graph=True) for each, {}engine='fsdp2'."
)


class Reductions:
    """Hands gradients to DeepSpeed.

    Args:
        engine: DeepSpeed's engine.
        trained: Parameters in DeepSpeed's flats, in an order that all ranks share.
        stage: ZeRO stage.
        fills: Whether ranks may use different parameters. If not, gradients are handed over as they arrive.
        under_way: The engine's current activities.

    Attributes:
        arrived: Parameters that have received a gradient in this backward.
    """

    def __init__(self, engine: Any, trained: Sequence[Tensor], stage: int, fills: bool, under_way: UnderWay) -> None:
        self._engine, self._stage, self._fills, self._under_way = engine, stage, fills, under_way
        self._trained = trained
        self._next: list[Tensor] = []  # not handed over yet in this backward; the next one is the last in the list
        self.arrived: set[Tensor] = set()
        self._given: set[Tensor] = set()
        self._waits = self._in_turn = self._comes_twice = False
        self._is_first = True
        self._give = private.take_gradients(engine, self._arrives)

    def begin(self, reduces: bool, waits: bool) -> None:
        """Starts a backward.

        Args:
            reduces: Whether DeepSpeed reduces this backward's gradients, or accumulates them on the parameters.
            waits: At stages 1 and 2: whether to hand over at the end only, because parameters may receive several
                gradients.
        """
        self.arrived.clear()
        self._given.clear()
        fills = self._fills and reduces
        self._in_turn = fills and self._stage < 3
        self._waits = waits or self._comes_twice or self._is_first  # the first backward shows whether any comes twice
        self._next = [p for p in self._trained if p.requires_grad] if fills else []

    def _arrives(self, p: Tensor) -> None:
        """Is called for each gradient that autograd has accumulated on ``p``.

        Raises:
            ValueError: If the gradient comes from a backward outside the engine's step, or if an earlier gradient of
                ``p`` is in a bucket already.
        """
        if Phase.BACKWARD not in self._under_way:
            if self._stage > 1:
                raise ValueError(_OUTSIDE)
            self._give(p)
            return
        if p in self._given and (self._stage < 3 or private.is_in_bucket(self._engine, p)):
            raise ValueError(_AGAIN.format(self._stage, "stage=2, or " if self._stage == 3 else "or "))
        self._comes_twice = self._comes_twice or p in self.arrived
        self.arrived.add(p)
        if not self._in_turn:
            self._hand_over(p)
        while self._in_turn and not self._waits and self._next and self._next[-1] in self.arrived:
            self._hand_over(self._next.pop())

    def _hand_over(self, p: Tensor) -> None:
        if self._in_turn or self._stage > 1:
            self._given.add(p)
        self._give(p)

    def end(self) -> None:
        """Hands over the remaining gradients. Must run before DeepSpeed's own epilogue, which reduces the last
        bucket."""
        self._is_first = False
        while self._next:
            p = self._next.pop()
            if p not in self._given:
                if p.grad is None:
                    private.give_zeros(p)
                self._hand_over(p)
