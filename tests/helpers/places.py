"""Kinds whose parameters and calls are in places of their own: given to other modules, replaced, made late."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, remove_weight_norm, weight_norm
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.helpers.zoo import KINDS, WIDTH, Kind, Zoo, _of


class GivenToLayers(Zoo):
    """Learned queries: parameters of the module itself are what layers are called with, some without weights."""

    def build(self) -> None:
        super().build()
        self.queries = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.scale = nn.Parameter(torch.randn(1, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.gate = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.norm(self.queries).expand(len(x), -1, -1)
        attended, _ = self.attention(queries, x[:, None], x[:, None])
        return self.net(attended.sum(1) * self.gate(input=self.scale))


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


class GivenToFunctions(Zoo):
    """An ``autograd.Function`` takes parameters: of the module itself, and of a block."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(Times.apply(x, self.scale))
        return Times.apply(y, self.net.blocks[1].norm.weight)


class ValidatedByCopies(Zoo):
    """Validated through an average, and through a copy that is trained on each batch."""

    def on_fit_start(self) -> None:
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        with torch.inference_mode(False), torch.enable_grad():
            adapted = copy.deepcopy(self.net)
            optimizer = SGD(adapted.parameters(), lr=0.1)
            F.mse_loss(adapted(x.clone()), y.clone()).backward()
            optimizer.step()
        self.log("average", F.mse_loss(self.average(x), y), sync_dist=True)
        self.log("adapted", F.mse_loss(adapted(x), y), sync_dist=True)

    def on_fit_end(self) -> None:
        del self.average


class BackwardInHooks(Zoo):
    """Fisher information, taken in hooks by ``loss.backward()``."""

    def on_train_epoch_start(self) -> None:
        self.zero_grad()
        F.mse_loss(self(torch.full((2, WIDTH), 0.5)), torch.ones(2, WIDTH)).backward()
        for name, p in self.named_parameters():
            assert p.grad is not None
            self.extra[f"{self.current_epoch} {name}"] = p.grad**2
        self.zero_grad()


class LazyLayers(Zoo):
    """Lazy layers of ``__init__`` get their shapes in ``configure_model``."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.LazyLinear(2 * WIDTH), nn.ReLU(), nn.LazyLinear(WIDTH))  # type: ignore[assignment]

    def configure_model(self) -> None:
        self.net(torch.zeros(1, WIDTH))


class NewOptimizer(Zoo):
    """Another optimizer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [SGD(self.parameters(), lr=0.01)]


class ChangedAtTheEnd(Zoo):
    """What training needed is taken off in ``on_train_end``: the module stays as it was left there."""

    def build(self) -> None:
        super().build()
        weight_norm(self.net.stem)
        nn.utils.parametrizations.weight_norm(self.net.blocks[0].up)

    def on_train_end(self) -> None:
        remove_weight_norm(self.net.stem)
        parametrize.remove_parametrizations(self.net.blocks[0].up, "weight")
        self.net.blocks[1].down.weight = nn.Parameter(self.net.blocks[1].down.weight.detach() * 2)
        self.net.blocks[2].up.bias = None  # type: ignore[assignment]
        self.net.head = nn.Identity()  # type: ignore[assignment]


OUTSIDE = "loss.backward.. outside of training_step"
PLACES = {
    "parameters_given_to_layers": Kind(module=_of(GivenToLayers)),
    "parameters_given_to_functions": Kind(module=_of(GivenToFunctions)),
    "validated_by_copies": Kind(module=_of(ValidatedByCopies), validates=True),
    "backward_in_hooks": Kind(module=_of(BackwardInHooks), deepspeed_refuses={2: OUTSIDE, 3: OUTSIDE}),
    "lazy_layers": Kind(module=_of(LazyLayers)),
    "optimizer_made_in_mid_run": Kind(module=_of(NewOptimizer)),
    "changed_at_the_end": Kind(module=_of(ChangedAtTheEnd)),
}
KINDS.update(PLACES)
