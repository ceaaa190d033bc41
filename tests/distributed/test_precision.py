"""Each precision stores, gathers and reduces in the dtypes it promises, and trains as DDP does.

What a failure localises: the dtypes seen inside and outside a step belong to ``precision.DtypePolicy``; a difference
from DDP under ``*-true`` to the engine; a step that one rank took and another skipped to ``ZeroMixedPrecision``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import zoo
from tests.helpers.ranks import outcome

TOLERANCE = {
    # Every rank rounds its shard's update as DDP rounds the whole one; sums over ranks round once more.
    "bf16-true": 2e-2,
    # DDP casts each weight when an operator wants it, we gather it cast: what is no matmul also sees bf16 weights.
    "bf16-mixed": 3e-2,
}


class Seen(zoo.Zoo):
    """Notes dtypes where users meet them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.strategy.__class__.__name__ == "ZeroStrategy":
            self.extra["gathered"] = torch.zeros((), dtype=self.net.stem.weight.dtype)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        p = optimizer.param_groups[0]["params"][0]
        self.extra["stored"] = torch.zeros((), dtype=p.dtype)
        self.extra["grad"] = torch.zeros((), dtype=p.grad.dtype)


class UsedAtTimes(zoo.Zoo):
    """Of the root's layers one is used in the first micro-batch of two, one in the last by rank 1 alone, one never."""

    def build(self) -> None:
        super().build()
        self.first, self.last, self.never = (nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(3))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        if len(self.losses) % 2 == 0:
            x = self.first(x)
        elif self.global_rank == 1:
            x = self.last(x)
        return F.mse_loss(self(x), y)


def _fit(
    strategy: Any, precision: str = "32-true", make: Any = Seen, accumulate: int = 1
) -> tuple[list[float], dict[str, Any], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    module = make()
    trainer = zoo.make_trainer(strategy, precision=precision, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    weights = {name: value.double() for name, value in module.state_dict().items()}
    return module.losses, weights, module.extra


@pytest.mark.parametrize(("precision", "stage"), [*((each, 3) for each in TOLERANCE), ("bf16-mixed", 1)])
def test_trains_as_ddp_in_the_promised_dtypes(ranks2, precision, stage):
    reference, result = ranks2(_fit, "ddp", precision), ranks2(_fit, {"stage": stage, "min_unit_numel": 1}, precision)
    stored = torch.bfloat16 if precision == "bf16-true" else torch.float32
    gathered = torch.bfloat16 if precision == "bf16-mixed" else stored
    for (losses, weights, extra), (expected, expected_weights, _) in zip(result, reference, strict=True):
        assert {name: value.dtype for name, value in extra.items()} == {
            "gathered": gathered,
            "stored": stored,
            "grad": stored,
        }
        _assert_close((losses, weights), (expected, expected_weights), TOLERANCE[precision])


def test_accumulates_what_some_micro_batches_leave_unused(ranks2):
    """A reduction takes one dtype; gradients of earlier micro-batches are fp32, those of the last and zeros bf16."""
    settings = {"stage": 1, "transport": "torch", "min_unit_numel": 1}
    reference = ranks2(_fit, "ddp_find_unused_parameters_true", "bf16-mixed", UsedAtTimes, 2)
    result = ranks2(_fit, settings, "bf16-mixed", UsedAtTimes, 2)
    for (*found, _), (*expected, _) in zip(result, reference, strict=True):
        _assert_close(found, expected, TOLERANCE["bf16-mixed"])


class Rounded(Seen):
    """Notes whether gradients have come in the lower precision."""

    def on_after_backward(self) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.extra["are rounded"] = torch.tensor(all(torch.equal(grad, grad.bfloat16().float()) for grad in grads))


@pytest.mark.parametrize(("stage", "transport"), [(1, "direct"), (3, "torch")])
def test_gradients_are_reduced_in_the_dtype_that_is_set(ranks2, stage, transport):
    settings = {"stage": stage, "transport": transport, "reduce_dtype": "bf16", "min_unit_numel": 1}
    reference, result = (ranks2(_fit, strategy, "32-true", Rounded) for strategy in ("ddp", settings))
    for (*found, extra), (*expected, _) in zip(result, reference, strict=True):
        assert extra["are rounded"]
        _assert_close(found, expected, TOLERANCE["bf16-mixed"])


def test_buffers_of_nccl_are_refused_on_cpus(ranks2):
    for _, text in ranks2(outcome, _fit, {"stage": 3, "comm_buffers": "symmetric"}):
        assert "comm_buffers='symmetric' on 'cpu'" in text


def _assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Losses and weights."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    for name, value in expected[1].items():
        gap = (found[1][name] - value).abs().max() / value.abs().max()
        assert gap < tolerance * 3, (name, gap)


class Overflows(zoo.Zoo):
    """In the second step rank 1 alone finds an infinite gradient on its shard."""

    def on_after_backward(self) -> None:
        if len(self.losses) == 2 and self.global_rank == 1:
            self.net.stem.weight.grad[-1, 0] = float("inf")

    def on_train_batch_end(self, *unused: Any) -> None:
        # read through the strategy: a hook sees whole weights, the same on all ranks
        self.extra[f"after {len(self.losses)}"] = self.net.stem.weight.detach().clone()


def _fit_with_scaler() -> tuple[dict[str, torch.Tensor], float]:
    torch.manual_seed(3)
    module = Overflows()
    # Lightning gives the CPU no fp16 plugin, so it is made by hand
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer = zoo.make_trainer({"stage": 3, "min_unit_numel": 1}, plugins=[plugin], max_steps=3)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    return module.extra, trainer.precision_plugin.scaler.get_scale()


def test_an_overflow_on_one_rank_makes_all_skip(ranks2):
    results = ranks2(_fit_with_scaler)
    for extra, scale in results:
        assert torch.equal(extra["after 1"], extra["after 2"])
        assert not torch.equal(extra["after 2"], extra["after 3"])
        assert scale == 512.0  # halved once
        assert all(torch.equal(extra[key], results[0][0][key]) for key in extra)
