"""Each stage communicates as often as its plan says (the table at the top of ``engines/fsdp2/engine.py``).

Counted are the engine's own collectives; numbers alone cannot show a stage 1 that reduces after every micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.comm.meter import TrafficMeter
from lightning_zero.comm.peer_memory import PeerMemory
from tests.helpers import zoo
from tests.helpers.peer_memory import NEIGHBOURS

STEPS, MICRO_BATCHES, BLOCKS = 4, 3, 3


class Looks(zoo.Zoo):
    """A hook of the user's own between micro-batches."""

    def on_train_batch_end(self, *unused: Any) -> None:
        pass


def _count(stage: int, kind: type[zoo.Zoo], precision: str) -> Counter[str]:
    torch.manual_seed(0)
    meter = TrafficMeter()
    _fit(kind(), {"stage": stage, "min_unit_numel": 1}, MICRO_BATCHES, meter, precision=precision)
    return meter.calls


def _fit(
    module: Any, strategy: dict[str, Any], micro_batches: int, meter: TrafficMeter, precision: str = "32-true"
) -> None:
    """``STEPS`` optimizer steps, counted from the first batch to the last."""
    trainer = zoo.make_trainer(
        {**strategy, "after_fit": "sharded", "find_unused_parameters": False},
        accumulate_grad_batches=micro_batches,
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[_Metered(meter)],
        precision=precision,
    )
    items = zoo.RandomDataset(zoo.BATCH * 2 * STEPS * micro_batches)
    trainer.fit(module, DataLoader(items, batch_size=zoo.BATCH))


class _Metered(Callback):
    def __init__(self, meter: TrafficMeter) -> None:
        self.meter = meter

    def on_train_start(self, *unused: Any) -> None:
        self.meter.install()

    def on_train_end(self, *unused: Any) -> None:
        self.meter.remove()


ONCE, EACH = STEPS * (BLOCKS + 1), STEPS * MICRO_BATCHES * (BLOCKS + 1)
"""Calls where every unit takes part once in a step, and once in each micro-batch."""


@pytest.mark.parametrize(
    ("stage", "kind", "precision", "gathers", "reductions"),
    [
        (1, zoo.Zoo, "32-true", ONCE, ONCE),
        # a block is gathered for its forward and for its backward, the root and the last block once for both; which one
        # is the last, the first forward tells
        (3, zoo.Zoo, "32-true", STEPS * MICRO_BATCHES * 2 * BLOCKS + 1, EACH),
        # a hook between micro-batches may read the module, so its parameters are resharded there
        (2, Looks, "bf16-mixed", EACH, EACH),
    ],
)
def test_collectives_per_stage(ranks2, stage, kind, precision, gathers, reductions):
    for calls in ranks2(_count, stage, kind, precision):
        assert (calls["all_gather"], calls["reduce_scatter"]) == (gathers, reductions)


class Even(zoo.Zoo):
    """2048 elements in blocks that share out evenly, so that no padding is sent; nothing at the root."""

    def build(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))

    def loss(self, batch: Any) -> Tensor:
        return self.net(torch.ones(4, 16)).square().mean()


def _sent(stage: int, accumulate: int) -> dict[str, float]:
    """Bytes of a step: as counted by the meter, and as they came from peers' memory."""
    meter, read = TrafficMeter(), PeerMemory.read
    arrived: Counter[str] = Counter()

    def been_read(self: PeerMemory, source: Any, into: Sequence[Tensor], *start: int) -> None:
        arrived["peers"] += sum(t.nbytes for t in into)
        read(self, source, into, *start)

    torch.manual_seed(0)
    with mock.patch.object(PeerMemory, "read", been_read):
        _fit(Even(), {"stage": stage, "units": ["Linear"]}, accumulate, meter)
    return {kind: nbytes / STEPS for kind, nbytes in (arrived + meter.sent).items()}


@NEIGHBOURS
@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_equal_the_table(ranks2, stage):
    """Gathers and reductions of each stage (docs/memory.md), in units of Ψ elements times (N-1)/N.

    One of 8 equal units is gathered once for forward and backward, from the second forward on.
    """
    accumulate = 3
    at_3 = 2 * accumulate - (accumulate - 1 / STEPS) / 8
    gathers, reductions = {1: (1, 1), 2: (1, accumulate), 3: (at_3, accumulate)}[stage]
    full = 8 * 16 * 16 * 4
    for sent in ranks2(_sent, stage, accumulate):
        assert sent["peers"] == (gathers + reductions) * full / 2  # what has really come to this rank
        assert sent["all_gather"] == gathers * full / 2
        assert sent["reduce_scatter"] == reductions * full / 2
