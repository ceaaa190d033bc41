"""Kinds whose blocks give more than their output, or give it in another way than as tensors in tuples and dicts.

Registered in :data:`tests.helpers.zoo.KINDS`; patterns are those of public packages, named beside each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.zoo import KINDS, UNUSED, WIDTH, Block, Kind, Net, Zoo, _of


class AuxiliaryBlock(nn.Module):
    """Keeps terms of a router, a normalized one and a recurrent one, which it computes after its output."""

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
        ]
        return y


class Auxiliary(Zoo):
    """Losses that blocks keep: of a mixture of experts' router, of a codebook."""

    USE: ClassVar[dict[str, Callable[[Tensor, list[Tensor]], Tensor]]] = {
        "added": lambda loss, terms: loss + 0.3 * sum(terms),
        "first": lambda loss, terms: 0.3 * torch.stack(terms).sum() + loss,
        "alone": lambda loss, terms: torch.stack(terms).mean() + 0.0 * loss.detach(),
        "one": lambda loss, terms: loss + 0.3 * terms[4],
    }

    def build(self) -> None:
        self.net = Net(AuxiliaryBlock)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        terms = [term for block in self.net.blocks for term in block.terms]  # type: ignore[union-attr]
        return self.USE[self.options["use"]](loss, terms)


@dataclass
class Terms:
    """A list of the caller's, and a name."""

    values: list[Tensor]
    total: Tensor


class WritingBlock(Block):
    """Writes a term to what it is given for that, which has ``kind``."""

    WRITE: ClassVar[dict[str, Callable[[Any, Tensor], None]]] = {
        "list": lambda terms, term: terms.append(term),
        "dict": lambda terms, term: terms.update({f"loss {len(terms)}": term}),
        "dataclass": lambda terms, term: setattr(terms, "total", terms.total + term),
    }

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.router, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor, terms: Any = None) -> Tensor:
        y = super().forward(x)
        self.WRITE[self.kind](terms, self.router(y).square().mean())
        return y


class WrittenToArguments(Zoo):
    """Each block is handed something of another kind, to which it adds its loss."""

    ARGUMENTS: ClassVar[dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]]] = {
        "list": (lambda x: [], lambda terms: terms),
        "dict": (lambda x: {}, lambda terms: terms.values()),
        "dataclass": (lambda x: Terms([x], x.square().mean()), lambda terms: [terms.total]),
    }

    def build(self) -> None:
        self.net = Net()
        self.net.blocks = nn.ModuleList(map(WritingBlock, self.ARGUMENTS))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.net.stem(x)
        losses: list[Tensor] = []
        for block, (make, losses_of) in zip(self.net.blocks, self.ARGUMENTS.values(), strict=True):
            terms = make(x)
            x = block(x, terms)
            losses += losses_of(terms)
        return F.mse_loss(self.net.head(x), y) + 0.3 * sum(losses)


class Features(Zoo):
    """Hooks on layers inside blocks take features, and the loss is of those alone (perceptual losses, probes)."""

    def build(self) -> None:
        super().build()
        if self.options["frozen"]:
            self.net.blocks[:-1].requires_grad_(False)  # type: ignore[union-attr]
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
    """A block around another one that gives its output in ``how``."""

    GIVE: ClassVar[dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]]] = {
        "object": (Held, lambda held: held.value),
        "namespace": (lambda y: SimpleNamespace(y=y), lambda given: given.y),
        "distribution": (lambda y: torch.distributions.Normal(y, 1.0), lambda normal: normal.mean),
        "closure": (lambda y: lambda: y, lambda call: call()),
        "generator": (lambda y: iter([y]), next),
        "set": (lambda y: {y}, lambda several: next(iter(several))),
    }

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block, self.give = Block(), self.GIVE[how][0]

    def forward(self, x: Tensor) -> Any:
        return self.give(self.block(x))


class WrappedNet(Net):
    def __init__(self, how: Sequence[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Wrapped, how))
        self.take = [Wrapped.GIVE[each][1] for each in how]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, take in zip(self.blocks, self.take, strict=True):
            x = take(block(x))
        return self.head(x)


class WrappedOutputs(Zoo):
    """Encoders that return a distribution, or any object of their own."""

    def build(self) -> None:
        self.net = WrappedNet(self.options["how"])


class LocalLosses(Auxiliary):
    """Each block is trained by its own loss, and gives a detached output (forward-forward, greedy layers)."""

    def build(self) -> None:
        super().build()
        for block in self.net.blocks:
            block.register_forward_hook(lambda module, args, output: output.detach())


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
        **{f"losses_of_blocks_{use}": Kind(module=_of(Auxiliary, use=use), reference=UNUSED) for use in Auxiliary.USE},
        "losses_in_arguments": Kind(module=_of(WrittenToArguments)),
        **{
            f"losses_of_{name}_recomputed_blocks": Kind(
                module=_of(Auxiliary, use="first"),
                reference=UNUSED,
                settings={"units": ["AuxiliaryBlock"], "activation_checkpointing": name},
                deepspeed_refuses={3: "'selective' with engine='deepspeed' at stage 3"} if name == "selective" else {},
            )
            for name in ("full", "selective")
        },
        **{
            f"features_of_{name}": Kind(module=_of(Features, frozen=frozen), reference=UNUSED)
            for name, frozen in {"hooks": False, "frozen_blocks": True}.items()
        },
        "outputs_in_objects": Kind(
            module=_of(WrappedOutputs, how=("object", "namespace", "distribution", "closure")), validates=True
        ),
        "outputs_in_iterables": Kind(module=_of(WrappedOutputs, how=("generator", "set")), validates=True),
        "local_losses": Kind(module=_of(LocalLosses, use="added"), reference=UNUSED),
        "inputs_changed_in_place": Kind(module=_of(ChangesItsInput), validates=True),
    }
)
