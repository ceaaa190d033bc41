"""A module that none of the processes may hold whole trains all the same."""

from __future__ import annotations

import gc
import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.host import return_freed_memory
from tests.helpers.ranks import RankPool, outcome
from tests.helpers.zoo import make_trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")

WIDTH, LAYERS, TRAINED = 2048, 32, 4
WHOLE_BYTES = 4 * LAYERS * WIDTH**2
STEPS = 2
ROOM = int(0.9 * WHOLE_BYTES)
"""A quarter of the module's bytes are a rank's shards, a fifth the layers that are whole at a time. The rest is for
address space that threads reserve, so that the limit strikes either no rank or all of them."""


class Layer(nn.Linear):
    """Filled faster than by as many random numbers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def reset_parameters(self) -> None:
        numbers = torch.arange(WIDTH, dtype=torch.float32)
        with torch.no_grad():
            self.weight.copy_(numbers.sin()[:, None] + numbers.cos()).mul_(torch.rand(()) / WIDTH)


class Deep(L.LightningModule):
    """Equal units of ``WIDTH`` squared, built in ``configure_model``. Only the last ``TRAINED`` have gradients, so that
    parameters are nearly all that counts."""

    def __init__(self, device: str, layers: int = LAYERS) -> None:
        super().__init__()
        self.device_name, self.num_layers = device, layers
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        torch.manual_seed(3)
        with torch.device(self.device_name):
            self.layers = nn.ModuleList(Layer() for _ in range(self.num_layers))
        self.layers[:-TRAINED].requires_grad_(False)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        loss = x.square().mean()
        self.losses.append(loss.item())
        return loss

    test_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@contextmanager
def room(nbytes: int | None) -> Iterator[None]:
    """This process may take no more than ``nbytes`` beside what it has."""
    gc.collect()
    before = resource.getrlimit(resource.RLIMIT_AS)
    if nbytes is not None:
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def losses(strategy: Any, device: str, nbytes: int | None, batch: int, checkpoint: str | None = None) -> list[float]:
    """Of ``STEPS`` steps on ``batch`` rows per rank, of as many in a test after them, and of a second run's steps. Each
    run leaves a ``checkpoint``."""
    loader: Any = DataLoader(torch.arange(4.0 * STEPS * WIDTH).view(-1, WIDTH).sin(), batch_size=batch)
    return_freed_memory()  # or the limit counts what an earlier job has freed
    # Threads, their heaps and libraries are there before the limit
    make_trainer(strategy, max_steps=1, limit_val_batches=0).fit(Deep("cpu", layers=1), loader)
    module = Deep(device)
    try:
        with room(nbytes):
            for _ in range(2):
                trainer = make_trainer(strategy, max_steps=STEPS, limit_val_batches=0)
                trainer.fit(module, loader)
                if checkpoint is not None:
                    trainer.save_checkpoint(checkpoint)
                trainer.test(module, loader, verbose=False)
    except RuntimeError as error:
        # Frames hold the layers until somebody collects the error: in the next job, whose limit would not strike
        traceback.clear_frames(error.__traceback__)
        raise
    return module.losses


@pytest.fixture
def fresh4() -> Iterator[Any]:
    """Four ranks in processes of their own: what others' memory was like does not matter."""
    with RankPool() as pool:
        yield partial(pool.run, world_size=4)


def test_ddp_cannot_hold_it(fresh4):
    # under ddp each rank fails by itself, in configure_model, before it would wait for another
    for kind, text in fresh4(outcome, losses, "ddp", "cpu", ROOM, 1):
        assert kind == "RuntimeError"
        assert "allocate memory" in text


def test_it_trains_and_saves_under_the_limit(fresh4, ranks1, tmp_path):
    (wanted,) = ranks1(losses, "ddp", "cpu", None, 4)
    # without `outcome`: a rank that fails alone ends the others at once
    strategy = {"stage": 3, "checkpoint": "sharded", "after_fit": "sharded"}
    found = fresh4(losses, strategy, "meta", ROOM, 1, str(tmp_path / "x.ckpt"))
    means = [sum(each) / 4 for each in zip(*found, strict=True)]
    assert means == pytest.approx(wanted, rel=1e-5)
