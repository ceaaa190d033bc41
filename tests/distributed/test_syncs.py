"""A step never waits for a value of the device: what it computes with stays there.

On the CPU a wait can only be seen as the function that would cause it: every way from a floating-point tensor, or from
a comparison of such, to Python is counted. (Whole numbers are what ranks agree on between their hosts; on an
accelerator those tensors lie on the host too.) ``tests/gpu`` lets CUDA itself tell.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import zoo

_TO_PYTHON = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "nonzero")


class Quiet(zoo.Zoo):
    """Records nothing, logs what people log."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("synced", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss


class Reads(Quiet):
    """As careless as a module can be."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


class _Watched(Callback):
    """From the third batch of the first epoch to its last."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._originals: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._originals = {name: getattr(Tensor, name) for name in _TO_PYTHON}
            for name, original in self._originals.items():
                setattr(Tensor, name, self._counting(original))
        elif batch_idx == trainer.num_training_batches - 2:
            self.restore()

    def restore(self) -> None:
        for name, original in self._originals.items():
            setattr(Tensor, name, original)
        self._originals.clear()

    def _counting(self, original: Any) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                self.waits.append("".join(traceback.format_stack(limit=6)[:-1]))
            return original(tensor, *args, **kwargs)

        return call


def _waits(strategy: Any, module: type[zoo.Zoo], options: dict[str, Any]) -> list[str]:
    torch.manual_seed(0)
    watched = _Watched()
    trainer = zoo.make_trainer(strategy, max_epochs=1, callbacks=[watched], **options)
    try:
        trainer.fit(module(), DataLoader(zoo.RandomDataset(zoo.BATCH * 2 * 12), batch_size=zoo.BATCH))
    finally:
        watched.restore()
    assert trainer.num_training_batches == 12
    return watched.waits


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (3, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
        (1, {"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
    ],
)
def test_no_step_waits_for_a_value(ranks2, stage, options):
    strategy = {"stage": stage, "min_unit_numel": 1}
    for waits in ranks2(_waits, strategy, Quiet, options):
        assert not waits, waits[0]


def test_a_wait_would_be_seen(ranks2):
    assert all(len(waits) >= 8 for waits in ranks2(_waits, {"stage": 3, "min_unit_numel": 1}, Reads, {}))
