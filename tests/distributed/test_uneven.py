"""Loops without gradients whose length differs by rank end as under DDP: ranks that have finished serve the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from tests.helpers import zoo


class Batches(IterableDataset[Tensor]):
    """As many as the rank has by ``counts``."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Tensor]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(rank)
        return iter(torch.randn(self.counts[rank], 2, zoo.WIDTH, generator=generator))


class Evaluates(zoo.Zoo):
    """A synchronized value, a metric, and a hook that reads parameters where the loop ends."""

    def build(self) -> None:
        super().build()
        self.mean = MeanMetric()
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.record(self.net(batch).square().mean())

    def _evaluate(self, batch: Tensor, stage: str) -> None:
        loss = self.net(batch).square().mean()
        self.mean(loss)
        self.log(f"{stage}_loss", loss, sync_dist=True, on_epoch=True)
        self.log(f"{stage}_mean", self.mean, on_epoch=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def on_validation_epoch_end(self) -> None:
        self.norms.append(self.net.head.weight.norm().item())


def _loops(strategy: Any, counts: tuple[int, ...]) -> dict[str, Any]:
    """What a fit with validations, and each other loop of the trained module, gives on this rank."""
    torch.manual_seed(5)
    module = Evaluates()
    even, uneven = Batches((4,) * len(counts)), Batches(counts)
    trainer = zoo.make_trainer(strategy, max_epochs=2, num_sanity_val_steps=2, val_check_interval=2)
    trainer.fit(module, *(DataLoader(each, batch_size=None) for each in (even, uneven)))
    found: dict[str, Any] = {
        "losses": module.losses,
        "norms": module.norms,
        "fit": {k: v.item() for k, v in trainer.callback_metrics.items()},
    }
    loader = DataLoader(uneven, batch_size=None)
    for name in ("validate", "test"):
        found[name] = getattr(zoo.make_trainer(strategy), name)(module, loader, verbose=False)[0]
    found["predict"] = [out.sum().item() for out in zoo.make_trainer(strategy).predict(module, loader) or []]
    return found


@pytest.mark.parametrize("counts", [(3, 1), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 3}, {"stage": 3, "engine": "deepspeed"}], ids=str)
def test_loops_of_different_lengths_end_as_under_ddp(
    ranks: Any, settings: dict[str, Any], counts: tuple[int, ...]
) -> None:
    settings = settings if "engine" in settings else {**settings, **zoo.BLOCKS}
    results, expected = (ranks(_loops, each, counts, world_size=len(counts)) for each in (settings, "ddp"))
    for result, of_ddp in zip(results, expected, strict=True):
        assert len(result["predict"]) == len(of_ddp["predict"])
        for key in of_ddp:
            assert result[key] == pytest.approx(of_ddp[key], rel=1e-5), key  # sums of three ranks in another order


def test_predictions_that_do_not_divide_by_the_ranks(ranks2: Any) -> None:
    """Lightning's sampler for prediction repeats none."""
    for results in zip(*(ranks2(_predict, each) for each in ({"stage": 3}, "ddp")), strict=True):
        assert results[0] == pytest.approx(results[1])


def _predict(strategy: Any) -> list[float]:
    torch.manual_seed(5)
    loader = DataLoader(torch.arange(5.0 * zoo.WIDTH).view(5, zoo.WIDTH), batch_size=1)
    return [out.sum().item() for out in zoo.make_trainer(strategy).predict(Evaluates(), loader) or []]


class TakesItsNetwork(Evaluates):
    """As Hydra's usual template has it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.save_hyperparameters(logger=False)


def _networks_in_checkpoints(strategy: Any, folder: str) -> tuple[float, float]:
    torch.manual_seed(5)
    module, loader = TakesItsNetwork(zoo.Net()), DataLoader(Batches((4, 4)), batch_size=None)
    trainer = zoo.make_trainer(
        strategy, max_epochs=1, default_root_dir=folder, enable_checkpointing=True, limit_val_batches=0
    )
    trainer.fit(module, loader)
    best = trainer.checkpoint_callback.best_model_path
    tested = trainer.test(module, loader, ckpt_path=best, weights_only=False, verbose=False)[0]["test_loss"]
    loaded = TakesItsNetwork.load_from_checkpoint(best, weights_only=False)
    return tested, sum(p.norm().item() for p in loaded.hparams.net.parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_network_among_the_hyperparameters_is_whole_in_the_checkpoint(
    ranks2: Any, stage: int, tmp_path: Path
) -> None:
    found, expected = (
        ranks2(_networks_in_checkpoints, each, str(tmp_path / str(i)))
        for i, each in enumerate(({"stage": stage, **zoo.BLOCKS}, "ddp"))
    )
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
