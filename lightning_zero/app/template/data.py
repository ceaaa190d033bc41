"""The data: synthetic, so that the project trains at once. Replace it by your own."""

from __future__ import annotations

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Halves(L.LightningDataModule):
    """Classification: which half of 20 numbers has the larger sum.

    Args:
        num_samples: Number of training samples; validation has a quarter as many.
        batch_size: Samples per process and micro-batch.
    """

    def __init__(self, num_samples: int = 4096, batch_size: int = 64) -> None:
        super().__init__()
        self.num_samples, self.batch_size = num_samples, batch_size

    def setup(self, stage: str) -> None:
        self.train, self.val = self._make(self.num_samples, seed=1), self._make(self.num_samples // 4, seed=2)

    def _make(self, num_samples: int, seed: int) -> TensorDataset:
        x = torch.randn(num_samples, 20, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, (x[:, :10].sum(1) > x[:, 10:].sum(1)).long())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)
