"""When a backward gives the kernel the memory that activations leave behind (docs/decisions/33)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import host
from tests.helpers import zoo

MIB = 2**20
STEPS = 3


class Embedded(zoo.Zoo):
    """Two shard units, and in the root an embedding of so many MiB. Counts the times that memory was looked at since a
    backward began: at its beginning, and by each unit."""

    looks = 0

    def build(self) -> None:
        self.embedding = nn.Embedding(self.options["mib"] * MIB // 64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.embedding(torch.arange(8))
        for block in self.blocks:
            out = block(out)
        return out.sum()

    def on_before_backward(self, loss: Tensor) -> None:
        self.looks = 0


def returned(mib: int, grows_by: int) -> int:
    """How often gaps were returned in :data:`STEPS` steps, where units find ``grows_by`` MiB more resident than the
    backward began with."""
    module = Embedded(mib=mib)
    times = 0

    def resident() -> int:
        module.looks += 1
        return (100 + grows_by * (module.looks > 1)) * MIB

    def return_gaps() -> None:
        nonlocal times
        times += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "resident_bytes", resident)
        patch.setattr(host, "return_gaps", return_gaps)
        trainer = zoo.make_trainer({"stage": 3, "units": ["blocks.*"]}, max_steps=STEPS, limit_val_batches=0)
        trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(4 * STEPS)))
    return times


@pytest.mark.parametrize(
    ("mib", "grows_by", "times"),
    [
        pytest.param(1, 20, 0, id="the forward needs as much again"),
        pytest.param(20, 10, STEPS, id="it comes on top of what has grown"),
    ],
)
def test_gaps_are_returned_before_the_roots_gradients(ranks: Any, mib: int, grows_by: int, times: int) -> None:
    assert ranks(returned, mib, grows_by, world_size=2) == [times] * 2
