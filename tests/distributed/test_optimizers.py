"""Optimizers at their edges: resumed on other ranks, saved after a fit, refused by name. The zoo's kinds train them."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import optimizers, zoo
from tests.helpers.ranks import outcome

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", list(optimizers.RESUMED))
def test_states_continue_on_another_number_of_ranks(ranks, tmp_path, name, stage):
    """Whatever form states have (matrices in lists, 8 bits in blocks, an inner optimizer's), a checkpoint holds them
    whole: two ranks, then one, equal one that never stopped."""
    straight, half, full = (str(tmp_path / f"{each}.ckpt") for each in ("straight", "half", "full"))
    (expected,) = ranks(optimizers.fit_and_save, name, "ddp", straight, 8, world_size=1)
    strategy = {"stage": stage, **zoo.BLOCKS}
    ranks(optimizers.fit_and_save, name, strategy, half, 4, world_size=2)
    found = ranks(optimizers.fit_and_save, name, strategy, full, 8, half, world_size=3)
    for weights in found:
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_states_are_ordinary_tensors_after_fit(ranks, tmp_path, engine):
    """schedulefree's ``eval`` computes with parameters and states together before the checkpoint is saved."""
    strategy = {"stage": 3, "engine": engine}
    assert all(ranks(optimizers.evaluate_and_save, strategy, str(tmp_path / "x.ckpt"), world_size=2))


def test_another_number_of_optimizers_is_refused_by_name(ranks, tmp_path):
    answers = ranks(
        outcome, optimizers.two_then_one, {"stage": 2}, str(tmp_path / "x.ckpt"), world_size=2, timeout_seconds=60
    )
    assert all("the states of 1 optimizers, configure_optimizers returned 2 (SGD, SGD)" in text for _, text in answers)


def _wolfe(strategy: object) -> list[torch.Tensor]:
    torch.manual_seed(3)
    module = optimizers.Configured(
        make=lambda m: torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")
    )
    trainer = zoo.make_trainer(strategy, limit_val_batches=0)
    trainer.fit(module, torch.utils.data.DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    assert module.losses[-1] < module.losses[0]
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_line_search_ends_alike_on_all_ranks(ranks, stage, engine):
    """LBFGS decides by the loss how often it evaluates. By its own alone each rank would go its own way, as under DDP,
    whose ranks have other weights at the end."""
    first, second = ranks(_wolfe, {"stage": stage, "engine": engine}, world_size=2, timeout_seconds=60)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_an_optimizer_that_steps_by_the_loss_is_given_the_mean(ranks, engine, numbers):
    """AliG goes as far as the loss says. Each rank keeps its own rows of what it steps, so by their own losses the rows
    of one tensor would have gone differently far. The caller of ``step`` has its own rank's loss, as under DDP."""
    (expected, _), _ = ranks(optimizers.step_by_loss, "ddp", True, numbers, world_size=2)
    (apart, _), (apart_too, _) = ranks(optimizers.step_by_loss, "ddp", False, numbers, world_size=2)
    assert zoo.largest_difference(apart, apart_too)[0] > 1e-2
    for stage in (1, 3):
        for found, returned in ranks(
            optimizers.step_by_loss, {"stage": stage, "engine": engine}, False, numbers, world_size=2
        ):
            assert zoo.largest_difference(found, expected)[0] <= 1e-5
            assert returned
