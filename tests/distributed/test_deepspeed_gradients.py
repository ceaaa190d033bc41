"""Gradients under the engine ``deepspeed`` are DDP's whichever parameters a backward uses, wherever masters lie and
whether or not DeepSpeed reduces beside the backward.

A failure of ``SecondBackward`` is about what one backward leaves for the next, of ``Heads`` about windows, of
``OwnHead`` about what ranks reduce together. ``overlap_comm`` is the default on CUDA.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero.engines.deepspeed.order import Order
from tests.distributed import test_loops as loops
from tests.helpers import zoo
from tests.helpers.ranks import outcome
from tests.helpers.zoo import Zoo, make_trainer

pytest.importorskip("deepspeed")
STAGE3 = {"engine": "deepspeed", "stage": 3}


class Heads(Zoo):
    """Two heads of one shape and a 0-dim gain; ``which(i)`` names what the ``i``-th backward uses."""

    def build(self) -> None:
        self.net = zoo.Net(num_blocks=1)
        self.heads = nn.ModuleDict({name: nn.Linear(zoo.WIDTH, zoo.WIDTH) for name in "ab"})
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.backwards = 0

    def which(self, i: int) -> str:
        return "ab"[i % 2]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        which = self.which(self.backwards)
        self.backwards += 1
        x = self.heads[which](self.net(x))
        return F.mse_loss(x * self.gain if which == "a" else x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SecondBackward(Heads):
    """The second backward before a step does without what the first one used."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in (0, 1):
            self.manual_backward(self.record(self.loss((batch[0] + part, batch[1]))))
        optimizer.step()
        optimizer.zero_grad()


class OwnHead(Heads):
    """Ranks use different heads."""

    def which(self, i: int) -> str:
        return "ab"[(i + int(os.environ["RANK"])) % 2]


class Own(torch.autograd.Function):
    """A linear layer that does not save its weight, as functions that recompute do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.layer.weight, grad.T @ ctx.saved_tensors[0], None


class Stores(nn.Linear):
    """Its output may be left out, but not the term that it stores."""

    def forward(self, x: Tensor) -> Tensor:
        self.term = self.weight.square().mean()
        return super().forward(x)


class ReadsInBackward(Heads):
    """The backward reads weights of layers whose own backward is over, or does not come."""

    def build(self) -> None:
        super().build()
        self.own, self.stores = nn.Linear(zoo.WIDTH, zoo.WIDTH, bias=False), Stores(zoo.WIDTH, zoo.WIDTH)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        stem = self.net.stem(Own.apply(x, self.own.weight, self.own))
        stem.register_hook(lambda grad: grad * (1 + self.net.head.weight.norm()))
        self.stores(x)
        return F.mse_loss(self.net.head(self.net.blocks[0](stem)), y) + self.stores.term


class EndsEarly(Heads):
    """The first epoch ends in the middle of an accumulation, whose gradients no step uses."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 and self.trainer.current_epoch == 0 else None


class Forgets(Zoo):
    """Drops some gradients between the micro-batches of an accumulation."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.net.stem.parameters() if batch_idx % 2 == 0 else ():
            p.grad = None


class AssignsToFrozen(Zoo):
    """A frozen parameter that the optimizer holds gets a gradient by hand."""

    def build(self) -> None:
        super().build()
        self.net.head.bias.requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net.head.bias.grad = torch.ones(zoo.WIDTH)


class Looks(Zoo):
    """The step reads a bias through NumPy. Stage 3 keeps the bias gathered between modules, because it is small."""

    def build(self) -> None:
        super().build()
        self.large = nn.Linear(100, 100)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch) + self.large(torch.ones(100)).square().mean()
        self.mean = self.net.head.bias.detach().numpy().mean()
        return loss


class ShiftsOnOddRanks(Zoo):
    """Every rank runs every module; inside, odd ranks use one parameter more. Gradients that were reduced as they come
    would give other numbers, or ranks would wait for ever."""

    def build(self) -> None:
        self.net, self.shift = zoo.Net(), _Shift()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(self.shift(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(zoo.WIDTH))
        self.shift = nn.Parameter(torch.zeros(zoo.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift if zoo._odd_rank() else x * self.gain


def _train(make: type[Zoo], settings: Any, options: dict[str, Any] | None = None) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module = make()
    options = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0, **(options or {})}
    make_trainer(settings, **options).fit(module, loops._loader())
    return loops._weights(module) | {"losses": torch.tensor(module.losses)}


SMALL_BUCKETS = {"deepspeed_config": {"zero_optimization": {"reduce_bucket_size": 20}}}
OFFLOAD = {"offload": "cpu", "deepspeed_config": {"zero_optimization": {"overlap_comm": True}}}
CASES: list[tuple[type[Zoo], dict[str, Any], list[dict[str, Any]]]] = [
    # module, options of the Trainer, settings
    (SecondBackward, {}, [{"stage": 1}, {"stage": 2, **OFFLOAD}]),
    (Heads, {"accumulate_grad_batches": 2}, [{"stage": 1}, {"stage": 2, **OFFLOAD}]),
    (OwnHead, {"accumulate_grad_batches": 2}, [{"stage": 1}, {"stage": 2, **OFFLOAD}]),
    (EndsEarly, {"accumulate_grad_batches": 2, "max_epochs": 2}, [{"stage": 2}, {"stage": 3}]),
    (Forgets, {"accumulate_grad_batches": 2}, [{"stage": 1}, {"stage": 2}, {"stage": 3}]),
    (AssignsToFrozen, {}, [{"stage": 1}]),
    (Looks, {}, [{"stage": 3}]),
    (ReadsInBackward, {}, [{"stage": 3}]),
    (ShiftsOnOddRanks, {}, [{"stage": 2, **SMALL_BUCKETS}, {"stage": 3}]),
]


@pytest.mark.parametrize(("make", "options", "strategies"), CASES)
def test_gradients_are_ddps(make: type[Zoo], options: Any, strategies: Any, ranks2) -> None:
    expected = ranks2(_train, make, zoo.UNUSED, options)
    for settings in strategies:
        results = ranks2(_train, make, {"engine": "deepspeed", **settings}, options)
        for result, reference in zip(results, expected, strict=True):
            assert zoo.largest_difference(result, reference)[0] < 1e-5, settings


class Frozen(Heads):
    """Trained from the second epoch on, as by Lightning's ``BaseFinetuning``."""

    def build(self) -> None:
        super().build()
        self.net.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net.requires_grad_(self.current_epoch == 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize(
    ("make", "stage", "reason"),
    [(Frozen, 1, "was unfrozen after the run began"), (AssignsToFrozen, 3, "was frozen when the run began")],
)
def test_training_a_frozen_parameter_is_refused(ranks2, make, stage, reason) -> None:
    settings = {"engine": "deepspeed", "stage": stage}
    for name, text in ranks2(outcome, _train, make, settings, {"max_epochs": 2}):
        assert name == "ValueError"
        assert reason in text
        assert "engine='fsdp2'" in text


class TokenOnOddRanks(Zoo):
    """A parameter of the LightningModule itself, which only some ranks use: no module's gather brings it."""

    def build(self) -> None:
        super().build()
        self.token = nn.Parameter(torch.zeros(zoo.WIDTH))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x + self.token if zoo._odd_rank() else x), y)


def test_parameters_that_only_some_ranks_gather_are_named(ranks2) -> None:
    for name, text in ranks2(outcome, _train, TokenOnOddRanks, STAGE3):
        assert name == "ValueError"
        assert "'token'" in text
        assert "stage=2" in text


@pytest.mark.parametrize(
    "config", [SMALL_BUCKETS, {"deepspeed_config": {"zero_optimization": {"reduce_scatter": False}}}]
)
def test_stage_3_refuses_buckets_that_differ(config: Any, ranks2) -> None:
    numel = sum(p.numel() for p in ShiftsOnOddRanks().parameters())
    for name, text in ranks2(outcome, _train, ShiftsOnOddRanks, {**STAGE3, **config}):
        assert name == "ValueError"
        assert f"reduce_bucket_size={numel}" in text


class RunsInAnotherOrder(Zoo):
    """Two modules of one shape, so that messages are mixed up without a word."""

    def build(self) -> None:
        self.net, self.a, self.b = zoo.Net(), nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(self.b(self.a(x)) if zoo._odd_rank() else self.a(self.b(x))), y)


def _run_in_another_order() -> None:
    def as_on_an_accelerator(self: Any, *args: Any) -> None:
        made(self, *args)
        self._agreement = None  # which lets ranks agree on each gather, between CPU processes alone

    made = Order.__init__
    with mock.patch.object(Order, "__init__", as_on_an_accelerator):
        _train(RunsInAnotherOrder, STAGE3)


def test_modules_that_run_in_another_order_are_noticed_before_the_step(ranks2) -> None:
    for name, text in ranks2(outcome, _run_in_another_order):
        assert name == "ValueError", text
        assert "stage=3: ranks ran modules in different orders" in text


class KeepsGraph(Zoo):
    """A graph of the step before that has saved a view of a weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.view = self.net.head.weight.detach().view(-1)
        loss = self.loss(batch) + (self.kept if batch_idx else 0.0)
        self.kept = (torch.ones(self.view.shape, requires_grad=True) * self.view).sum()
        return self.record(loss)


def test_a_graph_from_before_a_step_is_no_longer_gone_through(ranks2: Any) -> None:
    """As under DDP: what it saved has been brought up to date since."""
    for strategy in ("ddp", STAGE3):
        for _, text in ranks2(outcome, _train, KeepsGraph, strategy):
            assert "has been modified by an inplace operation" in text


class ReadsAll(Zoo):
    """Reads one gradient after the other, with a budget of one byte for what is full besides the current one."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        engine = self.trainer.strategy.engine
        engine.residency._budget_bytes = 1
        for p in self.parameters():
            p.grad.mul_(0.5)
            self.extra[str(len(self.extra))] = p.grad.norm()
        assert len(engine._gradients._seen) == 1


def test_gradients_that_are_read_do_not_add_up(ranks2: Any) -> None:
    assert {name for name, _ in ranks2(outcome, _train, ReadsAll, STAGE3)} == {"ok"}
