"""The order in which DeepSpeed is given the gradients of a backward, which decides what its buckets contain.

Ranks may use different parameters, and DeepSpeed reduces what came first. At stages 1 and 2 gradients are therefore
handed over in one sequence that all ranks share, as DDP's reducer does it: at first the parameters from the last to the
first, later rank 0's order of the first backward. A gradient waits on its parameter for those before it, and the end of
the backward hands over what is left, with zeros where a rank has none. While ranks use what they used before, buckets
are reduced beside the backward.

At stage 3 gradients must not wait, since none of the whole ones fits in memory with the others: ranks that all run the
same modules are told apart by ``order`` if they use other parameters of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay

_OUTSIDE = (
    "loss.backward() outside of training_step: at stages 2 and 3 DeepSpeed takes gradients for the step as they come."
    " Do it in training_step, or use engine='fsdp2' (or stage=1)."
)
_AGAIN = (
    "LightningModule.backward of this module goes backward more than once, which DeepSpeed's stage {} cannot take: go"
    " backward once, from the sum of the losses; or use manual optimization with self.manual_backward(loss,"
    " retain_graph=True) for each, {}engine='fsdp2'."
)


class Reductions:
    """Hands gradients to DeepSpeed.

    Args:
        engine: DeepSpeed's.
        trained: Parameters in its flats, in an order that all ranks share.
        stage: ZeRO stage.
        fills: Whether ranks may use different parameters; without, gradients are handed over as they come.
        under_way: The engine's current activities.

    Attributes:
        arrived: Parameters whose gradients came in this backward, in the order of the last of them.
        is_learning: Whether the sequence is still that of registration.
    """

    def __init__(self, engine: Any, trained: Sequence[Tensor], stage: int, fills: bool, under_way: UnderWay) -> None:
        self._engine, self._stage, self._fills, self._under_way = engine, stage, fills, under_way
        self._sequence = list(reversed(trained))
        self._next: list[Tensor] = []  # reversed: those that were not handed over yet, in this backward
        self._given: set[Tensor] = set()
        self._waits = self._in_turn = self._comes_twice = False
        self.arrived: dict[Tensor, None] = {}
        self.is_learning = fills and stage < 3
        self._give = private.take_gradients(engine, self._arrives)

    def begin(self, reduces: bool, waits: bool) -> None:
        """A backward begins.

        Args:
            reduces: Whether DeepSpeed reduces its gradients, or adds them up on the parameters.
            waits: At stages 1 and 2: whether parameters may have several gradients, which only the end can tell.
        """
        self.arrived.clear()
        self._given.clear()
        fills = self._fills and reduces
        self._in_turn = fills and self._stage < 3
        self._waits = waits or self.is_learning or self._comes_twice
        self._next = [p for p in reversed(self._sequence) if p.requires_grad] if fills else []

    def _arrives(self, p: Tensor) -> None:
        """Comes with each gradient.

        Raises:
            ValueError: It is of no step of ours, or a second one of a parameter whose first one is in a bucket.
        """
        if Phase.BACKWARD not in self._under_way:
            if self._stage > 1:
                raise ValueError(_OUTSIDE)
            self._give(p)
            return
        if p in self._given and (self._stage < 3 or private.is_in_bucket(self._engine, p)):
            raise ValueError(_AGAIN.format(self._stage, "stage=2, or " if self._stage == 3 else "or "))
        if p in self.arrived:
            self._comes_twice = True
            del self.arrived[p]
        self.arrived[p] = None
        if not self._in_turn:
            self._hand_over(p)
        while self._in_turn and not self._waits and self._next and self._next[-1] in self.arrived:
            self._hand_over(self._next.pop())

    def _hand_over(self, p: Tensor) -> None:
        if self._in_turn or self._stage > 1:
            self._given.add(p)
        self._give(p)

    def end(self) -> None:
        """All gradients of this backward are there. Called before DeepSpeed ends its own, which reduces the last
        bucket."""
        while self._next:
            p = self._next.pop()
            if p not in self._given:
                if p.grad is None:
                    private.give_zeros(p)
                self._hand_over(p)

    def learn(self, sequence: Sequence[Tensor]) -> None:
        """From now on gradients are handed over in this order of rank 0's, all others last."""
        first = dict.fromkeys(sequence)
        self._sequence = [*first, *(p for p in self._sequence if p not in first)]
        self.is_learning = False
