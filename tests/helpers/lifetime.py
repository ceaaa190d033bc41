"""Resident memory over a run's whole life: made, loaded, trained, saved, ended."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_zero
from tests.helpers.zoo import make_trainer

PHASES = ("made", "loaded", "trained", "saved", "ended")
TOKENS = 64


class Gpt(L.LightningModule):
    """A GPT-2 from config that reads ``folder`` when it is sharded; notes what memory was at most up to each event."""

    def __init__(self, sizes: dict[str, int], folder: str = "", target: str = "") -> None:
        super().__init__()
        self.sizes, self.folder, self.target = sizes, folder, target
        self.peaks: dict[str, int] = {}

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(3)
            with torch.device("meta"):
                self.model = make_gpt(self.sizes)

    def on_fit_start(self) -> None:
        self.note("made")
        lightning_zero.load_pretrained(self.model, self.folder)
        self.note("loaded")

    def on_train_end(self) -> None:
        self.note("trained")
        self.trainer.save_checkpoint(self.target)
        self.note("saved")

    def note(self, phase: str) -> None:
        self.peaks[phase] = resident("VmHWM")
        forget_peak()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def make_gpt(sizes: dict[str, int]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gpt2", n_positions=TOKENS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    return AutoModelForCausalLM.from_config(config)


def write(sizes: dict[str, int], folder: str) -> int:
    """Publishes weights; the number of parameters."""
    model = make_gpt(sizes)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def peaks(settings: dict[str, Any], sizes: dict[str, int], folder: str, target: str) -> dict[str, int]:
    """Phase -> bytes that were resident at most, beyond those of this process before, which are its ``imports``."""
    small = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    write(small, f"{target}.small")
    _fit(settings, Gpt(small, f"{target}.small", f"{target}.small.ckpt"))  # imports, threads and groups are there
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    module = Gpt(sizes, folder, target)
    _fit(settings, module)
    module.note("ended")
    return {"imports": before, **{phase: module.peaks[phase] - before for phase in PHASES}}


def _fit(settings: dict[str, Any], module: Gpt) -> None:
    loader: Any = DataLoader(torch.arange(16 * TOKENS).view(16, TOKENS) % 8, batch_size=1)
    make_trainer(settings, max_steps=2, limit_val_batches=0).fit(module, loader)


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
