"""``torch.compile`` under ZeRO, beyond the kinds of ``test_parity_compiled``: graphs, the setting, refusals.

Dynamo's own counters tell: a *graph* is what a backend is given, a *break* is where one had to end for lack of an
operation to record. A failure of the losses says that something was traced away that had to run; more graphs from one
epoch to the next, that a guard stands on something of ours that changes; another break, that a hook of ours is traced.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend  # what torch's own tests count with
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.helpers import zoo
from tests.helpers.compiled_kinds import BACKEND, CompiledFunctions
from tests.helpers.ranks import outcome

UNITS = "skipping FSDP hooks", "lightning_zero gathers"
"""Where a graph ends at a unit: ``fully_shard``'s hooks and ours beside them."""


def _settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "engine": "fsdp2", **zoo.BLOCKS, **more}


STRATEGIES = ["ddp", _settings(3)]


class Compiled(zoo.Zoo):
    """``options["backend"]`` compiles its network, ``None`` does not."""

    def build(self) -> None:
        self.net = zoo.Net()
        if self.options["backend"] is not None:
            self.net.compile(backend=self.options["backend"])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x).tanh(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)  # no .item() here: it would end a graph under DDP, too


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


def _count(
    strategy: Any, counting: CompileCounterWithBackend, compiled: bool, kind: type[Compiled] = Compiled
) -> Counted:
    """Fits two epochs, each with a short last batch and a validation."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(3)
    module: Any = kind(backend=counting if compiled else None)
    counted = Counted()
    trainer = zoo.make_trainer(
        strategy, callbacks=[_Count(counted, counting)], num_sanity_val_steps=0, limit_val_batches=2
    )
    loaders = [DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH) for _ in range(2)]
    trainer.fit(module, *loaders)
    trainer.save_checkpoint(f"{trainer.default_root_dir}/compiled.ckpt")
    counted.breaks = dict(counters["graph_break"])
    counted.left_behind = sum(vars(block).get("_compiled_call_impl") is not None for block in module.net.blocks)
    return counted


# -- graphs ----------------------------------------------------------------------------------------------------------


def _count_all(compiled: bool) -> list[Counted]:
    return [_count(each, CompileCounterWithBackend(BACKEND), compiled) for each in STRATEGIES]


def test_graphs_are_those_of_ddp(ranks2):
    """A compiled network ends them at its units alone."""
    for of_rank, plain_of_rank in zip(ranks2(_count_all, True), ranks2(_count_all, False), strict=True):
        ddp = of_rank[0]
        for strategy, found, uncompiled in zip(STRATEGIES, of_rank, plain_of_rank, strict=True):
            assert found.losses == uncompiled.losses, strategy
            assert found.names == ddp.names, strategy
            assert found.graphs[-1] == found.graphs[len(found.graphs) // 2 - 1] > 0, (strategy, found.graphs)
            foreign = [reason for reason in found.breaks if not any(unit in reason for unit in UNITS)]
            assert len(foreign) <= len(ddp.breaks), (strategy, foreign)


# -- the setting -----------------------------------------------------------------------------------------------------


class LooksAtCopies(Compiled):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for block in self.net.blocks:
            assert block.__getstate__().keys().isdisjoint({"forward", "_compiled_call_impl"})  # of copies and pickles


COUNTING = CompileCounterWithBackend(BACKEND)
"""The backend "counting" of the setting ``compile``; PyTorch cannot forget a backend again."""


def _setting(settings: dict[str, Any], kind: Any) -> tuple[Counted, Counted]:
    """A run with the setting, and one without."""
    if "counting" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(COUNTING, name="counting")
    COUNTING.clear()
    units = {"target": "units", "backend": "counting"}
    compiled = _count({**settings, "compile": units}, COUNTING, False, kind)
    plain = _count("ddp" if settings["engine"] == "deepspeed" else settings, COUNTING, False, kind)
    return compiled, plain


@pytest.mark.parametrize(("engine", "stage"), [("fsdp2", 3), ("deepspeed", 2)])
def test_the_setting_compiles_units(ranks2, engine, stage):
    for found, plain in ranks2(_setting, _settings(stage, engine=engine), LooksAtCopies):
        assert found.losses == plain.losses
        assert found.names == plain.names
        assert found.graphs[0] == 1  # of three equal blocks
        assert found.graphs[-1] == found.graphs[len(found.graphs) // 2 - 1]
        assert (found.breaks, found.left_behind) == ({}, 0)


def test_deepspeed_refuses_compiled_modules_at_stage_3(ranks2):
    for name, text in ranks2(outcome, zoo.train, "compiled_copy_beside", {"engine": "deepspeed", "stage": 3}):
        assert name == "ValueError"
        assert "is compiled, or holds a compiled function" in text
        assert "use engine='fsdp2' or stage=2" in text


# -- parameters outside of their unit's forward ----------------------------------------------------------------------


def _losses(kind: Any, strategy: Any, backend: str) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    module = kind(backend=backend)
    trainer = zoo.make_trainer(strategy, limit_val_batches=0)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    return module.losses


def test_inductor_uses_whole_parameters(ranks2):
    """Its kernels read memory by address, where no operator could be looked at."""
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    compiled, expected = (
        ranks2(_losses, CompiledFunctions, strategy, backend)
        for strategy, backend in ((_settings(3), "inductor"), ("ddp", "eager"))
    )
    for found, of_ddp in zip(compiled, expected, strict=True):
        assert found == pytest.approx(of_ddp, rel=1e-5)  # kernels of its own add up in another order


class AssignsData(zoo.Zoo):
    """It would take the memory that a parameter is gathered into."""

    def on_train_batch_end(self, *unused: Any) -> None:
        torch.compile(self.assign, backend=self.options["backend"])(list(self.net.parameters()))

    @staticmethod
    def assign(parameters: list[Tensor]) -> None:
        for p in parameters:
            p.data = p * 0.99


def test_assigned_data_is_refused(ranks2):
    for name, text in ranks2(outcome, _losses, AssignsData, _settings(3), BACKEND):
        assert name != "ok"
        assert "compiled code assigns p.data" in text
