"""The engine ``deepspeed`` with the user's DeepSpeed config, and its recomputation."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero
from tests.helpers.ranks import outcome

pytest.importorskip("deepspeed")

FILE = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
    },
}


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.calls: list[int] = []

    def training_step(self, batch: Any) -> Any:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def _fit(strategy: dict[str, Any] | str, kind: type = Small, **trainer: Any) -> Any:
    torch.manual_seed(1)
    module = kind()
    data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=2)
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_steps": 4, **trainer}
    run = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy if isinstance(strategy, str) else lightning_zero.ZeroStrategy(**strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    run.fit(module, data)
    return [p.detach().clone() for p in module.parameters()], module.calls


def _fit_seeing_kernels(settings: dict[str, Any]) -> Any:
    """Beside the weights what ``fused`` is in each step."""
    home: Any = import_module("torch.optim.adam")  # torch.optim.adam as an attribute is gone
    with mock.patch.object(home, "adam", wraps=home.adam) as computes:
        weights, *_ = _fit(settings)
    return weights, [call.kwargs["fused"] for call in computes.call_args_list]


def test_adam_is_fused_in_host_memory(ranks2: Any) -> None:
    want, _ = ranks2(_fit, "ddp")[0]
    zero = {**FILE["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    file = {**FILE, "zero_optimization": zero}
    for got, seen in ranks2(_fit_seeing_kernels, {"engine": "deepspeed", "deepspeed_config": file}):
        assert seen == [True] * 4
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"gradient_accumulation_steps": 2}, ["accumulation_steps=2", "accumulate_grad_batches=4"]),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket": 1}},
            ["DeepSpeedZeroConfig", "reduce_bucket", "not permitted"],
        ),
    ],
    ids=["accumulation", "key"],
)
def test_mistakes_are_errors_on_every_rank(ranks2: Any, changes: Any, parts: list[str]) -> None:
    """The second one is found by DeepSpeed itself."""
    for error, message in ranks2(_outcome, {"engine": "deepspeed", "deepspeed_config": {**FILE, **changes}}):
        assert error in ("ValueError", "ValidationError"), message
        for part in parts:
            assert part in message


def _outcome(settings: Any) -> Any:
    return outcome(lambda: _fit(settings))


class Blocks(Small):
    """Blocks with a residual around them and an input that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)) for _ in range(3))
        self.num_calls = 0
        self.layers[0][0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_calls += 1

    def training_step(self, batch: Any) -> Any:
        x = batch[0]  # requires no gradient: the first unit has to be told that its parameters do
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(self.num_calls)


def _fit_blocks(settings: dict[str, Any]) -> Any:
    return _fit(settings, Blocks, accumulate_grad_batches=2, max_steps=2)


def test_recomputed_activations_change_nothing(ranks2: Any) -> None:
    settings = {"engine": "deepspeed", "stage": 3}
    recomputes = {
        "units": ["Sequential"],
        "activation_checkpointing": {"target": "full", "offload": True},
    }
    want, calls = ranks2(_fit_blocks, settings)[0]
    got, more_calls = ranks2(_fit_blocks, {**settings, **recomputes})[0]
    assert more_calls == [2 * number for number in calls]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
