"""A plan's copy of a module runs itself, whatever functions the module holds."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_zero import plan
from lightning_zero.planner.run import Planner

OUTSIDE: dict[str, Any] = {}


class Holds(L.LightningModule):
    """``self.loss`` reaches the network in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        net = self.net

        def loss(x: Tensor) -> Tensor:
            return net(x).square().mean()

        def recursive(x: Tensor, depth: int = 1) -> Tensor:
            return recursive(x, depth - 1) if depth else loss(x)

        OUTSIDE["net"] = net
        self.losses: Any = {
            "closure": lambda: loss,
            "default": lambda: lambda x, net=self.net: net(x).square().mean(),
            "parameters": lambda: lambda x: (x @ self.net.weight.T + net.bias).square().mean(),
            "partial": lambda: partial(lambda net, x: net(x).square().mean(), self.net),
            "in a dict": lambda: {"loss": [loss]},
            "recursive": lambda: recursive,
            "global": lambda: lambda x: OUTSIDE["net"](x).square().mean(),
        }[how]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.losses["loss"][0] if isinstance(self.losses, dict) else self.losses
        return loss(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("how", ["closure", "default", "parameters", "partial", "in a dict", "recursive"])
def test_the_copy_has_the_gradients(how: str) -> None:
    module = Holds(how)
    before = module.losses
    made = plan(module, torch.randn(2, 4))
    assert made.row("ddp").gradients == 4 * 20
    assert module.losses is before
    assert module.net.weight.grad is None
    module.training_step(torch.randn(2, 4), 0).backward()
    assert module.net.weight.grad is not None


def test_the_module_itself_does_not_run() -> None:
    """It may be sharded by then, and one rank alone would gather."""
    module = Holds("global")
    notes = Planner(module)(torch.randn(2, 4)).notes
    assert any("could not be traced" in note and "runs the run's own Linear" in note for note in notes)
    assert module.net.weight.grad is None
    module.training_step(torch.randn(2, 4), 0).backward()  # afterwards it does
