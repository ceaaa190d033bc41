"""Each stage communicates as often as its plan says (the table at the top of ``engines/fsdp2``).

Counted are the engine's own collectives; numbers alone cannot show a stage 1 that reduces after every micro-batch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.helpers import zoo

# torch 2.13 calls them *_single
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
STEPS, MICRO_BATCHES, BLOCKS = 4, 3, 3


class Looks(zoo.Zoo):
    """A hook of the user's own between micro-batches."""

    def on_train_batch_end(self, *unused: Any) -> None:
        pass


def _count(stage: int, looks: bool) -> Counter[str]:
    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in (GATHER, REDUCE)}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    torch.manual_seed(0)
    module = Looks() if looks else zoo.Zoo()
    trainer = zoo.make_trainer(
        {"stage": stage, "min_unit_numel": 1, "after_fit": "sharded"},
        accumulate_grad_batches=MICRO_BATCHES,
        max_steps=STEPS,
        max_epochs=-1,
    )
    items = zoo.RandomDataset(zoo.BATCH * 2 * STEPS * MICRO_BATCHES)
    for name in originals:
        setattr(dist, name, counting(name))
    try:
        trainer.fit(module, DataLoader(items, batch_size=zoo.BATCH))
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return calls


@pytest.mark.parametrize(
    ("stage", "looks", "gathers", "reductions"),
    [
        (1, False, STEPS * (BLOCKS + 1), STEPS * (BLOCKS + 1)),
        (2, False, STEPS * (BLOCKS + 1), STEPS * MICRO_BATCHES * (BLOCKS + 1)),
        # a block is gathered for its forward and for its backward, the root once for both
        (3, False, STEPS * MICRO_BATCHES * (2 * BLOCKS + 1), STEPS * MICRO_BATCHES * (BLOCKS + 1)),
        # where a hook may write to the module between micro-batches, it has to see the shards there
        (1, True, STEPS * MICRO_BATCHES * (BLOCKS + 1), STEPS * (BLOCKS + 1)),
        (2, True, STEPS * MICRO_BATCHES * (BLOCKS + 1), STEPS * MICRO_BATCHES * (BLOCKS + 1)),
    ],
)
def test_collectives_per_stage(ranks2, stage, looks, gathers, reductions):
    for calls in ranks2(_count, stage, looks):
        assert calls == {GATHER: gathers, REDUCE: reductions}
