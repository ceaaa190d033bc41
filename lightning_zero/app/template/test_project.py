"""pytest test_project.py: two processes under ZeRO get the same result as one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def loss_after_training(folder: Path, *overrides: str) -> float:
    small = "trainer.max_epochs=1", "trainer.limit_train_batches=4", "callbacks=none", "logger=none"
    quiet = "trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false", f"hydra.run.dir={folder}"
    command = [sys.executable, str(HERE / "train.py"), *small, *quiet, *overrides]
    done = subprocess.run(command, check=True, cwd=HERE, timeout=240, stdout=subprocess.PIPE, text=True)
    found = re.search(r"val_loss ([\d.]+)", done.stdout)
    assert found, done.stdout
    return float(found[1])


def test_zero3_on_two_processes_is_ddp_on_two(tmp_path: Path) -> None:
    zero3 = loss_after_training(tmp_path / "zero3", "strategy=zero3", "trainer.devices=2")
    ddp = loss_after_training(tmp_path / "ddp", "strategy=ddp", "trainer.devices=2")
    assert zero3 == pytest.approx(ddp, rel=1e-4)
