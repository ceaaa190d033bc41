"""A GAN with two optimizers under manual optimization, like Lightning's own example: python examples/gan.py zero2"""

import sys

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  (registers zero1, zero2, zero3)


def mlp(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs))


class Gan(L.LightningModule):
    """A generator that learns a ring of radius 1 in the plane, and its discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = mlp(4, 2)
        self.discriminator = mlp(2, 1)

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def _loss(self, points: Tensor, real: bool) -> Tensor:
        logits = self.discriminator(points)
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        (points,) = batch
        noise = torch.randn(len(points), 4, device=self.device)
        opt_g, opt_d = self.optimizers()

        self.toggle_optimizer(opt_g)
        loss_g = self._loss(self(noise), real=True)
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        loss_d = (self._loss(points, real=True) + self._loss(self(noise).detach(), real=False)) / 2
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"loss_g": loss_g, "loss_d": loss_d}, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.log("radius", self(torch.randn(256, 4, device=self.device)).norm(dim=1).mean(), sync_dist=True)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.9)) for m in (self.generator, self.discriminator)
        ]


def main() -> None:
    torch.manual_seed(0)
    angles = torch.rand(2048) * 2 * torch.pi
    ring = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))
    trainer = L.Trainer(
        strategy=sys.argv[1] if len(sys.argv) > 1 else "zero2",
        accelerator="auto",
        devices=2,
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Gan(), DataLoader(ring, batch_size=64, shuffle=True))
    if trainer.is_global_zero:
        print(f"mean radius {trainer.callback_metrics['radius']:.2f} (the data's is 1.00)")


if __name__ == "__main__":
    main()
