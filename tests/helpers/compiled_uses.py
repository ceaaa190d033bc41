"""Compiled code that uses parameters outside of their unit's forward: one module for each way.

``options["backend"]`` compiles it, ``None`` does not. ``seen`` is what is compared: losses, and what hooks have read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader

from tests.helpers import zoo
from tests.helpers.zoo import WIDTH, Block, Net, Zoo


class Uses(Zoo):
    """``self.use`` is :meth:`used`, compiled."""

    def build(self) -> None:
        self.seen: list[float] = []
        self.net = self.make_net()
        self.use = self.compiled(self.used)

    def make_net(self) -> nn.Module:
        return Net()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        backend = self.options["backend"]
        return function if backend is None else torch.compile(function, backend=backend)

    def compile_each(self, blocks: Any) -> None:
        if self.options["backend"] is not None:
            for block in blocks:
                block.compile(backend=self.options["backend"])

    def used(self, parameters: list[Tensor]) -> Any:
        return sum(p.square().sum() for p in parameters)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @property
    def weights(self) -> list[Tensor]:
        return list(self.net.parameters())


class UsedAround(Uses):
    """Before anything is gathered: every second step reads parameters, the others write to them; a hook averages."""

    def build(self) -> None:
        super().build()
        self.averages = [torch.zeros(p.shape) for p in self.weights]
        self.write, self.average = self.compiled(self.written), self.compiled(self.averaged)

    def written(self, parameters: list[Tensor]) -> None:
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.99)

    def averaged(self, averages: list[Tensor], parameters: list[Tensor]) -> None:
        with torch.no_grad():
            for average, p in zip(averages, parameters, strict=True):
                average.lerp_(p, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            penalty = 1e-2 * self.use(self.weights)
            return self.loss(batch) + penalty
        self.write(self.weights)
        return self.loss(batch)

    def on_train_batch_end(self, *unused: Any) -> None:
        self.average(self.averages, self.weights)
        self.seen.append(sum(float(average.sum()) for average in self.averages))


class _Reader(nn.Module):
    """A block that also multiplies with another block's weight."""

    def __init__(self, other: _Reader | None = None) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.other = [other]  # not a child

    def forward(self, x: Tensor) -> Tensor:
        other = self.other[0]
        return self.own(x) + (0 if other is None else F.linear(x, other.own.weight))


class WeightOfAnotherUnit(Uses):
    """As a head that is tied to an embedding by a call of ``F.linear``."""

    def make_net(self) -> nn.Module:
        first = _Reader()
        net = nn.Sequential(nn.ModuleList([first, _Reader(first), _Reader(first)]))
        self.compile_each(net[0])
        return net

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net[0]:  # type: ignore[index]
            x = block(x)
        return x


class _Penalized(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.penalty = self.up.weight.square().sum()
        return y


class PenaltyBesideOutput(Uses):
    """Made inside a unit; every second loss is of it alone, so that no gradient passes through the unit's output.

    A graph has zeros where eager has no gradient, under DDP too, so the optimizer is one that takes them alike.
    """

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.05)

    def make_net(self) -> nn.Module:
        net = Net(_Penalized)
        self.compile_each(net.blocks)
        return net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        penalty = 1e-2 * sum(block.penalty for block in self.net.blocks)  # type: ignore[union-attr]
        return penalty if batch_idx % 2 else loss + penalty


class _Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class WrittenInForward(Uses):
    def make_net(self) -> nn.Module:
        net = Net(_Clamped)
        self.compile_each(net.blocks)
        return net


class DataAssigned(Uses):
    """Refused: it would take the memory that a parameter is gathered into."""

    def used(self, parameters: list[Tensor]) -> None:
        for p in parameters:
            p.data = p * 0.99

    def on_train_batch_end(self, *unused: Any) -> None:
        self.use(self.weights)


USES = (UsedAround, WeightOfAnotherUnit, PenaltyBesideOutput, WrittenInForward)


class _Losses(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.seen.append(float(outputs["loss"]))


def seen(kind: type[Uses], strategy: Any, backend: str | None) -> list[float]:
    """Of a fit over two epochs."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    module = kind(backend=backend)
    trainer = zoo.make_trainer(strategy, callbacks=[_Losses()], num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    return module.seen


def seen_both_ways(kind: type[Uses], strategy: Any, backend: str) -> tuple[list[float], list[float]]:
    """What was seen uncompiled, and compiled."""
    return seen(kind, strategy, None), seen(kind, strategy, backend)
