"""``torch.compile`` under ZeRO, beyond the kinds of ``test_parity_compiled``: graphs, the setting, parameters that
compiled code uses outside of their unit's forward.

A failure of the losses says that something was traced away that had to run, or that a graph was given a parameter that
was away; more graphs from one epoch to the next, that a guard stands on something of ours that changes; another break,
that a hook of ours is traced.
"""

from __future__ import annotations

import logging
import shutil
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import compiling, zoo
from tests.helpers.compiled_uses import USES, DataAssigned, UsedAround, seen, seen_both_ways
from tests.helpers.compiling import BACKEND, Compiled, Counted, count_several
from tests.helpers.ranks import outcome

UNITS = "skipping FSDP hooks", "lightning_zero gathers"
"""Where a graph ends at a unit: ``fully_shard``'s hooks and ours beside them."""


def _settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "engine": "fsdp2", **zoo.BLOCKS, **more}


STRATEGIES = ["ddp", _settings(3)]


# -- graphs ----------------------------------------------------------------------------------------------------------


def test_graphs_are_those_of_ddp(ranks2):
    """A compiled network ends them at its units alone."""
    compiled, plain = (ranks2(count_several, each, STRATEGIES) for each in ("net", "none"))
    for of_rank, plain_of_rank in zip(compiled, plain, strict=True):
        ddp = of_rank[0]
        for strategy, found, uncompiled in zip(STRATEGIES, of_rank, plain_of_rank, strict=True):
            assert found.losses == uncompiled.losses, strategy
            assert found.names == ddp.names, strategy
            assert found.graphs[-1] == found.graphs[len(found.graphs) // 2 - 1] > 0, (strategy, found.graphs)
            foreign = [reason for reason in found.breaks if not any(unit in reason for unit in UNITS)]
            assert len(foreign) <= len(ddp.breaks), (strategy, foreign)


# -- the setting -----------------------------------------------------------------------------------------------------


class InALoop(nn.Module):
    """Where a graph would break inside a loop, Dynamo leaves all of the code around it to eager, and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.layer(x)
            torch._dynamo.graph_break()
        return x


class TwoLoop(Compiled):
    def build(self) -> None:
        super().build()
        self.net.blocks[0], self.net.blocks[1] = InALoop(), InALoop()


class LooksAtCopies(Compiled):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for block in self.net.blocks:
            assert block.__getstate__().keys().isdisjoint({"forward", "_compiled_call_impl"})  # of copies and pickles


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _setting(settings: dict[str, Any], kind: Any) -> tuple[Counted, Counted, list[str]]:
    """A run with the setting, one without, and what was said."""
    said = Said()
    logging.getLogger("lightning_zero").addHandler(said)
    units = {"target": "units", "backend": compiling.register()}
    try:
        compiled = compiling.count_setting(kind, {**settings, "compile": units})
        plain = compiling.count("none", "ddp" if settings["engine"] == "deepspeed" else settings, kind)
    finally:
        logging.getLogger("lightning_zero").removeHandler(said)
    return compiled, plain, said.lines


@pytest.mark.parametrize(("engine", "stage"), [("fsdp2", 3), ("deepspeed", 2)])
def test_the_setting_compiles_units(ranks2, engine, stage):
    for found, plain, said in ranks2(_setting, _settings(stage, engine=engine), LooksAtCopies):
        assert found.losses == plain.losses
        assert found.names == plain.names
        assert found.graphs[0] == 1  # of three equal blocks
        assert found.graphs[-1] == found.graphs[len(found.graphs) // 2 - 1]
        assert (found.breaks, said, found.left_behind) == ({}, [], 0)


def test_units_that_cannot_be_compiled_are_named(ranks2):
    """Each of two equal ones, at whose code Dynamo looks once."""
    for rank, (found, plain, said) in enumerate(ranks2(_setting, _settings(3), TwoLoop)):
        assert found.losses == plain.losses
        names = ["net.blocks.0", "net.blocks.1"] if rank == 0 else []
        for line, name in zip(said, names, strict=True):
            assert line.startswith(f"compile='units': {name!r} runs uncompiled")


def test_an_unknown_backend_is_refused(ranks2):
    settings = _settings(3, compile={"target": "units", "backend": "inducktor"})
    for name, text in ranks2(outcome, compiling.count, "none", settings):
        assert name == "ValueError"
        assert text.startswith("compile.backend='inducktor': torch.compile knows ")


def test_deepspeed_refuses_compiled_modules_at_stage_3(ranks2):
    for name, text in ranks2(outcome, compiling.count, "copy beside", {"engine": "deepspeed", "stage": 3}):
        assert name == "ValueError"
        assert "is compiled, or holds a compiled function" in text
        assert "use engine='fsdp2' or stage=2" in text


# -- parameters outside of their unit's forward ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", USES)
def test_compiled_code_uses_whole_parameters(ranks2, kind):
    for plain, compiled in ranks2(seen_both_ways, kind, _settings(3), BACKEND):
        # a compiled sum adds the gradients of one parameter in another order
        assert compiled == pytest.approx(plain, rel=1e-6)


def test_inductor_uses_whole_parameters(ranks2):
    """Its kernels read memory by address, where no operator could be looked at."""
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    for plain, compiled in ranks2(seen_both_ways, UsedAround, _settings(3), "inductor"):
        assert compiled == pytest.approx(plain, rel=1e-5)  # kernels of its own add up in another order


def test_assigned_data_is_refused(ranks2):
    for name, text in ranks2(outcome, seen, DataAssigned, _settings(3), BACKEND):
        assert name != "ok"
        assert "compiled code assigns p.data" in text
