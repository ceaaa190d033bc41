"""Modules built on the meta device train with the values that ordinary construction would have given them."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.helpers.pretrained import hugging_face, read_in_run
from tests.helpers.ranks import outcome
from tests.helpers.zoo import Net, Zoo, make_trainer

BLOCKS = {"min_unit_numel": 1}


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

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def _loader() -> DataLoader[Any]:
    return DataLoader(torch.arange(256.0).view(32, 8).sin(), batch_size=2)  # type: ignore[arg-type]


def _fit(kind: str, strategy: Any, device: str = "meta", ckpt_path: str | None = None, save: str | None = None) -> Any:
    """``(losses, values at the start, after the run)``."""
    module = Built(kind, device)
    trainer = make_trainer(strategy, max_steps=5 if ckpt_path else 3, max_epochs=None, limit_val_batches=0)
    trainer.fit(module, _loader(), ckpt_path=ckpt_path)
    if save:
        trainer.save_checkpoint(save)
    return module.losses, module.start, {k: v.clone() for k, v in module.state_dict().items()}


def _differences(kind: str, strategy: Any) -> list[str]:
    """Names of what differs from ordinary construction: losses, values at the start and at the end."""
    ordinary, materialized = _fit(kind, strategy, "cpu"), _fit(kind, strategy)
    differ = ["losses"] if ordinary[0] != materialized[0] else []
    for what, one, other in zip(("start", "end"), ordinary[1:], materialized[1:], strict=True):
        assert one.keys() == other.keys()
        differ += [f"{what} {name}" for name in one if not torch.equal(one[name], other[name])]
    return differ


def _init_module(strategy: Any) -> Any:
    """A module built under ``trainer.init_module(empty_init=True)``; where it lay, and its weights after a fit."""
    trainer = make_trainer(strategy, max_steps=1, limit_val_batches=0)
    with trainer.init_module(empty_init=True):
        module = Zoo()
    lay = {p.device.type for p in module.parameters()}
    torch.manual_seed(int(os.environ["RANK"]))
    trainer.fit(module, DataLoader(torch.utils.data.TensorDataset(*[torch.zeros(8, 8)] * 2), batch_size=2))
    return lay, {k: v.clone() for k, v in module.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mixed", {"stage": 3, **BLOCKS}),
        ("rotary", {"stage": 1, "offload": "cpu"}),
        ("rotary", {"stage": 2, "engine": "deepspeed"}),
        ("mixed", {"stage": 3, "engine": "deepspeed"}),
    ],
    ids=str,
)
def test_values_are_those_of_ordinary_construction(kind, settings, ranks2):
    for differ in ranks2(_differences, kind, settings):
        assert differ == []


# -- what cannot be filled -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("scaled", "model.scale"),
        ("half initialized", "model.frequencies"),
        ("masked", "model.mask"),
    ],
)
def test_what_has_no_initializer_is_named_on_all_ranks(kind, named, ranks2):
    for error, text in ranks2(outcome, _fit, kind, {"stage": 3, **BLOCKS}):
        assert error == "ValueError"
        assert f"'{named}'" in text
        assert "linear" not in text
        assert "reset_parameters" in text


# -- values from files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "form"), [("mixed", "file"), ("scaled", "sharded")])
def test_a_checkpoint_fills_what_has_no_initializer(kind, form, ranks2, tmp_path):
    path, settings = str(tmp_path / "x.ckpt"), {"stage": 3, **BLOCKS}
    saved = ranks2(_fit, kind, {**settings, "checkpoint": form}, "cpu", None, path)
    ordinary = ranks2(_fit, kind, settings, "cpu", path)
    materialized = ranks2(_fit, kind, settings, "meta", path)
    for one, other in zip(ordinary, materialized, strict=True):
        assert one[0] == other[0]
        assert len(one[0]) == 2
        for name, value in saved[0][2].items():
            assert torch.equal(other[1][name.removeprefix("model.")], value)
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


def test_models_from_config_read_published_weights(ranks2, tmp_path):
    pytest.importorskip("transformers.core_model_loading")  # transformers 4 cannot recompute its buffers
    torch.manual_seed(5)
    model = hugging_face("mixtral")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    weights = model.state_dict()
    args = ({"stage": 3, **BLOCKS}, hugging_face, ("mixtral",), str(tmp_path), "configure_model")
    for keys, seen in ranks2(_read_on_meta, *args):
        assert keys == ([], [])
        assert seen.keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(seen[name], value), name


def _read_on_meta(*args):
    return read_in_run(*args, meta=True)


def test_models_from_config_initialize_themselves(ranks2):
    """Spread and constants are those of ordinary construction, and so are buffers; transformers draws twice there, so
    the numbers are others."""
    pytest.importorskip("transformers.core_model_loading")  # transformers 4 cannot recompute its buffers
    torch.manual_seed(0)
    ordinary = hugging_face("llama")
    buffers = {f"inner.{name}": b for name, b in ordinary.named_buffers()}
    for _, start, _ in ranks2(_fit, "llama", {"stage": 3, **BLOCKS}):
        for name, value in ordinary.state_dict().items():
            found = start[f"inner.{name}"]
            if value.numel() > 100 and value.std() > 0:
                assert found.std().item() == pytest.approx(value.std().item(), rel=0.3), name
                assert found.mean().item() == pytest.approx(value.mean().item(), abs=0.6 * value.std().item()), name
            elif value.std() == 0:
                assert torch.equal(found, value), name
        for name, value in buffers.items():
            assert torch.equal(start[name], value), name


def test_init_module_with_empty_init(ranks2):
    (lay, one), (_, other) = ranks2(_init_module, "zero3")
    assert lay == {"meta"}
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(value.isfinite().all() and value.std() > 0 for value in one.values() if value.dim() > 1)
