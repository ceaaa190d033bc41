"""DeepSpeed's offload to host memory and to files, by the ops that it compiles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero.config import OffloadConfig
from tests.helpers import zoo
from tests.helpers.zoo import Zoo, make_trainer

pytest.importorskip("deepspeed")


@pytest.mark.usefixtures("deepspeed_ops")
def test_offload_to_host_memory_equals_ddp(ranks2) -> None:
    """By DeepSpeed's CPU Adam: another order of operations inside a step, so not bit for bit."""
    name = "parameter_groups"
    results = ranks2(zoo.train, name, {"engine": "deepspeed", "stage": 3, "offload": "cpu"}, True)
    reference = ranks2(zoo.train, name, zoo.KINDS[name].reference, True)
    assert zoo.difference(results, reference).largest < 1e-5


class Wide(Zoo):
    """Large enough that its states go to files: DeepSpeed leaves what is below 1 MiB per rank in memory. Sharded layer
    by layer while it is built."""

    def build(self) -> None:
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            blocks = (nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(2))
            self.net = nn.Sequential(nn.Linear(zoo.WIDTH, 512), *blocks, nn.Linear(512, zoo.WIDTH))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


def _train(strategy: Any, resume: str | None, save: str | None, epochs: int) -> dict[str, Any]:
    torch.manual_seed(3 + 100 * int(os.environ["RANK"]) * (strategy != "ddp"))
    module, on_disk = Wide(), []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
            if strategy != "ddp":
                folder = Path(trainer.strategy.engine.offload_path)
                on_disk.append(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))

    batch = 12 // int(os.environ["WORLD_SIZE"])  # the same global batches, dealt out
    trainer = make_trainer(strategy, max_epochs=epochs, limit_val_batches=0, callbacks=[Looks()])
    trainer.fit(module, DataLoader(zoo.RandomDataset(36), batch_size=batch), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return {"losses": module.losses, "weights": weights, "on_disk": on_disk}


def _mean_losses(results: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([r["losses"] for r in results]).mean(0)


@pytest.mark.usefixtures("deepspeed_ops")
def test_runs_offloaded_to_files_resume_with_the_uninterrupted_runs_losses(ranks, tmp_path: Path) -> None:
    """DeepSpeed's own NVMe checkpoints restart from initial weights, or without Adam's step count, silently."""
    path, folder = str(tmp_path / "half.ckpt"), tmp_path / "fast"
    folder.mkdir()
    settings = {"engine": "deepspeed", "stage": 3, "offload": OffloadConfig(target="nvme", path=str(folder))}
    straight = ranks(_train, "ddp", None, None, 2, world_size=2)
    half = ranks(_train, settings, None, path, 1, world_size=2)
    numel = sum(value.numel() for value in straight[0]["weights"].values())
    # masters, two Adam states and the parameters themselves, 4 bytes each
    assert all(4 * 4 * numel * 0.95 < r["on_disk"][-1] < 5 * 4 * numel for r in half)
    expected = _mean_losses(straight)
    assert zoo._relative(_mean_losses(half), expected[:3]) < 1e-5
    resumed = ranks(_train, settings, path, None, 2, world_size=3)
    assert zoo._relative(_mean_losses(resumed), expected[3:]) < 1e-5
    assert zoo.largest_difference(resumed[0]["weights"], straight[0]["weights"])[0] < 1e-5
    assert list(folder.iterdir()) == []
