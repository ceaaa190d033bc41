"""``lightning-zero check``: it passes where all is right, names the line of what is not, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.commands import MODULE, run, started

FAULTY = """
import torch
from unittest import mock
from lightning import LightningModule
from torch.utils.data import DataLoader
from lightning_zero.comm import direct

def forgets(output, full, group, *rest, **options):
    output.copy_(full.chunk(group.size())[group.rank()])
    return direct.Begun(iter(()))

class Faulty(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    @property
    def stage(self):
        config = getattr(self.trainer.strategy, "config", None)
        return config.stage if config else 0

    def on_fit_start(self):
        if self.stage == 2:
            self.patch = mock.patch.object(direct, "reduce_scatter", forgets)
            self.patch.start()

    def on_fit_end(self):
        if self.stage == 2:
            self.patch.stop()

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.stage == 1 and self.global_rank == 1 and batch_idx == 3:
            with torch.no_grad():
                self.net[0].weight.add_(1.0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

data = DataLoader(torch.randn(96, 8, generator=torch.Generator().manual_seed(0)), batch_size=4)
"""
CHECKS = """
import lightning_zero, faulty
settings = {"min_unit_numel": 1}
options = dict(accelerator="cpu", devices=2, precision="32-true", settings=settings)
report = lightning_zero.check(faulty.Faulty(), faulty.data, parts=["same"], **options)
raise SystemExit(0 if report.ok else 7)
"""


def _outcomes(folder: Path) -> dict[str, str]:
    rows = json.loads((folder / "check.json").read_text())["rows"]
    return {f"{row['part']} {row['what']}": row["outcome"] for row in rows}


@pytest.mark.timeout(170)
def test_the_command_as_typed(tmp_path: Any) -> None:
    words = *MODULE, "check", "--accelerator", "cpu", "--precision", "32-true", "--only", "same,fits,safe"
    with started(*words, cwd=tmp_path) as program:
        assert program.wait() == 0
        assert program.processes() == []
    assert set(_outcomes(tmp_path).values()) == {"pass"}
    assert len(_outcomes(tmp_path)) == 7
    assert sorted(os.listdir(tmp_path)) == ["check.json", "check.md"]
    assert "torch" in json.loads((tmp_path / "check.json").read_text())["about"]["versions"]


@pytest.mark.timeout(120)
def test_what_trains_otherwise_is_named(tmp_path: Any) -> None:
    """At stage 1 a parameter of one rank is changed, stage 2 forgets to reduce, stage 3 is right."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    done = run(sys.executable, "-c", CHECKS, cwd=tmp_path)
    assert done.returncode == 7
    assert _outcomes(tmp_path) == {
        "same zero1 32-true": "FAIL",
        "same zero2 32-true": "FAIL",
        "same zero3 32-true": "pass",
    }


@pytest.mark.timeout(60)
def test_ctrl_c_leaves_nothing(tmp_path: Any) -> None:
    with started(*MODULE, "check", "--accelerator", "cpu", "--only", "same", cwd=tmp_path) as program:
        program.until(lambda: any(tmp_path.glob(".lightning-zero-check-*/middle.ckpt")))
        os.kill(program.pid, signal.SIGINT)
        assert program.wait() == 130
        assert program.processes() == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "words", ["--wrong", "--devices=none", "--devices=0", "--precision=fp8", "--only=some", "--out=nowhere"]
)
def test_mistakes_are_one_message(words: str, tmp_path: Any) -> None:
    done = run("check", "--accelerator=cpu", words, fork="all", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: " in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout
