"""Kinds whose ranks run the same blocks in sequences of their own. Registered in :data:`tests.helpers.zoo.KINDS`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tests.helpers.zoo import ADAM, KINDS, SAME_MODULES, SAME_UNITS, UNUSED, Kind, Zoo, _odd_rank, _of, longer

EVERY = (0, 1, 2)


class Sequences(Zoo):
    """Odd ranks run the blocks ``odd``, in that order; others all of them, as they stand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = not self.options.get("manual", False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.net.stem(x)
        for index in self.options["odd"] if _odd_rank() else EVERY:
            x = self.net.blocks[index](x)
        return F.mse_loss(self.net.head(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]
        return None


KINDS.update(
    {
        f"odd_ranks_run_blocks_{name}{suffix}": Kind(
            module=_of(Sequences, odd=odd, **options),
            trainer=trainer,
            **({"dataset": longer} if trainer else {}),
            reference=UNUSED,
            reason=ADAM,
            unsupported_units={3: SAME_UNITS},
            unsupported_deepspeed={3: SAME_MODULES},
        )
        for name, odd, suffix, options, trainer in (
            ("in_another_order", (2, 1, 0), "", {}, {}),
            ("in_another_order", (2, 1, 0), "_accumulating", {}, {"accumulate_grad_batches": 2}),
            ("in_another_order", (2, 1, 0), "_by_hand", {"manual": True}, {}),
            ("one_twice", (0, 1, 1, 2), "", {}, {}),
            ("but_one", (0, 2), "_by_hand", {"manual": True}, {}),
        )
    }
)
