"""Kinds that compute with tensors derived from weights, where a block's own weights would stand or beside it.

Registered in :data:`tests.helpers.zoo.KINDS`; patterns of meta-learning, modulated layers and penalties.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.helpers.zoo import KINDS, UNUSED, Block, Kind, Net, Zoo, _of, longer


class FastWeights(Zoo):
    """Some weights of each block are replaced by what is computed of themselves: MAML's inner loop, weight noise."""

    def forward(self, x: Tensor) -> Tensor:
        some = {name: 1.1 * p for name, p in self.net.named_parameters() if ".up." in name}
        return torch.func.functional_call(self.net, some, (x,))


class InParameters(Zoo):
    """As package higher and hand-written MAML do it: what is derived lies among the layer's parameters for a while."""

    def forward(self, x: Tensor) -> Tensor:
        layers = [block.up for block in self.net.blocks]  # type: ignore[union-attr]
        before = [layer._parameters["weight"] for layer in layers]
        for layer, weight in zip(layers, before, strict=True):
            layer._parameters["weight"] = 1.1 * weight
        try:
            return self.net(x)
        finally:
            for layer, weight in zip(layers, before, strict=True):
                layer._parameters["weight"] = weight


class ModulatedBlock(Block):
    """Is given the weight of its first layer."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:  # type: ignore[override]
        weight = self.up.weight if weight is None else weight
        return x + self.down(torch.tanh(F.linear(self.norm(x), weight, self.up.bias)))


class Modulated(Zoo):
    """The first block is given a weight that is derived of its own, the others of each other's."""

    def build(self) -> None:
        self.net = Net(ModulatedBlock)

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.net.blocks
        x = self.net.stem(x)
        for number, block in enumerate(blocks):
            x = block(x, torch.tanh(blocks[-number].up.weight))
        return self.net.head(x)


class IdleBlock(Block):
    """Does not use all that it has."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(x)[:, :1].expand(-1, self.down.in_features))


class PenaltyBefore(Zoo):
    """A penalty on weights that their block does not use, taken before the block runs."""

    def build(self) -> None:
        self.net = Net(IdleBlock)

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(block.up.weight.square().mean() for block in self.net.blocks)  # type: ignore[union-attr]
        return super().loss(batch) + 0.1 * penalty


class View(nn.Module):
    """A parametrization whose result lies in the parameter's memory."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.view(-1).view(weight.shape)


class Cached(Zoo):
    """``parametrize.cached()`` around a step that computes with weights beside the blocks, ``before`` or after them."""

    def build(self) -> None:
        super().build()
        for block in self.net.blocks:
            if self.options["views"]:
                parametrize.register_parametrization(block.up, "weight", View(), unsafe=True)  # type: ignore[union-attr]
            else:
                parametrizations.weight_norm(block.up)  # type: ignore[union-attr]

    def penalty(self) -> Tensor:
        return 0.1 * sum(block.up.weight.square().mean() for block in self.net.blocks)  # type: ignore[union-attr]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with parametrize.cached():
            if self.options["before"]:
                penalty = self.penalty()
                return F.mse_loss(self.net(x), y) + penalty
            return F.mse_loss(self.net(self.net(x)), y) + self.penalty()


class StoppedViews(Zoo):
    """Products with parts and transposes of detached weights, and a leaf made of one."""

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        first, second = self.net.blocks[0], self.net.blocks[1]
        hidden: Tensor = first(self.net.stem(x))
        weight: Tensor = second.up.weight  # type: ignore[assignment, union-attr]
        with torch.no_grad():
            row = weight[0]
        leaf = second.down.weight.detach().contiguous().requires_grad_()  # type: ignore[union-attr]
        (slope,) = torch.autograd.grad(leaf.square().sum(), leaf)
        beside = (hidden @ weight.detach().T).square().mean() + (hidden * row).mean() + slope.mean() * hidden.mean()
        return super().loss(batch) + 0.1 * beside


class MultiGradHooks(Zoo):
    """Counts the backwards of a block, by a hook of all its parameters that is registered before training and by one
    in each step."""

    def build(self) -> None:
        super().build()
        self.calls = self.calls_of_steps = 0

    def on_train_start(self) -> None:
        register_multi_grad_hook([*self.net.blocks[1].parameters()], self.count)

    def count(self, grads: Any) -> None:
        self.calls += 1
        self.extra["calls"] = torch.tensor(float(self.calls))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        register_multi_grad_hook([*self.net.blocks[2].parameters(), *self.net.head.parameters()], self.count_of_steps)
        return loss

    def count_of_steps(self, grads: Any) -> None:
        self.calls_of_steps += 1
        self.extra["calls of steps"] = torch.tensor(float(self.calls_of_steps))


class ShallowCopy(Zoo):
    """Another object with a block's layers, made before the run and called beside the block."""

    def build(self) -> None:
        super().build()
        self.others = [copy.copy(self.net.blocks[1])]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.others[0](self.net.stem(x)).mean()


class FeaturesOfHook(Zoo):
    """A trained encoder runs in ``on_after_batch_transfer``; the step's batch has its graph."""

    def build(self) -> None:
        super().build()
        self.encoder = Net()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return self.encoder(x), y


KINDS.update(
    {
        "fast_weights_of_some": Kind(module=_of(FastWeights), trainer={"accumulate_grad_batches": 2}, dataset=longer),
        "fast_weights_among_parameters": Kind(module=_of(InParameters)),
        "modulated_by_weights": Kind(module=_of(Modulated)),
        "penalty_before_a_block_without": Kind(module=_of(PenaltyBefore), reference=UNUSED),
        "cached_weight_norm": Kind(module=_of(Cached, views=False, before=True)),
        "cached_views": Kind(module=_of(Cached, views=True, before=False)),
        "views_of_detached_weights": Kind(module=_of(StoppedViews), reference=UNUSED),
        "multi_grad_hooks": Kind(module=_of(MultiGradHooks)),
        "shallow_copy_of_a_block": Kind(module=_of(ShallowCopy)),
        "features_of_a_batch_hook": Kind(module=_of(FeaturesOfHook)),
    }
)
