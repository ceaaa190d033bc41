"""``keep_global_batch``: four ranks go on as two and two as four, with the samples of each step as they were."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers import moves
from tests.helpers.ranks import outcome
from tests.helpers.zoo import make_trainer

MICRO_BATCH = 3  # of 84 samples in an epoch: 7 for each of 4 ranks, 14 for each of 2


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.forwards = 0

    def training_step(self, batch, index):
        self.forwards += 1
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-3)


def _run(settings: dict, accumulate: int, max_steps: int, save_at: int | None, path: str, resume: str | None) -> list:
    """Forwards, weights, micro-batches per step, steps."""
    torch.manual_seed(2)
    module = Net()
    callbacks = [moves._SaveAt(save_at, path)] if save_at else []
    trainer = make_trainer(
        {"stage": 3, "min_unit_numel": 1, **settings},
        max_steps=max_steps, accumulate_grad_batches=accumulate, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, DataLoader(moves.dataset(), batch_size=MICRO_BATCH, shuffle=True), ckpt_path=resume)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return [module.forwards, weights, trainer.accumulate_grad_batches, trainer.global_step]


@pytest.mark.parametrize(
    ("before", "accumulate", "then", "save_at"),
    [pytest.param(4, 1, 2, 3, id="mid-epoch"), pytest.param(2, 2, 1, 7, id="epoch end")],
)
def test_another_number_of_ranks(before, accumulate, then, save_at, ranks2, ranks4, tmp_path: Path) -> None:
    first, second = (ranks4, ranks2) if before == 4 else (ranks2, ranks4)
    path, keep = str(tmp_path / "x.ckpt"), {"keep_global_batch": True}
    straight = first(_run, keep, accumulate, 10, save_at, path, None)[0]
    resumed = second(_run, keep, accumulate, 10, None, path, path)[0]
    assert resumed[0] == (10 - save_at) * then  # forwards
    assert resumed[2:] == [then, 10]
    for name, weight in straight[1].items():  # the order of summation
        torch.testing.assert_close(resumed[1][name], weight, rtol=1e-5, atol=1e-6)


def test_it_is_refused_where_it_cannot_be_kept(ranks2, ranks3, tmp_path: Path) -> None:
    path, keep = str(tmp_path / "x.ckpt"), {"keep_global_batch": True}
    ranks2(_run, {}, 1, 5, 3, path, None)
    for kind, text in ranks3(outcome, _run, keep, 1, 8, None, path, path):
        assert "2 ranks accumulated 1 micro-batch(es) per step" in text, kind
        assert "use one of 1, 2 ranks" in text
