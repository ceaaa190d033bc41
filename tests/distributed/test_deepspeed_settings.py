"""The engine ``deepspeed`` from its own files: who makes the optimizer, what is checked against the run, and when."""

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
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2, "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
    },
}


class NoOptimizer(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.rates: list[float] = []
        self.kinds: set[str] = set()

    def training_step(self, batch: Any) -> Any:
        return self.layers(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.kinds.add(type(getattr(optimizer, "_optimizer", optimizer)).__name__)


class OwnOptimizer(NoOptimizer):
    """What the file says, by hand."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 2))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _fit(strategy: dict[str, Any] | str, kind: type = NoOptimizer, batch_size: int = 2, **trainer: Any) -> Any:
    torch.manual_seed(1)
    module = kind()
    data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=batch_size)
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
    assert "configure_optimizers" not in vars(module)
    return [p.detach().clone() for p in module.parameters()], module.rates, sorted(module.kinds)


def test_a_files_optimizer_and_schedule_serve_where_the_module_has_none(ranks2: Any) -> None:
    """As DDP with the same optimizer and schedule in the module."""
    want, rates, kinds = ranks2(_fit, "ddp", OwnOptimizer)[0]
    for got, its_rates, its_kinds in ranks2(_fit, {"engine": "deepspeed", "deepspeed_config": FILE}):
        assert its_rates == rates
        assert its_kinds == kinds == ["AdamW"]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert rates[2] > rates[1]  # the schedule did something


def _fit_seeing_kernels(settings: dict[str, Any]) -> Any:
    """Beside the weights what ``fused`` is in each step."""
    home: Any = import_module("torch.optim.adam")  # torch.optim.adam as an attribute is gone
    with mock.patch.object(home, "adam", wraps=home.adam) as computes:
        weights, *_ = _fit(settings)
    return weights, [call.kwargs["fused"] for call in computes.call_args_list]


def test_a_files_adam_is_fused_in_host_memory(ranks2: Any) -> None:
    want, *_ = ranks2(_fit, "ddp", OwnOptimizer)[0]
    zero = {**FILE["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    file = {**FILE, "zero_optimization": zero}
    for got, seen in ranks2(_fit_seeing_kernels, {"engine": "deepspeed", "deepspeed_config": file}):
        assert seen == [True] * 4
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("trainer", "parts"),
    [
        ({"batch_size": 8}, ["train_batch_size=16", "this run has 64", "batch_size=8"]),
        ({"accumulate_grad_batches": 2}, ["accumulation_steps=4", "accumulate_grad_batches=2"]),
    ],
    ids=["batch_size", "accumulation"],
)
def test_contradictions_are_errors_on_every_rank(ranks2: Any, trainer: Any, parts: list[str]) -> None:
    for error, message in ranks2(_outcome, {"engine": "deepspeed", "deepspeed_config": FILE}, trainer):
        assert error == "ValueError", message
        for part in parts:
            assert part in message


def _outcome(settings: Any, trainer: dict[str, Any]) -> Any:
    return outcome(lambda: _fit(settings, **trainer))


class Blocks(OwnOptimizer):
    """Blocks with a residual around them and an input that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)) for _ in range(3))
        self.calls = 0
        self.layers[0][0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def training_step(self, batch: Any) -> Any:
        x = batch[0]  # requires no gradient: the first unit has to be told that its parameters do
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(float(self.calls))


def _fit_blocks(settings: dict[str, Any]) -> Any:
    return _fit(settings, Blocks, accumulate_grad_batches=2, max_steps=2)


def test_recomputed_activations_change_nothing(ranks2: Any) -> None:
    settings = {"engine": "deepspeed", "stage": 3}
    recomputes = {
        "units": ["Sequential"],
        "activation_checkpointing": {"target": "full", "offload": True},
    }
    want, calls, _ = ranks2(_fit_blocks, settings)[0]
    got, more_calls, _ = ranks2(_fit_blocks, {**settings, **recomputes})[0]
    assert more_calls == [2 * number for number in calls]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
