"""The planner: what it finds out about a module without touching it, what it picks and how it says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_zero
from lightning_zero import ZeroConfig
from lightning_zero.planner import GIB, choose, first_batch, plan, structure_of
from tests.helpers import zoo
from tests.helpers.account import Attention, Mlp

TOKENS = torch.zeros(8, 65, dtype=torch.long)
PAIR = (torch.zeros(4, 8), torch.zeros(4, 8))
BLOCKS = ZeroConfig(min_unit_numel=1)


class OneLayer(zoo.Zoo):
    """``options["optimizer"]`` on one matrix of 8 x 8 and a bias of 8."""

    def build(self) -> None:
        self.net = nn.Linear(8, 8)


def test_optimizer_states_are_those_of_the_optimizer_itself():
    made = plan(OneLayer(optimizer=lambda p: torch.optim.AdamW(p, amsgrad=True)), PAIR)
    assert made.row("ddp").optimizer == 72 * 12 + 2 * 4
    assert not made.notes


def test_nothing_of_the_module_is_changed():
    module = zoo.Zoo()
    before = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
    plan(structure_of(module), PAIR)
    plan(module, PAIR, world_size=4)
    for name, p in module.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])
        assert p.grad is None
    assert module._trainer is None
    assert module.losses == []
    assert "forward" not in vars(module.net.blocks[0])
    assert not module.net.blocks[0]._forward_hooks


class Scheduled(zoo.Zoo):
    """Asks the Trainer for its number of steps."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 1000
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_number_of_steps_is_known_to_the_optimizers():
    assert plan(Scheduled(), PAIR).optimizers == ["SGD"]


def test_a_module_on_the_meta_device_gives_the_same_plan():
    real = plan(Mlp(), TOKENS, world_size=4, config=BLOCKS)
    with torch.device("meta"):
        module = Mlp()
    assert dataclasses.replace(plan(module, TOKENS, world_size=4, config=BLOCKS)) == real
    assert lightning_zero.plan is plan


def test_each_way_to_recompute_takes_what_it_keeps():
    def activations(setting: Any) -> float:
        config = BLOCKS.with_(activation_checkpointing=setting)
        return plan(Attention(), TOKENS, config=config).row("zero3").activations

    full = activations("full")
    assert full < activations("selective") < activations("none")
    assert full < activations(["blocks.0", "blocks.1"])


class NeedsValues(zoo.Zoo):
    def loss(self, batch: Any) -> torch.Tensor:
        batch[0].numpy()
        return super().loss(batch)


def test_what_cannot_be_traced_is_said_and_the_rest_still_planned():
    made = plan(NeedsValues(), PAIR, world_size=2, device_memory_gib=1)
    assert any("could not be traced" in note for note in made.notes)
    assert made.row("zero2").activations == 0
    assert made.row("zero2").max_micro_batch == 0
    assert made.row("zero2").optimizer > 0
    assert any("no batch" in note for note in plan(zoo.Zoo()).notes)


OUTSIDE: dict[str, Any] = {}


class RunsItself(zoo.Zoo):
    """Its step reaches the network, or a weight, past its copy; or a hook writes to the module."""

    def __init__(self, what: str) -> None:
        super().__init__()
        OUTSIDE["net"], self.what = self.net, what
        self.seen: list[torch.Tensor] = []
        if what == "hook":
            self.net.register_forward_hook(lambda m, args, output: self.seen.append(output))

    def loss(self, batch: Any) -> torch.Tensor:
        if self.what == "hook":
            return super().loss(batch)
        if self.what == "layer":
            return OUTSIDE["net"](batch[0]).square().mean()
        return next(OUTSIDE["net"].parameters()).sum()


@pytest.mark.parametrize("what", ["layer", "weight", "hook"])
def test_the_module_itself_does_not_run(what):
    """It may be sharded by then, and one rank alone would gather."""
    module = RunsItself(what)
    assert any("could not be traced" in note for note in plan(module, PAIR).notes)
    assert not module.seen
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_pre_hooks for m in module.modules())


class Checks(zoo.Zoo):
    """Looks at values, and selects by a mask."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        assert torch.isfinite(x).all()
        if torch.isnan(x).any().item():
            raise RuntimeError("never")
        keep = y > 0
        return -torch.distributions.Normal(self(x)[keep], 1.0).log_prob(y[keep]).mean()


def test_checks_of_values_find_nothing_wrong():
    assert not plan(Checks(), PAIR).notes


def test_attributes_on_parameters_are_there_for_the_step_and_the_optimizers():
    class Marked(Mlp):
        def __init__(self) -> None:
            super().__init__()
            for p in self.parameters():
                p.decays, p.scale = p.ndim > 1, torch.ones(())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + sum((p * p.scale).sum() for p in self.parameters())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.decays])

    planned = plan(Marked(), TOKENS, world_size=2)
    assert not any("AttributeError" in note for note in planned.notes), planned.notes


def test_a_module_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        plan(zoo.Zoo().requires_grad_(False), PAIR)


# -- the choice ------------------------------------------------------------------------------------------------------


def _rows(peaks: list[float], checkpointed: list[float]) -> Any:
    """Rows of zero1-3 and zero1-3_offload with these peaks in GiB, of which 10 are usable."""
    rows = [row for row in plan(zoo.Zoo(), PAIR, world_size=2).rows if row.name != "ddp" and row.offload != "nvme"]
    return [
        dataclasses.replace(row, peak=peak * GIB, fits=peak <= 10)
        for row, peak in zip(rows, [*peaks, *checkpointed], strict=True)
    ]


LARGE = [30.0, 20.0, 15.0, 30.0, 20.0, 11.0]


@pytest.mark.parametrize(
    ("peaks", "checkpointed", "choice", "reason"),
    [
        ([7, 6, 5, 3, 2, 1], LARGE, "zero1", "no stage sends less"),
        ([30, 20, 5, 3, 2, 1], LARGE, "zero3", "zero2 would need 20.0"),
        ([30, 20, 15, 3, 2, 1], [30, 7, 5, 3, 2, 1], "zero2, ckpt", "activation_checkpointing="),
        ([30, 20, 15, 3, 2, 1], LARGE, "zero1_offload", "zero3 would need 15.0"),
        (LARGE, LARGE, None, "nothing fits: even zero3_offload"),
    ],
)
def test_the_cheapest_row_that_fits_is_picked_and_says_why(peaks, checkpointed, choice, reason):
    row, text = choose(_rows(peaks, checkpointed), 10 * GIB)
    assert (row.label if row else None) == choice
    assert reason in text


def test_host_memory_limits_offload():
    def offload_fits(host_memory_gib: float) -> bool:
        return (
            plan(OneLayer(), PAIR, device="cuda", device_memory_gib=1, host_memory_gib=host_memory_gib)
            .row("zero1_offload")
            .fits
        )

    assert offload_fits(1)
    assert not offload_fits(1e-7)


# -- the batch -------------------------------------------------------------------------------------------------------


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        raise AssertionError("a stream is not to be read for a plan")


def test_the_first_batch_leaves_the_generators_alone():
    class Noisy(zoo.RandomDataset):
        def __getitem__(self, index: int) -> Any:
            torch.rand(1)
            return super().__getitem__(index)

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    x, y = first_batch(DataLoader(Noisy(), batch_size=5, shuffle=True))
    assert (x.shape, y.shape) == ((5, 8), (5, 8))
    assert torch.equal(torch.rand(1), expected)
    assert first_batch(DataLoader(_Stream(), batch_size=5)) is None
    assert first_batch([1, 2]) is None
