"""Modules built on the meta device, and the runs that fill them."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.helpers.pretrained import hugging_face
from tests.helpers.zoo import Net, Zoo, make_trainer


class Mixed(nn.Module):
    """Tied weights, buffers, a module whose initializer writes to its child's bias, a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.norm = nn.BatchNorm1d(8)
        self.net.head.weight = self.net.stem.weight
        self.scale = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.attention(self.net(x))) * self.scale


class Sum(nn.Module):
    """Looks across nothing: parameters summed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return sum(p.square().sum() for p in self.inner.parameters())  # type: ignore[return-value]


class Rotary(nn.Module):
    """A buffer that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("frequencies", 1.0 / torch.arange(1, 9), persistent=False)

    def reset_parameters(self) -> None:
        self.frequencies.copy_(1.0 / torch.arange(1, 9))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.frequencies


class HalfInitialized(Rotary):
    def reset_parameters(self) -> None:
        self.linear.reset_parameters()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = torch.ones(8)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


MODELS: dict[str, Any] = {
    "mixed": Mixed,
    "rotary": Rotary,
    "half initialized": HalfInitialized,
    "scaled": Scaled,
    "masked": Masked,
    "llama": lambda: Sum(hugging_face("llama")),
}


class Built(L.LightningModule):
    """Builds ``MODELS[kind]`` in ``configure_model`` under the same seed, on the meta device or not."""

    def __init__(self, kind: str, device: str = "meta") -> None:
        super().__init__()
        self.kind, self.device_name = kind, device
        self.losses: list[float] = []
        self.start: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(31)
            with torch.device(self.device_name):
                self.model = MODELS[self.kind]()

    def on_train_start(self) -> None:
        torch.manual_seed(1)
        self.start = {k: v.detach().clone().cpu() for k, v in self.model.state_dict().items()}
        self.start |= {k: v.clone().cpu() for k, v in self.model.named_buffers()}

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = (
            F.mse_loss(self.model(batch), torch.zeros(()))
            if self.kind != "mixed"
            else ((self.model(batch) - batch.flip(0)).square().mean())
        )
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.losses.append(self.model(batch).sum().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def _loader() -> DataLoader[Any]:
    return DataLoader(torch.arange(256.0).view(32, 8).sin(), batch_size=2)  # type: ignore[arg-type]


def fit(kind: str, strategy: Any, device: str = "meta", ckpt_path: str | None = None, save: str | None = None) -> Any:
    """``(losses, values at the start, after the run)``."""
    module = Built(kind, device)
    trainer = make_trainer(strategy, max_steps=5 if ckpt_path else 3, max_epochs=None, limit_val_batches=0)
    trainer.fit(module, _loader(), ckpt_path=ckpt_path)
    if save:
        trainer.save_checkpoint(save)
    return module.losses, module.start, {k: v.clone() for k, v in module.state_dict().items()}


def differences(kind: str, strategy: Any) -> list[str]:
    """Names of what differs from ordinary construction: losses, values at the start and at the end."""
    ordinary, materialized = fit(kind, strategy, "cpu"), fit(kind, strategy)
    differ = ["losses"] if ordinary[0] != materialized[0] else []
    for what, one, other in zip(("start", "end"), ordinary[1:], materialized[1:], strict=True):
        assert one.keys() == other.keys()
        differ += [f"{what} {name}" for name in one if not torch.equal(one[name], other[name])]
    return differ


def validate(kind: str, strategy: Any) -> list[float]:
    """Sums of outputs over the batches, ordinary construction beside meta."""
    sums = []
    for device in ("cpu", "meta"):
        module = Built(kind, device)
        make_trainer(strategy).validate(module, _loader(), verbose=False)
        sums.append(sum(module.losses))
    return sums


def init_module(strategy: Any) -> Any:
    """A module built under ``trainer.init_module(empty_init=True)``; where it lay, and its weights after a fit."""
    trainer = make_trainer(strategy, max_steps=1, limit_val_batches=0)
    with trainer.init_module(empty_init=True):
        module = Zoo()
    lay = {p.device.type for p in module.parameters()}
    torch.manual_seed(int(os.environ["RANK"]))
    trainer.fit(module, DataLoader(torch.utils.data.TensorDataset(*[torch.zeros(8, 8)] * 2), batch_size=2))
    return lay, {k: v.clone() for k, v in module.state_dict().items()}
