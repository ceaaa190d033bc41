"""Optimizers at their edges: resumed on other ranks, saved after a fit, refused by name. The zoo's kinds train them."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from lightning_zero.engines import after_run
from tests.helpers import optimizers, zoo
from tests.helpers.ranks import outcome

ENGINES = ("fsdp2", "deepspeed")


def test_states_continue_on_another_number_of_ranks(ranks, tmp_path):
    """Whatever form states have (matrices in lists, 8 bits in blocks, an inner optimizer's), a checkpoint holds them
    whole: two ranks, then three, equal one that never stopped."""
    straight, half, full = (str(tmp_path / each) for each in ("straight", "half", "full"))
    (expected,) = ranks(optimizers.fit_and_save, "ddp", straight, 4, world_size=1)
    strategy = {"stage": 3, **zoo.BLOCKS}
    ranks(optimizers.fit_and_save, strategy, half, 2, world_size=2)
    for found in ranks(optimizers.fit_and_save, strategy, full, 4, half, world_size=3):
        for name, weights in found.items():
            for key, value in weights.items():
                torch.testing.assert_close(value, expected[name][key], rtol=1e-4, atol=1e-5)


def _momentum_after_fit(strategy: object, alone: bool) -> object:
    """Of one parameter after a fit; read by rank 1 alone, what comes of that."""
    torch.manual_seed(3)
    module = optimizers.Configured(make=lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9))
    trainer = zoo.make_trainer(strategy, limit_val_batches=0, max_epochs=1)
    with mock.patch.object(after_run, "READ_SECONDS", 2.0 if alone else after_run.READ_SECONDS):
        trainer.fit(module, torch.utils.data.DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    momentum = trainer.optimizers[0].state[module.net.head.weight]["momentum_buffer"]
    if not alone:
        return momentum + 0
    return outcome(lambda: momentum + 0) if int(os.environ["RANK"]) == 1 else None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_state_that_is_touched_after_fit_is_full(ranks2, engine):
    """States of optimizers that step on shards stay shards; a read by one rank alone must not wait for ever."""
    strategy = {"stage": 3, "engine": engine}
    found, expected = ranks2(_momentum_after_fit, strategy, False), ranks2(_momentum_after_fit, "ddp", False)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    _, (name, text) = ranks2(_momentum_after_fit, strategy, True)
    assert name == "RuntimeError"
    assert "a read of a sharded parameter or optimizer state on rank 1" in text


def test_another_number_of_optimizers_is_refused_by_name(ranks2, tmp_path):
    answers = ranks2(outcome, optimizers.two_then_one, {"stage": 2}, str(tmp_path / "x.ckpt"))
    assert all(
        "the states of 1 optimizers, but configure_optimizers returned 2 (SGD, SGD)" in text for _, text in answers
    )


def _wolfe(strategy: object) -> list[torch.Tensor]:
    torch.manual_seed(3)
    module = optimizers.Configured(
        make=lambda m: torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")
    )
    trainer = zoo.make_trainer(strategy, limit_val_batches=0, max_epochs=1, limit_train_batches=4)
    trainer.fit(module, torch.utils.data.DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    assert module.losses[-1] < module.losses[0]
    return [p.detach() for p in module.parameters()]


def test_a_line_search_ends_alike_on_all_ranks(ranks2):
    """LBFGS decides by the loss how often it evaluates. By its own alone each rank would go its own way, as under DDP,
    whose ranks have other weights at the end."""
    first, second = ranks2(_wolfe, {"stage": 3})
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
