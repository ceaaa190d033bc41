"""Kinds whose parameters and calls are in places of their own: given to other modules, replaced by what is derived of
them, made late. Patterns of meta-learning, modulated layers and continual learning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, remove_weight_norm, weight_norm
from torch.optim import SGD

from tests.helpers.zoo import KINDS, UNUSED, WIDTH, Block, Kind, Net, Zoo, _of, longer


class Times(torch.autograd.Function):
    """``x * weight``, (B, N) and (N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Given(Zoo):
    """Layers, some without weights, are called with parameters of the module itself (learned queries). Functions take
    parameters, too, of the module and of blocks, before their forward and after it: an ``autograd.Function`` and
    torch's own."""

    def build(self) -> None:
        super().build()
        self.queries = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.gate = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.net.blocks[0], self.net.blocks[-1]
        queries = self.norm(self.queries).expand(len(x), -1, -1)
        x = self.attention(queries, x[:, None], x[:, None])[0].sum(1) * self.gate(input=self.scale)
        x = F.linear(x, last.down.weight.mean(1, keepdim=True).expand(-1, WIDTH) / 4)
        y = self.net(Times.apply(x, self.scale))
        y = F.linear(F.linear(y, first.up.weight, first.up.bias), first.down.weight)
        return Times.apply(y, self.net.blocks[1].norm.weight)


class BackwardInHooks(Zoo):
    """Fisher information, taken in hooks by ``loss.backward()``."""

    def on_train_epoch_start(self) -> None:
        self.zero_grad()
        F.mse_loss(self(torch.full((2, WIDTH), 0.5)), torch.ones(2, WIDTH)).backward()
        for name, p in self.named_parameters():
            assert p.grad is not None
            self.extra[f"{self.current_epoch} {name}"] = p.grad**2
        self.zero_grad()


class NewOptimizer(Zoo):
    """Another optimizer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [SGD(self.parameters(), lr=0.01)]


class Parametrized(Zoo):
    """Weight norm and spectral norm: the weight is computed from other parameters and buffers at each use. Some are
    taken off in ``on_train_end``: the module stays as it was left there."""

    def build(self) -> None:
        super().build()
        weight_norm(self.net.stem)
        for block in self.net.blocks:
            parametrizations.weight_norm(block.up)
            parametrizations.spectral_norm(block.down)

    def on_train_end(self) -> None:
        remove_weight_norm(self.net.stem)
        parametrize.remove_parametrizations(self.net.blocks[0].up, "weight")
        norm = self.net.blocks[1].norm
        norm.weight = nn.Parameter(norm.weight.detach() * 2)
        self.net.blocks[2].up.bias = None  # type: ignore[assignment]
        self.net.head = nn.Identity()  # type: ignore[assignment]


class FastWeights(Zoo):
    """MAML's inner step on some weights of each block, then the loss of ``functional_call`` with the stepped ones.
    Other weights are replaced among the layer's own parameters for a while, as package higher does it."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        names, values = zip(*((n, p) for n, p in self.net.named_parameters() if ".up." in n), strict=True)
        grads = torch.autograd.grad(F.mse_loss(self.net(x[:2]), y[:2]), values, create_graph=True)
        stepped = {n: p - 0.1 * g for n, p, g in zip(names, values, grads, strict=True)}
        layers = [block.down for block in self.net.blocks]  # type: ignore[union-attr]
        before = [layer._parameters["weight"] for layer in layers]
        for layer, weight in zip(layers, before, strict=True):
            layer._parameters["weight"] = 1.1 * weight
        try:
            return F.mse_loss(torch.func.functional_call(self.net, stepped, (x,)), y)
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


class View(nn.Module):
    """A parametrization whose result lies in the parameter's memory."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.view(-1).view(weight.shape)


class Cached(Zoo):
    """``parametrize.cached()`` around a step that computes with weights beside the blocks, before them and after."""

    def build(self) -> None:
        super().build()
        for block in self.net.blocks:
            parametrizations.weight_norm(block.up)  # type: ignore[union-attr]
            parametrize.register_parametrization(block.down, "weight", View(), unsafe=True)  # type: ignore[union-attr]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        blocks: Any = self.net.blocks
        with parametrize.cached():
            penalty = 0.1 * sum(block.up.weight.square().mean() for block in blocks)
            loss = F.mse_loss(self.net(self.net(x)), y) + penalty
            return loss + 0.1 * sum(block.down.weight.square().mean() for block in blocks)


class FeaturesOfHook(Zoo):
    """A trained encoder runs in ``on_after_batch_transfer``; the step's batch has its graph."""

    def build(self) -> None:
        super().build()
        self.encoder = Net()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return self.encoder(x), y


OUTSIDE = "loss.backward.. outside of training_step"
KINDS.update(
    {
        "parameters_given_to_layers_and_functions": Kind(module=_of(Given)),
        "backward_in_hooks": Kind(module=_of(BackwardInHooks), deepspeed_refuses={2: OUTSIDE, 3: OUTSIDE}),
        "optimizer_made_in_mid_run": Kind(module=_of(NewOptimizer)),
        "parametrized_and_changed_at_the_end": Kind(module=_of(Parametrized)),
        "maml_and_fast_weights": Kind(
            module=_of(FastWeights), trainer={"accumulate_grad_batches": 2}, dataset=longer, reference=UNUSED
        ),
        "modulated_by_weights": Kind(module=_of(Modulated)),
        "cached_parametrizations": Kind(module=_of(Cached)),
        "features_of_a_batch_hook": Kind(module=_of(FeaturesOfHook)),
    }
)
