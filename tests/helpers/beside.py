"""Kinds whose blocks give more than their output, or give it in another way than as tensors in tuples and dicts.

Registered in :data:`tests.helpers.zoo.KINDS`; patterns are those of public packages, named beside each.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.zoo import KINDS, UNUSED, WIDTH, Block, Kind, Net, Zoo, _of


class AuxiliaryBlock(nn.Module):
    """Keeps terms of a router, a normalized one, a recurrent one and one of its own weights (Bayesian layers), which it
    computes after its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.cell = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.layer(x))
        sequence, last = self.cell(y[:, None])
        self.terms = [
            self.router(y).square().mean(),
            F.gelu(self.norm(y)).mean(),
            sequence.mean() + last.square().mean(),
            sum(p.square().sum() * p.exp().mean() for p in self.layer.parameters()),
        ]
        return y


class Auxiliary(Zoo):
    """Losses that blocks keep: of a mixture of experts' router, of a codebook. Each step adds them in another way."""

    USE: ClassVar[tuple[Callable[[Tensor, list[Tensor]], Tensor], ...]] = (
        lambda loss, terms: loss + 0.3 * sum(terms),
        lambda loss, terms: 0.3 * torch.stack(terms).sum() + loss,
        lambda loss, terms: torch.stack(terms).mean() + 0.0 * loss.detach(),
        lambda loss, terms: loss + 0.3 * terms[5],
    )

    def build(self) -> None:
        self.net = Net(AuxiliaryBlock)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        terms = [term for block in self.net.blocks for term in block.terms]  # type: ignore[union-attr]
        return self.USE[len(self.losses) % len(self.USE)](loss, terms)


class WritingBlock(Block):
    """Appends a term to the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, terms: list[Tensor]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        terms.append(self.router(y).square().mean())
        return y


class WrittenToArguments(Zoo):
    """Blocks are handed a list, to which they add their losses."""

    def build(self) -> None:
        self.net = Net(WritingBlock)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.net.stem(x)
        terms: list[Tensor] = [x.square().mean()]
        for block in self.net.blocks:
            x = block(x, terms)
        return F.mse_loss(self.net.head(x), y) + 0.3 * sum(terms)


class Features(Zoo):
    """Hooks on layers inside blocks take features, and the loss is of those alone (perceptual losses, probes)."""

    def build(self) -> None:
        super().build()
        self.net.blocks[0].requires_grad_(False)
        self.features: list[Tensor] = []
        for block in self.net.blocks:
            block.down.register_forward_hook(lambda module, args, output: self.features.append(output))

    def loss(self, batch: Any) -> Tensor:
        self.features.clear()
        self.net(batch[0])
        return sum((feature.square().mean() for feature in self.features), torch.zeros(()))


class Held:
    """An output of a class of its own, as ``torch.distributions`` and ``BatchEncoding`` are."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapped(nn.Module):
    """A block around another one that takes keywords alone and gives its output in ``how``."""

    GIVE: ClassVar[dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]]] = {
        "object": (Held, lambda held: held.value),
        "namespace": (lambda y: SimpleNamespace(y=y), lambda given: given.y),
        "distribution": (lambda y: torch.distributions.Normal(y, 1.0), lambda normal: normal.mean),
        "closure": (lambda y: lambda: y, lambda call: call()),
        "dict": (lambda y: {"hidden": y, "gain": 0.9}, lambda state: state["gain"] * state["hidden"]),
    }

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block, self.give = Block(), self.GIVE[how][0]

    def forward(self, *, hidden: Tensor) -> Any:
        return self.give(self.block(hidden))


class WrappedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Wrapped, Wrapped.GIVE))
        self.take = [take for _, take in Wrapped.GIVE.values()]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, take in zip(self.blocks, self.take, strict=True):
            x = take(block(hidden=x))
        return self.head(x)


class WrappedOutputs(Zoo):
    """Encoders that return a distribution, or any object of their own."""

    def build(self) -> None:
        self.net = WrappedNet()


class PreActivation(nn.Module):
    """Changes its input in place first, as a pre-activation residual block with ``inplace=True`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.activate, self.up, self.down = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activate(x)
        return x + self.down(F.gelu(self.up(x)))


class ChangesItsInput(Zoo):
    """Blocks that change what they are given in place; one looks at it afterwards."""

    def build(self) -> None:
        self.net = Net(PreActivation)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        stem = self.net.stem(x)
        given = stem.add(0.1)
        for block in self.net.blocks:
            before = given
            given = block(given) + 0.1 * before
        return F.mse_loss(self.net.head(given), y)


KINDS.update(
    {
        "losses_of_blocks": Kind(module=_of(Auxiliary), reference=UNUSED),
        "losses_in_arguments": Kind(module=_of(WrittenToArguments)),
        **{
            f"losses_of_{name}_recomputed_blocks": Kind(
                module=_of(Auxiliary),
                reference=UNUSED,
                settings={"units": ["AuxiliaryBlock"], "activation_checkpointing": name},
                deepspeed_refuses={3: "'selective' with engine='deepspeed' at stage 3"} if name == "selective" else {},
            )
            for name in ("full", "selective")
        },
        "features_of_hooks": Kind(module=_of(Features), reference=UNUSED),
        "outputs_in_objects": Kind(module=_of(WrappedOutputs), validates=True),
        "inputs_changed_in_place": Kind(module=_of(ChangesItsInput), validates=True),
    }
)
