"""One small LightningModule of every kind that has to train unchanged, and the run that compares strategies.

``KINDS`` is the table: a name, how to make the module, what the Trainer needs, how close to DDP it has to come and why
not closer. ``train`` runs one of them on the calling rank (see :mod:`tests.helpers.ranks`) and returns what a user
could observe: losses step by step, logged metrics, final weights. ``difference`` compares two such results.

Every module is float32 unless it says otherwise, has a few thousand parameters and takes milliseconds per step. All
randomness comes from a seed or from an item's index. ``units`` gather block by block (``BLOCKS``), so that "small" does
not mean "a single unit".
"""

from __future__ import annotations

import copy
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

WIDTH = 8
ODD = 7
BATCH = 4
NUM_ITEMS = 28
"""Divisible neither by 3 ranks nor, at 2, by the batch: the sampler pads and the last batch is short."""
KIND_ITEMS = 13
"""Of a kind: on 2 ranks two batches in an epoch, the last one short; the sampler pads on 2 ranks and on 3."""
BLOCKS = {"min_unit_numel": 1}
"""Settings under which every repeated block is its own unit."""
"""Settings under which a module this small is one unit."""
SUM_ORDER = "averaging over ranks rounds in another order than DDP's all-reduce"


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


class RandomDataset(Dataset):
    """``(x, y)``, both (WIDTH,), a pure function of the index."""

    def __init__(self, num_items: int = NUM_ITEMS, width: int = WIDTH, outputs: int = WIDTH) -> None:
        self.num_items, self.width, self.outputs = num_items, width, outputs

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        x = torch.randn(self.width, generator=generator)
        return x, torch.sin(3 * x[: self.outputs].flip(0)) + 0.1 * torch.randn(self.outputs, generator=generator)


def longer() -> Dataset:
    """Three batches in an epoch on 2 ranks: for kinds that accumulate, or do something else in each of three."""
    return RandomDataset(19)


class TokenDataset(Dataset):
    """``(tokens, next tokens)``, both (6,), of a vocabulary of 13."""

    def __len__(self) -> int:
        return KIND_ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(13, (7,), generator=torch.Generator().manual_seed(1000 + index))
        return tokens[:-1], tokens[1:]


class ImageDataset(Dataset):
    """``(image (3, 6, 6), target (WIDTH,))``."""

    def __len__(self) -> int:
        return KIND_ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + index)
        return torch.randn(3, 6, 6, generator=generator), torch.randn(WIDTH, generator=generator)


# ---------------------------------------------------------------------------------------------------------------------
# Building blocks
# ---------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """(B, width) -> (B, width), a pre-norm residual block."""

    def __init__(self, width: int = WIDTH, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Stem, repeated blocks, head: (B, WIDTH) -> (B, WIDTH)."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))
        self.head = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Zoo(L.LightningModule):
    """An ordinary LightningModule that also remembers its losses (``losses``) and whatever else a kind wants compared
    (``extra``)."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.extra: dict[str, Tensor] = {}
        self.options = options
        self.build()

    def build(self) -> None:
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def record(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.record(self.loss(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        make = self.options.get("optimizer", lambda parameters: SGD(parameters, lr=0.05, momentum=0.9))
        return make(self.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers nobody has heard of
# ---------------------------------------------------------------------------------------------------------------------


class Lamb(Optimizer):
    """Not element-wise: each tensor's step is scaled by norms of the whole tensor (arXiv:1904.00962)."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m = state["m"] / (1 - beta1 ** state["step"])
                v = state["v"] / (1 - beta2 ** state["step"])
                update = m / (v.sqrt() + 1e-4) + 0.01 * p
                ratio = (p.norm() / update.norm()).item() if p.norm().item() > 0 else 1.0
                p.add_(update, alpha=-group["lr"] * ratio)
        return loss


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer set-up, schedulers, steps
# ---------------------------------------------------------------------------------------------------------------------


class Groups(Zoo):
    """Weights decay, norms and biases do not, the head learns faster; each group has a kernel of Adam of its own."""

    def configure_optimizers(self) -> Any:
        head = [p for n, p in self.named_parameters() if "head" in n]
        decay = [p for n, p in self.named_parameters() if "head" not in n and p.ndim > 1]
        rest = [p for n, p in self.named_parameters() if "head" not in n and p.ndim <= 1]
        return AdamW(
            [
                {"params": decay, "weight_decay": 0.3, "foreach": True},
                {"params": rest, "weight_decay": 0.0, "fused": True},
                {"params": head, "lr": 1e-2, "betas": (0.8, 0.95), "foreach": False, "amsgrad": True},
            ],
            lr=3e-3,
            eps=1e-4,
        )


class Scheduled(Zoo):
    """Schedulers of each kind on one optimizer; overrides ``optimizer_step`` and ``optimizer_zero_grad``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        each_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        each_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)
        # The loss would have to fall by 90 %: every epoch counts as a plateau, whatever the last digit.
        on_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.9)
        return [optimizer], [
            {"scheduler": each_step, "interval": "step"},
            {"scheduler": each_epoch, "interval": "epoch"},
            {"scheduler": on_plateau, "monitor": "train_loss"},
        ]


class ConfiguredClipping(Zoo):
    """Overrides ``configure_gradient_clipping``: clips by hand, by norm and by value, in turn."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        turn = self.trainer.global_step % 3
        if turn == 0:
            norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
            self.extra[f"norm_{self.trainer.global_step}"] = full(norm)
        elif turn == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        else:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


# ---------------------------------------------------------------------------------------------------------------------
# Manual optimization
# ---------------------------------------------------------------------------------------------------------------------


class Manual(Zoo):
    """Accumulates two batches by hand, clips, skips a backward now and then, returns nothing."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.record(self.loss(batch))
        if self.options.get("skips") and batch_idx % 3 == 0:
            return
        self.manual_backward(loss / 2)
        if (batch_idx + 1) % self.options.get("every", 1) == 0:
            if self.options.get("clip"):
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class TwoBackwards(Zoo):
    """Two forwards and two backwards before one step, then the scheduler by hand. Lightning has DDP send buffers once
    then: each rank's statistics are its own."""

    automatic_optimization = False

    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.record(self.loss(batch)))
        self.manual_backward(0.3 * self.record(self.loss((batch[0] + 1, batch[1]))))
        optimizer.step()
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class SplitOptimizers(Zoo):
    """Matrices of the blocks under Muon, everything else under AdamW, both stepped by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        muon, adamw = self.optimizers()
        self.manual_backward(self.record(self.loss(batch)))
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        hidden = [p for n, p in self.named_parameters() if p.ndim == 2 and "blocks" in n]
        rest = [p for n, p in self.named_parameters() if not (p.ndim == 2 and "blocks" in n)]
        return torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1), AdamW(rest, lr=3e-3, eps=1e-4)


class Gan(Zoo):
    """Two networks, two optimizers, ``toggle_optimizer``, the discriminator used twice per step."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.generator, self.discriminator = Net(), nn.Sequential(Net(), nn.Linear(WIDTH, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        optimizer_g, optimizer_d = self.optimizers()

        self.toggle_optimizer(optimizer_g)
        loss = self.record(F.softplus(-self.discriminator(self(z))).mean())
        self.manual_backward(loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        fake = self(z).detach()
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        self.manual_backward(self.record(loss))
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> Any:
        return (
            Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-4),
            SGD(self.discriminator.parameters(), lr=0.05, momentum=0.9),
        )


# ---------------------------------------------------------------------------------------------------------------------
# Parameters: frozen, unused, tied, bare, odd
# ---------------------------------------------------------------------------------------------------------------------


class Frozen(Zoo):
    """A frozen block, a frozen bias in another, a frozen stem; the optimizer is given all but the stem."""

    def build(self) -> None:
        self.net = Net()
        self.net.blocks[1].requires_grad_(False)
        self.net.blocks[0].up.bias.requires_grad_(False)
        self.net.stem.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        given = [p for name, p in self.named_parameters() if "stem" not in name]
        return AdamW(given, lr=1e-2, weight_decay=0.3, eps=1e-4)


class SpareBlock(Block):
    """Has a layer it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Unused(Zoo):
    """Layers no rank uses: in a unit, a unit as a whole, at the root. Weight decay must leave them alone."""

    def build(self) -> None:
        self.net = Net(SpareBlock)
        self.spare_blocks = nn.ModuleList(Block() for _ in range(2))
        self.spare = nn.Linear(WIDTH, WIDTH)

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2, weight_decay=0.5, eps=1e-4)


class UsedInTurn(Zoo):
    """Every rank uses the same block, another one at each step: Adam's state and decay wait for a block's turn."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        turn = len(self.losses) % len(self.net.blocks)
        return F.mse_loss(self.net.head(self.net.blocks[turn](self.net.stem(x))), y)

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2, weight_decay=0.5, eps=1e-4)


class BranchingBlock(Block):
    """Which of its two layers is used depends on the data, so ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + (self.left(x) if _odd_rank() else self.right(x))


class UsedOnSomeRanks(Zoo):
    """Ranks use other layers inside units, and other heads at the root."""

    def build(self) -> None:
        self.net = Net(BranchingBlock)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("even", "odd", "never")})
        self.tail = nn.Parameter(torch.ones(WIDTH))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.net(x)
        return F.mse_loss(self.heads["odd"](x) if _odd_rank() else self.heads["even"](x) * self.tail, y)

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2, weight_decay=0.5, eps=1e-4)


class Sequences(Zoo):
    """Odd ranks run the blocks ``odd``, in that order, and others ``even``."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.net.stem(x)
        for index in self.options["odd" if _odd_rank() else "even"]:
            x = self.net.blocks[index](x)
        return F.mse_loss(self.net.head(x), y)


class SequencesByHand(Sequences, Manual):
    """The same under manual optimization."""


class TiedLanguageModel(Zoo):
    """The embedding is the head. Two blocks share a layer, a third shares a bias with one of them."""

    def build(self) -> None:
        self.embedding = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[2].up = self.blocks[0].up
        self.blocks[1].down.bias = self.blocks[0].down.bias
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


class Bare(Zoo):
    """Parameters and buffers directly on the LightningModule, one buffer updated in each step."""

    def build(self) -> None:
        self.net = Net()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.register_buffer("offset", torch.randn(WIDTH))
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("num_seen", torch.tensor(0))
        self.register_buffer("scratch", torch.randn(WIDTH), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.running.lerp_(x.mean(0), 0.1)  # a different value on every rank: rank 0's is the one that counts
        self.num_seen += len(x)
        return F.mse_loss(self.net(x + self.running + self.offset + self.scratch) @ self.matrix * self.scale, y)


class OddBlock(Block):
    """A block with one parameter of a shape or dtype that few expect; ``odd`` chooses it."""

    def __init__(self, odd: str) -> None:
        super().__init__(ODD, 5)
        self.odd = odd
        make: dict[str, Callable[[], Any]] = {
            "zero_dim": lambda: nn.Parameter(torch.tensor(0.7)),
            "one_element": lambda: nn.Parameter(torch.rand(1)),
            "empty": lambda: nn.Parameter(torch.zeros(0, ODD)),
            "non_contiguous": lambda: nn.Parameter(torch.randn(2 * ODD, ODD).t()[:, ::2] / 3),
            "float64": lambda: nn.Parameter(torch.rand(ODD, dtype=torch.float64)),
        }
        self.extra = make[odd]()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.odd == "empty":
            return x + self.extra.sum()
        if self.odd == "non_contiguous":
            return x + x @ self.extra
        return x * self.extra.to(x.dtype)


class Odd(Zoo):
    """A block with each odd parameter, and one at the root. No dimension of a block divides by 2, 3 or 4."""

    def build(self) -> None:
        self.net = Net(width=ODD)
        self.net.head = nn.Linear(ODD, ODD)
        self.last = nn.Linear(ODD, WIDTH)
        kinds = ("zero_dim", "one_element", "non_contiguous", *self.options.get("more", ("empty", "float64")))
        self.net.blocks = nn.ModuleList(OddBlock(kind) for kind in kinds)
        self.root = OddBlock("zero_dim")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.root(self.net(x)))


class ConvBlock(nn.Module):
    def __init__(self, channels: int = 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Images(Zoo):
    """Convolutions and BatchNorm, with running statistics that differ from rank to rank; in ``channels_last``."""

    def build(self) -> None:
        self.stem = nn.Conv2d(3, 5, 3)
        self.blocks = nn.Sequential(ConvBlock(), ConvBlock())
        self.head = nn.Linear(5, WIDTH)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


# ---------------------------------------------------------------------------------------------------------------------
# Architectures
# ---------------------------------------------------------------------------------------------------------------------


class Transformer(Zoo):
    """``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``."""

    def build(self) -> None:
        self.embedding = nn.Embedding(13, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 13)

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.encoder(self.embedding(tokens), mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class CodecBlock(nn.Module):
    """Never called itself: only its methods are."""

    def __init__(self) -> None:
        super().__init__()
        self.forth = nn.Linear(5, 5)
        self.back = nn.Linear(5, 5)

    def encode(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.forth(x))

    def decode(self, x: Tensor) -> Tensor:
        return x - torch.tanh(self.back(x))


class Autoencoder(nn.Module):
    """Has no ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 5)
        self.codecs = nn.ModuleList(CodecBlock() for _ in range(2))
        self.blocks = nn.ModuleList(Block(5, 7) for _ in range(2))
        self.up = nn.Linear(5, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for codec in self.codecs:
            x = codec.encode(x)
        return x

    def decode(self, z: Tensor) -> Tensor:
        for block in self.blocks:
            z = block(z)
        for codec in reversed(self.codecs):
            z = codec.decode(z)
        return self.up(z)


class OtherMethods(Zoo):
    """A submodule, and repeated blocks in it, that are used through ``encode`` and ``decode``."""

    def build(self) -> None:
        self.model = Autoencoder()

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        return F.mse_loss(self.model.decode(self.model.encode(x)), x)


class Nested(Zoo):
    """Containers in containers, and parameters in containers of their own."""

    def build(self) -> None:
        towers = {
            name: nn.ModuleList(nn.Sequential(Block(), nn.Sequential(Block(), nn.ReLU())) for _ in range(2))
            for name in ("left", "right")
        }
        self.towers = nn.ModuleDict(towers)
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.rand(WIDTH)) for name in towers})
        self.shifts = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in towers)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for (name, tower), shift in zip(self.towers.items(), self.shifts, strict=True):
            branch = x
            for stage in tower:
                branch = stage(branch)
            out = out + branch * self.scales[name] + shift
        return out


class LateBuilt(Zoo):
    """Half of it is built in ``configure_model``, where a lazy layer of ``__init__`` gets its shape."""

    def build(self) -> None:
        self.net = None
        self.entry = nn.LazyLinear(WIDTH)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net()
            self.entry(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.entry(x))


class CalledTwice(Zoo):
    """Blocks shared by use: each is called twice per forward, and the network twice per step; targets are computed
    without gradients before these forwards and after them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        for _ in range(2):
            for block in self.net.blocks:
                x = block(x)
        return self.net.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            before = self(x + 0.1)
        prediction = self(x)
        loss = F.mse_loss(prediction, y) + 0.1 * F.mse_loss(self(-x), -y)
        with torch.no_grad():
            after = self(x - 0.1)
        return loss + 0.1 * F.mse_loss(prediction, (before + after) / 2)


class VaryingOrder(Zoo):
    """Blocks run in their order until the first validation, whose forwards end after the first one and which changes
    the weights: what was gathered ahead for a block that did not come is old. Then another order each time."""

    ORDERS = ((0, 1, 2), (0, 2), (2, 0, 1), (0,), (0, 1))

    def build(self) -> None:
        self.net = Net()
        self.turn = 0
        self.validated = False

    def forward(self, x: Tensor) -> Tensor:
        order: tuple[int, ...] = (0, 1, 2)
        if not self.trainer.sanity_checking and not torch.is_grad_enabled():
            order, self.validated = (0,), True
        elif self.validated:
            order = self.ORDERS[self.turn % len(self.ORDERS)]
            self.turn += 1
        x = self.net.stem(x)
        for i in order:
            x = self.net.blocks[i](x)
        return self.net.head(x)

    @torch.no_grad()
    def on_validation_end(self) -> None:
        for p in self.parameters():
            p.mul_(0.9)


class LastVaries(Zoo):
    """The unit that runs last, which stays gathered until its backward: another one from step to step, one that runs
    again without gradients, is used beside its output, and in other steps is written to before the backward."""

    ORDERS = ((0, 1, 2), (0, 1, 2), (0, 2, 1), (2, 1), (0, 1, 2), (0,))

    def build(self) -> None:
        self.net = Net()
        self.turn = 0

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.net.stem(x)
        order = self.ORDERS[self.turn % len(self.ORDERS)]
        self.turn += 1
        for i in order:
            x = self.net.blocks[i](x)
        with torch.no_grad():
            again = self.net.blocks[self.turn % 3](x)
        loss = F.mse_loss(x, y) + (x - again).square().mean()
        if self.turn % 2:
            return loss + 1e-2 * sum(p.norm() for p in self.net.blocks[order[-1]].parameters())
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        for p in self.net.blocks[2].parameters() if self.turn % 2 == 0 else ():
            p.data.mul_(0.99)


class Checkpointed(Zoo):
    """Activation checkpointing around each block, with dropout inside; the first one's in PyTorch's older way."""

    def build(self) -> None:
        self.net = Net(lambda: nn.Sequential(Block(), nn.Dropout(0.2)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        for index, block in enumerate(self.net.blocks):
            x = checkpoint(block, x, use_reentrant=index == 0)
        return self.net.head(x)


class MomentumTeacher(Zoo):
    """The step itself moves the teacher, between the forward of the network and the teacher's: the stem and a block by
    writes that versions count, a block and the head by assignment (MoCo's published code), a block through ``data``,
    of which autograd and versions see nothing. A hook moves all of it by writes to ``state_dict()``'s values (timm's
    ``ModelEmaV2``, YOLOv5's ``ModelEMA``), and so does the step, between two forwards of the teacher."""

    def build(self) -> None:
        self.net, self.teacher = Net(), Net().requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        prediction = self(x)
        with torch.no_grad():
            self.follow()
            target = self.teacher(x)
            self.teacher.state_dict()["head.bias"].add_(0.01)
            target = target + self.teacher(x)
        return F.mse_loss(prediction, y) + 0.5 * F.mse_loss(prediction, 0.5 * target)

    def follow(self) -> None:
        pairs = zip(self.teacher.named_parameters(), self.net.parameters(), strict=True)
        for (name, slow), fast in pairs:
            if name.startswith(("stem", "blocks.0")):
                slow.mul_(0.8).add_(fast, alpha=0.2)
            elif name.startswith(("blocks.1", "head")):
                slow.data = slow.data * 0.8 + fast.data * 0.2
            else:
                slow.data.mul_(0.8).add_(fast.data, alpha=0.2)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for slow, fast in zip(self.teacher.state_dict().values(), self.net.state_dict().values(), strict=True):
            slow.copy_(0.9 * slow + 0.1 * fast)


class GradientPenalty(Zoo):
    """Backward through a backward: the norm of the output's gradient by the input is part of the loss. The units run
    again afterwards, as in WGAN-GP with the penalty first."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        prediction = self(x)
        (slope,) = torch.autograd.grad(prediction.sum(), x, create_graph=True)
        penalty = 0.1 * (slope.norm(dim=1) - 1).square().mean()
        return F.mse_loss(prediction, y) + penalty + F.mse_loss(self(x + 0.1), y)


class Contrastive(Zoo):
    """The loss compares with every rank's outputs, gathered with their gradients."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self(x[:2])  # the last batch is short on every rank
        everyone = self.all_gather(x, sync_grads=True).reshape(-1, WIDTH)
        return F.mse_loss(x, y[:2]) + 0.01 * torch.tanh(x @ everyone.t()).square().mean()


class TensorHook(Zoo):
    """Hooks on parameters themselves, as for masking gradients, registered before the run and in it: under DDP they see
    this rank's gradient."""

    def build(self) -> None:
        self.net = Net()
        self.net.head.weight.register_hook(lambda grad: grad * 0.5)
        self.net.blocks[0].up.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def on_train_start(self) -> None:
        for block in self.net.blocks:
            block.down.weight.register_hook(lambda grad: grad * 0.1)


class StateInHooks(Zoo):
    """Keeps a deep copy of its ``state_dict`` and goes back to it; runs itself in a hook, and differentiates."""

    def on_train_epoch_start(self) -> None:
        self.kept = copy.deepcopy(self.state_dict())
        self.extra |= {f"kept {self.current_epoch} {name}": full(value) for name, value in self.kept.items()}

    def on_train_epoch_end(self) -> None:
        weight = self.net.head.weight
        torch.testing.assert_close(weight.detach().clone(), weight, rtol=0, atol=0, check_stride=True)
        probe = self(torch.ones(2, WIDTH))
        grads = torch.autograd.grad(probe.square().sum(), list(self.parameters()))  # Fisher information
        self.extra |= {f"fisher {self.current_epoch} {index}": full(grad**2) for index, grad in enumerate(grads)}
        if self.current_epoch == 1:
            self.load_state_dict(self.kept)


# ---------------------------------------------------------------------------------------------------------------------
# Logging, and hooks that look at or touch weights and gradients
# ---------------------------------------------------------------------------------------------------------------------


class Metrics(Zoo):
    """torchmetrics objects, ``self.log`` in its variants, and a step that returns a dictionary."""

    def build(self) -> None:
        import torchmetrics

        self.net = Net()
        self.train_error = torchmetrics.MeanSquaredError()
        self.val_errors = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self(x)
        loss = self.record(F.mse_loss(prediction, y))
        self.train_error(prediction, y)
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        self.log("synced", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log_dict({"largest": prediction.detach().max()}, reduce_fx="max", sync_dist=True, on_epoch=True)
        self.log("only_rank_0", 1.0, rank_zero_only=True)
        return {"loss": loss, "seen": x.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert set(outputs) == {"loss", "seen"}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_errors.update(self(x).flatten(), y.flatten())
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val_{name}": value.float() for name, value in self.val_errors.compute().items()})
        self.val_errors.reset()


class GradientsTouched(Zoo):
    """Reads and scales gradients, as a hand-written clipping or noise would; logs Lightning's ``grad_norm``; filters by
    ``data``, as code from before torch 0.4 and Grokfast's do."""

    def on_after_backward(self) -> None:
        for name, p in self.named_parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
                p.grad.clamp_(-0.02, 0.02)
            if name == "net.head.bias":
                self.extra[f"head_bias_grad_{len(self.losses)}"] = full(p.grad)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        for p in self.parameters():
            assert p.grad is not None
            p.grad.data.mul_(0.5)
            p.grad.data = p.grad.data + 0.01


class IdleBlock(Block):
    """Does not use all that it has."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(x)[:, :1].expand(-1, self.down.in_features))


class Penalty(Zoo):
    """An L2 penalty over ``self.parameters()`` before the forward, and an L1 one on a block from outside, which leaves
    some of its weights unused itself."""

    def build(self) -> None:
        super().build()
        self.net.blocks[1] = IdleBlock()

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().loss(batch) + 0.01 * penalty + 0.01 * self.net.blocks[1].up.weight.abs().sum()


class Writes(Callback):
    """Writes between steps, in many spellings: weights are clamped (Wasserstein GANs), masked by assignment (pruning),
    initialized again and scaled, also right after validation and its forwards."""

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.net.head.bias.mul_(0.9)
        torch.manual_seed(7 + batch_idx)
        module.net.blocks[2].up.reset_parameters()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, p in module.named_parameters():
            p.data.clamp_(-0.2, 0.2)
            if "head" in name or "blocks.1" in name:
                p.data = p.data * (p.data.abs() > 0.05)

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for p in module.net.blocks[0].parameters():
            p.copy_(p * 0.5)

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        nn.init.constant_(module.net.stem.bias, 0.25)


class HandMadeAverage(Callback):
    """A list of clones, followed element by element, and swapped in at the end."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average = [p.detach().clone() for p in module.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, p in zip(self.average, module.parameters(), strict=True):
            average.lerp_(p.detach(), 0.3)

    @torch.no_grad()
    def on_train_end(self, trainer: Any, module: Any) -> None:
        for average, p in zip(self.average, module.parameters(), strict=True):
            p.copy_(average)


class SwapForValidation(HandMadeAverage):
    """The average is what validation sees, too, that of the blocks halved by assignment; training continues with the
    weights themselves."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.kept = [p.detach().clone() for p in module.parameters()]
            HandMadeAverage.on_train_end(self, trainer, module)
            self.data = [p.data for p in module.net.blocks.parameters()]
            for p in module.net.blocks.parameters():
                p.data = 0.5 * p.data

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            for data, p in zip(self.data, module.net.blocks.parameters(), strict=True):
                p.data = data
            for kept, p in zip(self.kept, module.parameters(), strict=True):
                p.data.copy_(kept)


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of module and what it takes to compare it."""

    module: Callable[[], L.LightningModule]
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    dataset: Callable[[], Dataset] = lambda: RandomDataset(KIND_ITEMS)
    validates: bool = False
    """Runs validation each epoch."""
    max_epochs: int = 2
    reference: str = "ddp"
    tolerance: float = 1e-5
    """Largest relative difference of losses, metrics and weights."""
    reason: str = SUM_ORDER
    """Why the tolerance is not 0."""
    unsupported_units: dict[int, str] = field(default_factory=dict)
    """Stage -> pattern of the ``ValueError`` that says what to do instead, when blocks are units and ranks several."""
    unsupported_deepspeed: dict[int, str] = field(default_factory=dict)
    """The same for engine ``deepspeed``, whose units at stage 3 are always the smallest modules."""
    refused: str | None = None
    """At every stage and number of ranks both engines refuse the kind before the first step; the error's pattern."""
    refused_deepspeed: tuple[int, ...] = (1, 2, 3)
    """The stages at which ``deepspeed`` refuses what is ``refused``; at others it trains."""
    deepspeed_refuses: dict[int, str] = field(default_factory=dict)
    """Stage -> pattern of the error, where ``deepspeed`` alone refuses the kind, at any number of ranks."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the strategy that is compared with the reference."""
    compiles: bool = False
    """Takes seconds, and leaves graphs to forget."""
    compile_module: str | None = None
    """``torch.compile(module)`` with this backend is what ``fit`` is given."""

    def refusal(self, engine: str, stage: int) -> str | None:
        """The pattern of the error, if ``engine`` refuses the kind at ``stage`` with any number of ranks."""
        if engine == "fsdp2":
            return self.refused
        return self.deepspeed_refuses.get(stage) or (self.refused if stage in self.refused_deepspeed else None)


SAME_UNITS = r"units .*net\.blocks\.\d.* ran on some ranks only.*units="
SAME_MODULES = r"units .* ran on some ranks only.*stage=2"
UNUSED = "ddp_find_unused_parameters_true"
ADAM = f"{SUM_ORDER}; Adam divides by the root of squared gradients, which magnifies it"


def _of(module: type[Zoo], **options: Any) -> Callable[[], L.LightningModule]:
    return lambda: module(**options)


def _with(make: Callable[[Iterator[nn.Parameter]], Optimizer]) -> Callable[[], L.LightningModule]:
    return _of(Zoo, optimizer=make)


KINDS: dict[str, Kind] = {
    # optimizers
    "sgd_momentum": Kind(
        module=_with(lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)),
    ),
    "adam": Kind(module=_with(lambda p: Adam(p, lr=1e-2, eps=1e-4)), reason=ADAM),
    "adafactor": Kind(module=_with(lambda p: torch.optim.Adafactor(p, lr=1e-2)), reason=ADAM),
    "muon_and_adamw": Kind(
        module=_of(SplitOptimizers),
        tolerance=2e-2,
        reason="Muon orthogonalizes in bfloat16 (8 bits): a last-bit difference in an update becomes 2^-8 of it",
    ),
    "third_party_lamb": Kind(module=_with(lambda p: Lamb(p)), reason=ADAM, tolerance=3e-5),
    "lbfgs": Kind(
        module=_with(lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=3, history_size=4)),
        tolerance=1e-3,
        reason=f"{SUM_ORDER}; LBFGS divides differences of gradients by each other",
    ),
    "parameter_groups": Kind(module=_of(Groups), reason=ADAM),
    # schedulers
    "schedulers_and_optimizer_step_overridden": Kind(module=_of(Scheduled), max_epochs=3),
    # accumulation and clipping
    "accumulation_scheduler": Kind(
        module=_of(Zoo), callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})], max_epochs=3
    ),
    "clip_configured": Kind(module=_of(ConfiguredClipping)),
    "accumulation_and_clip": Kind(
        module=_with(lambda p: AdamW(p, lr=1e-2, eps=1e-4)),
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        dataset=longer,
        reason=ADAM,
    ),
    # manual optimization, several optimizers
    "manual_accumulation_and_clip": Kind(module=_of(Manual, every=2, clip=True, skips=True), reference=UNUSED),
    "manual_two_backwards": Kind(module=_of(TwoBackwards), validates=True, reason=ADAM),
    "gan": Kind(module=_of(Gan), reference=UNUSED, reason=ADAM),
    # frozen, unused, tied
    "frozen": Kind(module=_of(Frozen), reason=ADAM),
    "unused_everywhere": Kind(module=_of(Unused), reference=UNUSED, reason=ADAM),
    "unused_on_some_ranks": Kind(
        module=_of(UsedOnSomeRanks), reference=UNUSED, reason=ADAM, unsupported_deepspeed={3: SAME_MODULES}
    ),
    **{
        f"odd_ranks_run_blocks_{name}": Kind(
            module=_of(kind, odd=odd, even=even),
            trainer=trainer,
            dataset=longer,
            reference=UNUSED,
            reason=ADAM,
            unsupported_units=dict.fromkeys((1, 2, 3), SAME_UNITS),
            unsupported_deepspeed={3: SAME_MODULES},
        )
        for name, kind, odd, even, trainer in (
            ("in_another_order_accumulating", Sequences, (2, 1, 0), (0, 1, 2), {"accumulate_grad_batches": 2}),
            ("but_one_by_hand", SequencesByHand, (0, 2), (0, 1, 2), {}),
        )
    },
    "unused_and_accumulation": Kind(
        module=_of(UsedInTurn),
        trainer={"accumulate_grad_batches": 2},
        dataset=longer,
        reference=UNUSED,
        reason=ADAM,
    ),
    "tied_embedding_and_head": Kind(module=_of(TiedLanguageModel), dataset=TokenDataset),
    # shapes and dtypes
    "bare_parameters_and_buffers": Kind(module=_of(Bare)),
    "odd_shapes": Kind(
        module=_of(Odd, more=(), optimizer=lambda p: AdamW(p, lr=1e-3, eps=1e-4)),
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        dataset=longer,
        reason=ADAM,
    ),
    "odd_shapes_and_dtypes": Kind(
        module=_of(Odd, optimizer=lambda p: AdamW(p, lr=1e-3, eps=1e-4)),
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        dataset=longer,
        reason=ADAM,
        deepspeed_refuses=dict.fromkeys((1, 2, 3), "cannot be trained with engine='deepspeed'"),
    ),
    # architectures
    "batch_norm_channels_last": Kind(module=_of(Images), dataset=ImageDataset, validates=True),
    "transformer": Kind(module=_of(Transformer), dataset=TokenDataset, validates=True),
    "methods_other_than_forward": Kind(module=_of(OtherMethods)),
    "nested_containers": Kind(module=_of(Nested)),
    "built_in_configure_model": Kind(module=_of(LateBuilt)),
    "called_twice": Kind(module=_of(CalledTwice)),
    "varying_order": Kind(module=_of(VaryingOrder), reference=UNUSED, validates=True, max_epochs=3),
    "last_unit_varies": Kind(module=_of(LastVaries), reference=UNUSED),
    "checkpointed": Kind(module=_of(Checkpointed)),
    "teacher_moved_by_steps_and_hooks": Kind(module=_of(MomentumTeacher)),
    "gradient_penalty": Kind(module=_of(GradientPenalty), reference=UNUSED),
    "gathered_across_ranks": Kind(module=_of(Contrastive)),
    "hooks_on_parameters": Kind(module=_of(TensorHook)),
    # logging and hooks
    "metrics_and_logging": Kind(
        module=_of(Metrics), validates=True, tolerance=1e-4, reason=f"{SUM_ORDER}; R2 is a difference of large sums"
    ),
    "gradients_touched": Kind(module=_of(GradientsTouched)),
    "penalty_over_parameters": Kind(module=_of(Penalty), trainer={"accumulate_grad_batches": 2}, dataset=longer),
    "state_dict_in_hooks": Kind(module=_of(StateInHooks), max_epochs=3),
    "writes_in_hooks": Kind(module=_of(Zoo), callbacks=lambda: [Writes()], validates=True),
    "average_swapped_for_validation": Kind(module=_of(Zoo), callbacks=lambda: [SwapForValidation()], validates=True),
}


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one rank could observe."""

    losses: list[float]
    """This rank's, one per call of the loss in ``training_step``."""
    weights: dict[str, Tensor]
    """The final ``state_dict()``."""
    metrics: dict[str, float]
    """``trainer.callback_metrics`` after every batch, as ``"step/name"``, and at the end."""
    extra: dict[str, Tensor]
    """What else the kind recorded."""


class _MetricRecorder(Callback):
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in trainer.callback_metrics.items():
            self.metrics[f"{trainer.current_epoch}.{batch_idx}/{name}"] = float(value)


def make_strategy(settings: Any) -> Any:
    """A registered name and a strategy stay what they are; fields of ``ZeroConfig`` become a ``ZeroStrategy``."""
    if isinstance(settings, str):
        if settings.startswith("zero"):
            import lightning_zero  # noqa: F401  (registers the name)
        return settings
    if not isinstance(settings, dict):
        return settings
    from lightning_zero import ZeroStrategy

    return ZeroStrategy(**settings)


def make_trainer(strategy: Any, **options: Any) -> L.Trainer:
    """A Trainer on the CPU with as many devices as there are ranks, that writes nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": int(os.environ["WORLD_SIZE"]),
            "strategy": make_strategy(strategy),
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tempfile.gettempdir(),
            **options,
        }
    )


def make_module(name: str, different_seeds: bool = False) -> L.LightningModule:
    """A fresh module; with ``different_seeds`` every rank initializes differently (rank 0's is the one that counts)."""
    torch.manual_seed(11 + (1000 * int(os.environ["RANK"]) if different_seeds else 0))
    return KINDS[name].module()


def train(name: str, strategy: str | dict[str, Any], different_seeds: bool = False) -> Result:
    """Fits kind ``name`` on this rank."""
    try:
        return _train(name, strategy, different_seeds)
    finally:
        if KINDS[name].compiles:
            torch._dynamo.reset()  # as long as anything is compiled, some things are done in another way


def _train(name: str, strategy: str | dict[str, Any], different_seeds: bool) -> Result:
    kind = KINDS[name]
    if isinstance(strategy, dict):
        strategy = strategy | kind.settings
    module = make_module(name, different_seeds)
    recorder = _MetricRecorder()
    trainer = make_trainer(
        strategy,
        max_epochs=kind.max_epochs,
        callbacks=[*kind.callbacks(), recorder],
        num_sanity_val_steps=1,
        limit_val_batches=2 if kind.validates else 0,
        **kind.trainer,
    )
    loader = DataLoader(kind.dataset(), batch_size=BATCH)
    given: Any = torch.compile(module, backend=kind.compile_module) if kind.compile_module else module
    trainer.fit(given, loader, DataLoader(kind.dataset(), batch_size=BATCH) if kind.validates else None)
    metrics = recorder.metrics | {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return Result(module.losses, weights, metrics, module.extra)  # type: ignore[arg-type, union-attr]


# ---------------------------------------------------------------------------------------------------------------------
# The comparison
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Largest relative differences; infinite where something is missing, misshaped, not finite or no plain tensor."""

    losses: float
    weights: float
    metrics: float
    worst_weight: str = ""
    worst_metric: str = ""

    @property
    def largest(self) -> float:
        return max(self.losses, self.weights, self.metrics)


def difference(results: list[Result], references: list[Result]) -> Difference:
    """Over all ranks, rank by rank (losses differ between ranks, weights must not)."""
    losses, weights, metrics = 0.0, (0.0, ""), (0.0, "")
    for result, reference in zip(results, references, strict=True):
        losses = max(losses, _relative(torch.tensor(result.losses), torch.tensor(reference.losses)))
        weights = max(weights, largest_difference(result.weights, reference.weights))
        as_tensors = [{k: torch.tensor(v) for k, v in r.metrics.items()} | r.extra for r in (result, reference)]
        metrics = max(metrics, largest_difference(*as_tensors))
    return Difference(losses, weights[0], metrics[0], weights[1], metrics[1])


def largest_difference(values: dict[str, Tensor], references: dict[str, Tensor]) -> tuple[float, str]:
    if values.keys() != references.keys():
        return math.inf, f"names differ: {sorted(values.keys() ^ references.keys())[:5]}"
    return max(((_relative(values[name], references[name]), name) for name in references), default=(0.0, ""))


def _relative(value: Tensor, reference: Tensor) -> float:
    """Largest difference as a part of the reference tensor's largest element."""
    if type(value) is not Tensor or value.shape != reference.shape or value.dtype != reference.dtype:
        return math.inf
    if reference.numel() == 0:
        return 0.0
    value, reference = value.double(), reference.double()
    if not (value.isfinite().all() and reference.isfinite().all()):
        return math.inf
    gap, scale = (value - reference).abs().max().item(), reference.abs().max().item()
    return gap / max(scale, 1e-3)  # what is smaller than 1e-3 throughout is compared absolutely


def full(value: Tensor) -> Tensor:
    """A plain copy of what user code read, gathered if it is a DTensor."""
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def _odd_rank() -> bool:
    return int(os.environ["RANK"]) % 2 == 1


import tests.helpers.beside  # noqa: E402
import tests.helpers.held  # noqa: E402
import tests.helpers.optimizers  # noqa: E402
import tests.helpers.places  # noqa: E402
import tests.helpers.written  # noqa: E402, F401  (all five add kinds, which are made of this module's)
