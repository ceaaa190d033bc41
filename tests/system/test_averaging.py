"""Lightning's ``WeightAveraging`` averages whole weights, as under DDP, and resumes. SWA is a kind of the zoo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn

from tests.helpers import moves
from tests.helpers.zoo import make_trainer


class _Ema(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.8))


def _averaged(strategy: Any, path: str | None = None, resume: str | None = None) -> dict[str, Any]:
    torch.manual_seed(4)
    module = moves.Features()
    save = [moves._SaveAt(10, path)] if path else []
    trainer = make_trainer(strategy, max_epochs=3, callbacks=[_Ema(), *save])
    trainer.fit(module, moves.loader("mid-epoch", 2), ckpt_path=resume)
    return {"losses": module.losses, "weights": {k: v.detach().clone() for k, v in module.state_dict().items()}}


def _close(results: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    for ours, ddps in zip(results, reference, strict=True):
        torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(ddps["losses"]), rtol=2e-5, atol=1e-6)
        for name, weight in ddps["weights"].items():
            torch.testing.assert_close(ours["weights"][name], weight, rtol=2e-5, atol=1e-6)  # order of summation


def test_weight_averaging_gets_real_weights_and_resumes(ranks2, tmp_path: Path) -> None:
    reference = ranks2(_averaged, "ddp")
    path = str(tmp_path / "x.ckpt")
    strategy = {"stage": 3, "min_unit_numel": 1}
    first, second = ranks2(_averaged, strategy, path), ranks2(_averaged, strategy, None, path)
    _close(first, reference)
    for ours, again in zip(first, second, strict=True):
        ours.update(losses=ours["losses"][:10] + again["losses"], weights=again["weights"])
    _close(first, reference)
