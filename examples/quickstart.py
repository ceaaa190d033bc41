"""Trains an ordinary LightningModule; only the strategy selects ZeRO: python examples/quickstart.py zero3"""

import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  (registers zero1, zero2, zero3)


class Classifier(L.LightningModule):
    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(20, width), nn.ReLU(), *hidden, nn.Linear(width, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(-1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(2048, 20)
    data = TensorDataset(x, (x[:, :10].sum(1) > x[:, 10:].sum(1)).long())
    trainer = L.Trainer(
        strategy=sys.argv[1] if len(sys.argv) > 1 else "zero3",  # was "ddp"
        accelerator="auto",
        devices=2,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=256))
    if trainer.is_global_zero:  # after fit the module is an ordinary one again, so one rank alone may use it
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}, class {type(module).__name__}")


if __name__ == "__main__":
    main()
