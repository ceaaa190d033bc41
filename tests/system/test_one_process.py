"""One process that nobody launched, as a notebook or a plain script has it: no rank, no address in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.commands import run

SCRIPT = """
import os, sys
import lightning_zero
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    def configure_model(self):
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(batch).square().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def trainer(strategy, max_epochs=1):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=max_epochs, **quiet)


def data():
    return DataLoader(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)), batch_size=4)


def everything(name):
    module, first = Module(), trainer(name)
    first.fit(module, data(), data())
    path = first.checkpoint_callback.best_model_path
    losses = [first.test(module, data(), ckpt_path="best", verbose=False)[0]["loss"]]
    second = trainer(name)
    second.fit(module, data(), data())
    losses.append(float(second.callback_metrics["loss"]))
    resumed, continued = trainer(name, max_epochs=2), Module()
    resumed.fit(continued, data(), data(), ckpt_path=path)
    losses.append(float(resumed.callback_metrics["loss"]))
    losses.append(float(torch.cat(trainer(name).predict(Module(), data(), ckpt_path=path)).square().mean()))
    assert name == "ddp" or dict(os.environ) == before, name
    plain = trainer("ddp")
    plain.fit(module, data(), data())
    losses.append(float(plain.callback_metrics["loss"]))
    return losses


before = dict(os.environ)
expected = everything("ddp")
for name in sys.argv[1:]:
    for left in set(os.environ) - set(before):  # by Lightning's DDP
        del os.environ[left]
    found = everything(name)
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(found, expected, strict=True)), (name, found, expected)
    print(name, "is equal")
"""


def test_everything_runs_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    names = "zero2", "zero3_offload"
    done = run("script.py", *names, fork="first", cwd=tmp_path)
    for name in names:
        assert f"{name} is equal" in done.stdout
