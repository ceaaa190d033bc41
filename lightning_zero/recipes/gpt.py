"""A small GPT as an ordinary LightningModule."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.text import Perplexity


class Block(nn.Module):
    """Attention and MLP, each with pre-normalisation and a residual connection."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(LightningModule):
    """A decoder-only transformer with learned positions and tied embeddings (Radford et al. 2019).

    Args:
        vocab_size: Number of token ids.
        block_size: Longest sequence, in tokens.
        num_layers, num_heads, width: Shape of the transformer.
        dropout: Dropout rate of both residual branches and of the attention.
        learning_rate: Peak learning rate; warm-up is linear, decay is a cosine to a tenth of the peak.
        weight_decay: Weight decay of matrices; vectors have none.
        warmup_steps: Optimizer steps of warm-up.
    """

    def __init__(
        self,
        vocab_size: int = 1024,
        block_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * num_layers))
        self.train_perplexity = Perplexity()
        self.val_perplexity = Perplexity()

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, vocab_size)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # (B, T + 1)
        logits, targets = self(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.train_perplexity(logits.detach(), targets)
        self.log("loss", loss, prog_bar=True)
        self.log("perplexity", self.train_perplexity, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits, targets = self(batch[:, :-1]), batch[:, 1:]
        self.val_perplexity.update(logits, targets)
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), targets.flatten()), sync_dist=True)
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_perplexity.update(self(batch[:, :-1]), batch[:, 1:])
        self.log("test_perplexity", self.val_perplexity)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The most likely next token at every position, (B, T)."""
        return self(batch[:, :-1]).argmax(-1)

    def configure_optimizers(self) -> Any:
        settings = self.hparams
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": settings["weight_decay"]},
            {"params": [p for p in self.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=settings["learning_rate"], betas=(0.9, 0.95))
        num_steps, warmup = self.trainer.estimated_stepping_batches, settings["warmup_steps"]

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            progress = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
