"""Prints the results of a language model at the end of a fit."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer


class TextReport(Callback):
    """Prints held-out perplexity next to the unigram baseline, a sample of text and the path of the checkpoint.

    For modules that log ``val_perplexity`` and can ``generate(prompt, num_tokens)``, with the data of
    :class:`~lightning_zero.recipes.text.PythonTopics`.

    Args:
        prompt: The sample's first characters.
        num_tokens: Number of tokens after the prompt; 0 prints no sample.
    """

    def __init__(self, prompt: str = "The ", num_tokens: int = 80) -> None:
        self.prompt, self.num_tokens = prompt, num_tokens
        self._start = 0.0
        self.lines: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        perplexity = trainer.callback_metrics.get("val_perplexity")
        seconds = time.perf_counter() - self._start
        self.lines = [f"{trainer.global_step} steps on {trainer.world_size} process(es) in {seconds:.0f} s"]
        if perplexity is not None:
            baseline = data.unigram_perplexity()
            self.lines.append(f"held-out perplexity {float(perplexity):.1f}, unigram baseline {baseline:.1f}")
        if self.num_tokens and hasattr(pl_module, "generate"):
            with torch.random.fork_rng(devices=[]):
                ids = pl_module.generate(data.tokenizer.encode(self.prompt), self.num_tokens)  # type: ignore[operator]
            self.lines += ["sample:", *("  | " + line for line in data.tokenizer.decode(ids).splitlines())]
        checkpoint: Any = trainer.checkpoint_callback
        path = checkpoint and (checkpoint.last_model_path or checkpoint.best_model_path)
        if path:
            self.lines.append(f"checkpoint: {path}")
        rank_zero_only(print)("\n" + "\n".join(self.lines), flush=True)
