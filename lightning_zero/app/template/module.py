"""The module: plain Lightning, without any code for ZeRO."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


class Classifier(L.LightningModule):
    """A stack of equal blocks. Each becomes a shard unit, which is gathered and freed separately.

    Args:
        width: Features of each block.
        depth: Blocks.
        learning_rate: Of AdamW.
    """

    def __init__(self, width: int = 256, depth: int = 4, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        self.net = nn.Sequential(nn.Linear(20, width), nn.ReLU(), *blocks, nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:  # (B, 20) -> (B, 2)
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), prog_bar=True, sync_dist=True)
        self.log("val_accuracy", (logits.argmax(-1) == y).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
