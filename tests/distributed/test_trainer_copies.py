"""A Trainer is copied and pickled between runs, as with DDP: what stands in it afterwards holds no engine."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning.pytorch as L
import pytest
from torch.utils.data import DataLoader

from tests.helpers.ranks import outcome
from tests.helpers.zoo import BLOCKS, RandomDataset, Zoo, make_trainer


def _loader() -> Any:
    return DataLoader(RandomDataset(), batch_size=4)


def _fitted(settings: Any) -> L.Trainer:
    trainer = make_trainer(settings, max_epochs=1, limit_val_batches=0, callbacks=[L.callbacks.Timer()])
    trainer.fit(Zoo(), _loader())
    return trainer


def _second_epoch(trainer: L.Trainer) -> list[float]:
    module: Any = trainer.strategy.lightning_module
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, _loader())
    return module.losses


def _continued(settings: Any) -> list[Any]:
    trainer = _fitted(settings)
    twin = pickle.loads(pickle.dumps(trainer))
    return [_second_epoch(each) for each in (twin, trainer)]


def test_a_copy_of_a_trainer_trains_on_like_the_trainer(ranks2) -> None:
    """And the one that it was made of goes on by itself."""
    expected = ranks2(_continued, "ddp")
    for (twin, original), (losses, _) in zip(ranks2(_continued, {"stage": 3, **BLOCKS}), expected, strict=True):
        assert len(losses) == 8
        assert twin == pytest.approx(losses, rel=1e-5)
        assert original == pytest.approx(losses, rel=1e-5)


class _CopiesTrainer(Zoo):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        copy.deepcopy(self.trainer)


def _copied_inside() -> None:
    make_trainer({"stage": 3}, max_epochs=1, limit_val_batches=0).fit(_CopiesTrainer(), _loader())


def test_inside_a_run_the_module_is_to_be_copied(ranks2) -> None:
    for kind, text in ranks2(outcome, _copied_inside):
        assert kind == "RuntimeError"
        assert "copy.deepcopy(module)" in text
