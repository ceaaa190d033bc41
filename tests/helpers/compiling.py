"""Trains one small module, compiled in each of the ways in which people do, and counts the graphs.

Dynamo's own counters tell: a *graph* is what a backend is given, a *break* is where one had to end for lack of an
operation to record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend  # what torch's own tests count with
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.helpers import zoo

BACKEND = "aot_eager"
"""Graphs through autograd as inductor gets them, run without a C++ compiler: results are those of eager, to the bit."""


class Compiled(zoo.Zoo):
    """``options["form"]`` says what of it is compiled."""

    def build(self) -> None:
        self.net = zoo.Net()
        if (how := FORMS.get(self.options["form"])) is not None:
            how(self, self.options["backend"])

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, "called", self.net)(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x).tanh(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)  # no .item() here: it would end a graph under DDP, too


def _net(module: Compiled, backend: Any) -> None:
    module.net.compile(backend=backend)


def _copy(module: Compiled, backend: Any) -> None:
    module.called = torch.compile(module.net, backend=backend)


FORMS: dict[str, Callable[[Compiled, Any], None]] = {"net": _net, "copy beside": _copy}


@dataclass
class Counted:
    """One rank's run."""

    losses: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Of the module's state dict in a checkpoint."""
    graphs: list[int] = field(default_factory=list)
    """So far, after each batch and each validation."""
    breaks: dict[str, int] = field(default_factory=dict)
    """Reason -> how often."""
    left_behind: int = 0
    """Blocks that are still compiled after the run."""


class _Count(Callback):
    def __init__(self, counted: Counted, backend: CompileCounterWithBackend) -> None:
        self._counted, self._backend = counted, backend

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._counted.losses.append(outputs["loss"].item())
        self._counted.graphs.append(self._backend.frame_count)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._counted.graphs.append(self._backend.frame_count)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self._counted.names = list(checkpoint["state_dict"])


def count(form: str, strategy: Any, kind: type[Compiled] = Compiled) -> Counted:
    """Fits two epochs, each with a short last batch and a validation."""
    return _count(form, strategy, kind, CompileCounterWithBackend(BACKEND))


_registered: list[CompileCounterWithBackend] = []


def register() -> str:
    """Name of a backend that counts, for the setting ``compile``."""
    if not _registered:
        _registered.append(CompileCounterWithBackend(BACKEND))
        torch._dynamo.register_backend(_registered[0], name="counting")
    _registered[0].clear()
    return "counting"


def count_setting(kind: type[Compiled], strategy: Any) -> Counted:
    """As :func:`count`, of what the strategy compiles with the backend of :func:`register`."""
    return _count("none", strategy, kind, _registered[0])


def _count(form: str, strategy: Any, kind: Any, counting: CompileCounterWithBackend) -> Counted:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(3)
    module: Any = kind(form=form, backend=counting)
    counted = Counted()
    trainer = zoo.make_trainer(
        strategy, callbacks=[_Count(counted, counting)], num_sanity_val_steps=0, limit_val_batches=2
    )
    loaders = [DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH) for _ in range(2)]
    trainer.fit(module, *loaders)
    trainer.save_checkpoint(f"{trainer.default_root_dir}/compiled-{form.replace(' ', '-')}.ckpt")
    counted.breaks = dict(counters["graph_break"])
    counted.left_behind = sum(vars(block).get("_compiled_call_impl") is not None for block in module.net.blocks)
    return counted


def count_several(form: str, strategies: list[Any], kind: type[Compiled] = Compiled) -> list[Counted]:
    """One job on this rank: a run for each of ``strategies``."""
    return [count(form, strategy, kind) for strategy in strategies]
