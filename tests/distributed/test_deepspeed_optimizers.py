"""Users' optimizers on DeepSpeed's masters: what becomes of their states in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.distributed import test_loops as loops
from tests.helpers import zoo
from tests.helpers.zoo import Zoo, make_trainer

pytest.importorskip("deepspeed")
STAGE3 = {"engine": "deepspeed", "stage": 3}


class Counts(Optimizer):
    """Element-wise, third-party style; counts in a tensor of shape (1,)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=torch.zeros(1), sum=torch.zeros_like(p))
                state["count"] += 1
                state["sum"] += p.grad
                p.sub_(state["sum"], alpha=group["lr"] / float(state["count"]))


class Few(Zoo):
    """At two ranks, stage 3 gives the second one element of ``scale`` and none of ``gain``."""

    def build(self) -> None:
        self.net = zoo.Net(num_blocks=1)
        self.scale = nn.Parameter(torch.ones(3))
        self.gain = nn.Parameter(torch.ones(1))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale.sum() * self.gain.sum()

    def configure_optimizers(self) -> Any:
        return Counts(self.parameters(), lr=1e-3)


def _save(
    make: Callable[[], Any], strategy: Any, path: str, resume: str | None, epochs: int = 1, precision: str = "32-true"
) -> dict[str, Tensor]:
    torch.manual_seed(9)
    module = make()
    trainer = make_trainer(strategy, limit_val_batches=0, max_epochs=epochs, precision=precision)
    trainer.fit(module, loops._loader(), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return loops._weights(module)


def _states(path: Path) -> list[dict[str, Any]]:
    return [*torch.load(path, weights_only=False)["optimizer_states"][0]["state"].values()]


def test_counters_are_no_pieces(ranks2, tmp_path: Path) -> None:
    ddps, ours, again = (tmp_path / f"{name}.ckpt" for name in ("ddps", "ours", "again"))
    ranks2(_save, Few, "ddp", str(ddps), None)
    ranks2(_save, Few, STAGE3, str(ours), None)
    assert loops._close(_states(ours), _states(ddps))
    expected = ranks2(_save, Few, "ddp", str(ddps), str(ddps), 2)
    resumed = ranks2(_save, Few, STAGE3, str(again), str(ours), 2)
    assert loops._close(_states(again), _states(ddps))
    assert loops._close(resumed[1], expected[1])


class Bf16(Zoo):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _bf16(ranks2: Any, strategy: Any, path: Path, resume: Path | None, epochs: int) -> list[dict[str, Tensor]]:
    begin = None if resume is None else str(resume)
    return ranks2(_save, Bf16, strategy, str(path), begin, epochs, "bf16-true")


def test_bf16_checkpoints_of_ddp_are_resumed_with_states_in_fp32(ranks2, tmp_path: Path) -> None:
    half, ddps, ours = (tmp_path / f"{name}.ckpt" for name in ("half", "ddps", "ours"))
    _bf16(ranks2, "ddp", half, None, 1)
    assert {state["exp_avg"].dtype for state in _states(half)} == {torch.bfloat16}
    expected = _bf16(ranks2, "ddp", ddps, half, 2)
    resumed = _bf16(ranks2, STAGE3, ours, half, 2)
    assert {state["exp_avg"].dtype for state in _states(ours)} == {torch.float32}
    for result, reference in zip(resumed, expected, strict=True):
        assert (
            zoo.largest_difference(result, reference)[0] < 2**-5
        )  # steps on bf16 weights against steps on fp32 masters
