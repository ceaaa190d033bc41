"""Loops whose length differs by rank. Those without gradients end as under DDP: ranks that have finished serve the
others. Training ends with the shortest if that was asked for, as under DDP with loaders cut to that length."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchmetrics import MeanMetric

import lightning_zero
from tests.helpers import moves, zoo
from tests.helpers.ranks import outcome


class Batches(IterableDataset[Tensor]):
    """As many as the rank has by ``counts``."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Tensor]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(rank)
        return iter(torch.randn(8, 2, zoo.WIDTH, generator=generator)[: self.counts[rank]])


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


STAGE_1, STAGE_3, DEEPSPEED = (
    {"stage": 1, **zoo.BLOCKS},
    {"stage": 3, **zoo.BLOCKS},
    {"stage": 3, "engine": "deepspeed"},
)


@pytest.fixture(scope="module")
def of_ddp() -> dict[Any, Any]:
    """Results of DDP, by what was run: several cases share a reference."""
    return {}


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        (STAGE_1, (3, 1)),
        (STAGE_3, (1, 4, 2)),
        ({**DEEPSPEED, "stage": 2}, (3, 1)),
        (DEEPSPEED, (1, 4, 2)),
    ],
    ids=str,
)
def test_loops_of_different_lengths_end_as_under_ddp(
    ranks: Any, of_ddp: dict[Any, Any], settings: dict[str, Any], counts: tuple[int, ...]
) -> None:
    results = ranks(_loops, settings, counts, world_size=len(counts))
    if counts not in of_ddp:
        of_ddp[counts] = ranks(_loops, "ddp", counts, world_size=len(counts))
    for result, expected in zip(results, of_ddp[counts], strict=True):
        assert len(result["predict"]) == len(expected["predict"])
        for key in expected:
            assert result[key] == pytest.approx(expected[key], rel=1e-5), key  # sums of three ranks in another order


class OfSeveral(Evaluates):
    """Sums what the loaders give, of which some may have ended."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        given = [batch] if isinstance(batch, Tensor) else [each for each in batch if each is not None]
        super().validation_step(torch.cat(given), batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, batch_idx)


def _of_several(strategy: Any, counts: tuple[int, ...]) -> dict[str, Any]:
    """What loops over two loaders give on this rank; of the second one ranks have as much as others of the first."""
    torch.manual_seed(5)
    module, even = OfSeveral(), DataLoader(Batches((4,) * len(counts)), batch_size=None)
    loaders = [DataLoader(Batches(each), batch_size=None) for each in (counts, counts[::-1])]
    trainer = zoo.make_trainer(
        strategy, max_epochs=1, num_sanity_val_steps=2, val_check_interval=2, limit_val_batches=3
    )
    trainer.fit(module, even, loaders)
    found: dict[str, Any] = {"losses": module.losses, "norms": module.norms}
    for mode in ("sequential", "min_size", "max_size", "max_size_cycle"):
        trainer = zoo.make_trainer(strategy, limit_val_batches=5)
        found[mode] = trainer.validate(module, CombinedLoader(loaders, mode), verbose=False)
    predicted = zoo.make_trainer(strategy, limit_predict_batches=3).predict(module, loaders) or []
    found["predict"] = [[out.sum().item() for out in of_loader] for of_loader in predicted]
    return found


@pytest.mark.parametrize("settings", [STAGE_3, DEEPSPEED], ids=["fsdp2", "deepspeed"])
def test_loops_over_several_loaders_end_as_under_ddp(
    ranks2: Any, of_ddp: dict[Any, Any], settings: dict[str, Any]
) -> None:
    results = ranks2(_of_several, settings, (1, 4))
    if "several" not in of_ddp:
        of_ddp["several"] = ranks2(_of_several, "ddp", (1, 4))
    for result, expected in zip(results, of_ddp["several"], strict=True):
        for key in expected:
            (found, found_tree), (wanted, wanted_tree) = tree_flatten(result[key]), tree_flatten(expected[key])
            assert found_tree == wanted_tree, key
            assert found == pytest.approx(wanted, rel=1e-5), key


class TakesItsNetwork(Evaluates):
    """As Hydra's usual template has it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.save_hyperparameters(logger=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = {"net": self.net}


class KeepsNetwork(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.net = pl_module.net

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net}


class DataOfNetwork(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(Batches((4, 4)), batch_size=None)

    test_dataloader = train_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.trainer.lightning_module.net}


def _networks_in_checkpoints(strategy: Any, folder: str) -> list[float]:
    """The loss of a test of the checkpoint, and norms of the network in each place of those of the run and after it."""
    torch.manual_seed(5)
    module, data = TakesItsNetwork(zoo.Net()), DataOfNetwork()
    trainer = zoo.make_trainer(
        strategy, max_epochs=1, default_root_dir=folder, enable_checkpointing=True, limit_val_batches=0,
        callbacks=[KeepsNetwork()],
    )  # fmt: skip
    trainer.fit(module, data)
    best, after = trainer.checkpoint_callback.best_model_path, f"{folder}/after.ckpt"
    tested = trainer.test(module, data, ckpt_path=best, weights_only=False, verbose=False)[0]["test_loss"]
    trainer.save_checkpoint(after)
    found = [tested]
    for path in (best, after):
        if Path(path).is_file():  # it needs this package no more than DDP's
            with zipfile.ZipFile(path) as file:
                (pickled,) = (name for name in file.namelist() if name.endswith("data.pkl"))
                assert b"lightning_zero." not in file.read(pickled)  # no class of it
        content = lightning_zero.load_checkpoint(path, weights_only=False)
        (state,) = (state for name, state in content["callbacks"].items() if "KeepsNetwork" in name)
        places = [content["hyper_parameters"], content["extra"], state, content["DataOfNetwork"]]
        found += [sum(p.norm().item() for p in place["net"].parameters()) for place in places]
    if Path(best).is_file():
        loaded = TakesItsNetwork.load_from_checkpoint(best, weights_only=False)
        assert sum(p.norm().item() for p in loaded.hparams.net.parameters()) == found[1]
    return found


@pytest.mark.parametrize("settings", [STAGE_3, {**STAGE_3, "checkpoint": "sharded"}, DEEPSPEED], ids=str)
def test_networks_beside_the_state_dict_are_whole_in_checkpoints(
    ranks2: Any, of_ddp: dict[Any, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    found = ranks2(_networks_in_checkpoints, settings, str(tmp_path / "found"))
    if "networks" not in of_ddp:
        of_ddp["networks"] = ranks2(_networks_in_checkpoints, "ddp", str(tmp_path / "ddp"))
    assert found[0] == pytest.approx(of_ddp["networks"][0], rel=1e-6)


# -- training --------------------------------------------------------------------------------------------------------


class Trains(Evaluates):
    """Schedulers of both intervals, one of which counts the steps to come, and hooks in which rank 0 alone reads."""

    def build(self) -> None:
        super().build()
        self.epochs: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.norms.append(self.net.stem.weight.norm().item())

    def on_train_epoch_end(self) -> None:
        rates = [group["lr"] for group in self.optimizers().param_groups]
        self.epochs += [self.global_step, self.trainer.callback_metrics["loss"].item(), *rates]
        if self.global_rank == 0:
            self.norms.append(self.net.head.weight.norm().item())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(min(self.trainer.estimated_stepping_batches, 9))
        return [optimizer], [{"scheduler": LinearLR(optimizer, total_iters=steps), "interval": "step"},
                             ExponentialLR(optimizer, 0.9)]  # fmt: skip


class Picks(Sampler[int]):
    """Two items for each batch that the rank has by ``counts``, others in each epoch."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts, self.epoch = counts, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 * self.counts[dist.get_rank()]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch + dist.get_rank(), len(self) + self.epoch + dist.get_rank()))


def _loader(kind: str, counts: tuple[int, ...]) -> Any:
    if kind.startswith("iterable"):
        return DataLoader(Batches(counts), batch_size=None)
    items = torch.randn(20, zoo.WIDTH, generator=torch.Generator().manual_seed(3))
    if kind == "sampler":
        return DataLoader(items, batch_size=2, sampler=Picks(counts))
    batches = [[i + dist.get_rank(), i + 9] for i in range(counts[dist.get_rank()])]
    return {"a": DataLoader(items, batch_sampler=batches), "b": DataLoader(items, batch_size=2)}


class OfTwo(Trains):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["a"] + batch["b"], batch_idx)


KINDS: dict[str, tuple[type[Trains], dict[str, Any]]] = {
    "iterable": (Trains, {"limit_train_batches": 4, "val_check_interval": 2}),
    "sampler": (Trains, {"val_check_interval": 0.67}),
    "sampler with a limit": (Trains, {"limit_train_batches": 0.75}),
    "batch sampler": (OfTwo, {}),
}


def _trainings(strategy: Any, counts: tuple[int, ...]) -> dict[str, Any]:
    return {kind: _trained(strategy, kind, counts) for kind in KINDS}


def _trained(strategy: Any, kind: str, counts: tuple[int, ...], save: str = "", resume: str | None = None) -> Any:
    torch.manual_seed(5)
    made, options = KINDS[kind]
    module, even = made(), DataLoader(Batches((2,) * len(counts)), batch_size=None)
    callbacks = [moves._SaveAt(4, save)] if save else []
    trainer = zoo.make_trainer(
        strategy, callbacks=callbacks, use_distributed_sampler=False, num_sanity_val_steps=1,
        **{"accumulate_grad_batches": 1 if save or resume else 2, **options},
    )  # fmt: skip
    loader = _loader(kind.removesuffix(" with a limit"), counts)
    trainer.fit(module, CombinedLoader(loader, "min_size") if isinstance(loader, dict) else loader, even,
                ckpt_path=resume)  # fmt: skip
    return {
        "losses": module.losses,
        "norms": module.norms,
        "epochs": module.epochs,
        "batches": [trainer.num_training_batches, trainer.fit_loop.total_batch_idx, trainer.val_check_batch],
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]).tolist(),
    }


@pytest.mark.parametrize(
    ("settings", "counts"), [(STAGE_3, (3, 6, 5)), ({"stage": 1, "engine": "deepspeed"}, (5, 3))], ids=str
)
def test_training_ends_with_the_shortest(ranks: Any, settings: dict[str, Any], counts: tuple[int, ...]) -> None:
    found = ranks(_trainings, {"uneven": "shortest", **settings}, counts, world_size=len(counts))
    expected = ranks(_trainings, "ddp", (min(counts),) * len(counts), world_size=len(counts))
    for result, of_ddp in zip(found, expected, strict=True):
        for kind in KINDS:
            for key, value in of_ddp[kind].items():  # sums of three ranks in another order
                assert result[kind][key] == pytest.approx(value, rel=1e-4, abs=1e-6), (kind, key)


def _fetches_itself() -> str:
    class Fetches(zoo.Zoo):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            raise AssertionError("the run is refused before its first step")

    trainer = zoo.make_trainer({**STAGE_3, "uneven": "shortest"}, max_steps=1)
    return outcome(trainer.fit, Fetches(), DataLoader(zoo.RandomDataset(), zoo.BATCH))[1]


def test_a_step_that_fetches_its_batches_is_refused_by_name(ranks2: Any) -> None:
    for text in ranks2(_fetches_itself):
        assert "uneven='shortest' with training_step(self, dataloader_iter)" in text


def test_a_run_goes_on_in_mid_epoch(ranks2: Any, tmp_path: Path) -> None:
    """Its reference is the run that was not interrupted."""
    settings, path = {**STAGE_3, "uneven": "shortest"}, str(tmp_path / "x.ckpt")
    straight = ranks2(_trained, settings, "sampler", (5, 3), path)
    resumed = ranks2(_trained, settings, "sampler", (5, 3), "", path)
    for full, rest in zip(straight, resumed, strict=True):
        assert rest["losses"] == pytest.approx(full["losses"][4:])
        assert rest["weights"] == pytest.approx(full["weights"])
        assert rest["batches"][:2] == full["batches"][:2] == [3, 5]
