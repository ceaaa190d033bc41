"""A small training that fails as its command line says: ``python failing.py HOW STAGE [WORD ...]``.

STAGE: 1, 2 or 3; ``deepspeed1`` and so on for that engine.

HOW: ``all`` (every rank raises in step 2), ``0`` (rank 0 does), ``forever``; ``swallow`` stands still while the run is
being set up, in Python code that catches everything.

WORDS: ``saves`` (callbacks save on exceptions), ``again`` (the script catches the error and fits once more), ``same``
(with the same module), ``logs`` (one of each rank).

Files appear as it goes on: ``script<rank>``, ``setup<rank>``, ``step<rank>``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

HOW, STAGE, *WORDS = sys.argv[1:]
RANK = int(os.environ.get("LOCAL_RANK", "0"))
Path(f"script{RANK}").touch()

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_zero import ZeroStrategy  # noqa: E402


class Module(L.LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def setup(self, stage: str) -> None:
        Path(f"setup{RANK}").touch()
        while self.how == "swallow" and RANK == 0:
            try:
                time.sleep(300.0)
            except BaseException:
                Path("swallowed").touch()

    def train_dataloader(self) -> Any:
        return DataLoader(
            torch.ones(80 if self.how != "forever" else 8_000_000, 8), batch_size=4, num_workers=int("saves" in WORDS)
        )

    def on_train_start(self) -> None:
        _send(f"trains in rank {RANK}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch)
        if batch_idx == 2:
            Path(f"step{RANK}").touch()
            if self.how in ("all", str(RANK)):
                raise LookupError(f"rank {RANK} is not well")
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _send(line: str) -> None:
    """In one write: the parts of an unbuffered print get mixed with the other rank's."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fit(module: Module, name: str) -> L.Trainer:
    engine, stage = ("deepspeed", STAGE[-1]) if STAGE.startswith("deepspeed") else ("fsdp2", STAGE)
    more: Any = {"units": ["Linear"]} if engine == "fsdp2" else {}
    strategy = ZeroStrategy(engine=engine, stage=int(stage), rank_logs="logs" if "logs" in WORDS else None, **more)
    saves = [OnExceptionCheckpoint("saved"), ModelCheckpoint("monitored", save_on_exception=True)]
    saves = saves if "saves" in WORDS else []
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=bool(saves), callbacks=saves,
    )  # fmt: skip
    trainer.fit(module)
    total = sum(p.sum().item() for p in module.parameters())
    _send(f"FITTED {name} rank {RANK} steps {trainer.global_step} sum {total}")
    return trainer


if __name__ == "__main__":
    torch.manual_seed(0)
    module = Module(HOW)
    if "again" not in WORDS:
        fit(module, "first")
        sys.exit()
    try:
        fit(module, "first")
    except Exception as error:
        _send(f"CAUGHT rank {RANK}: {type(error).__name__}: {error}")
    if "same" not in WORDS:
        module = Module("none")
    module.how = "none"
    fit(module, "second")
