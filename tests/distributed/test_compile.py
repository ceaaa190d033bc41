"""``torch.compile`` in every form makes under ZeRO the graphs that it makes without, and the same losses.

Compared are DDP's graphs, and those of ``fully_shard`` alone around the same blocks, which ends a graph at each block.
A failure of the losses says that something was traced away that had to run; more graphs from one epoch to the next,
that a guard stands on something of ours that changes; another break, that a hook of ours is traced.
"""

from __future__ import annotations

import logging
import shutil
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import compiling, zoo
from tests.helpers.compiling import BACKEND, FORMS, WHOLE, ByHand, Compiled, Halves, Lengths, count_raw, count_several
from tests.helpers.ranks import outcome

pytestmark = [pytest.mark.rest, pytest.mark.timeout(600)]

STAGES = [1, 2, 3]
FULL = pytest.mark.full
UNITS = "skipping FSDP hooks", "lightning_zero gathers"
"""Where a graph ends at a unit: ``fully_shard``'s hooks and ours beside them."""


def _settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "engine": "fsdp2", **zoo.BLOCKS, **more}


@pytest.mark.parametrize("form", [*FORMS, WHOLE])
def test_compiled_is_as_uncompiled(ranks2, form):
    strategies = ["ddp", *map(_settings, STAGES)]
    compiled = ranks2(count_several, form, strategies, timeout_seconds=400)
    plain = ranks2(count_several, "none", strategies, timeout_seconds=200)
    for of_rank, plain_of_rank in zip(compiled, plain, strict=True):
        ddp = of_rank[0]
        for strategy, found, uncompiled in zip(strategies, of_rank, plain_of_rank, strict=True):
            assert found.losses == uncompiled.losses, strategy
            assert found.names == ddp.names, strategy
            first_epoch = found.graphs[: len(found.graphs) // 2]
            assert found.graphs[-1] == first_epoch[-1] > 0 or form == WHOLE, (
                strategy,
                found.graphs,
            )  # DDP's grow there
            foreign = [reason for reason in found.breaks if not any(unit in reason for unit in UNITS)]
            assert len(foreign) <= len(ddp.breaks), (strategy, foreign)
        if form.startswith("blocks"):
            assert [found.graphs for found in of_rank] == 4 * [ddp.graphs]
            assert [found.breaks for found in of_rank] == 4 * [{}]


@pytest.mark.parametrize(
    "form", [each if each in ("blocks", "net") else pytest.param(each, marks=FULL) for each in FORMS]
)
def test_sequence_lengths_compile_when_ddps_do(ranks2, form):
    """The first other length is compiled with a dimension that varies, and then no more."""
    strategies = ["ddp", *map(_settings, STAGES)]
    compiled = ranks2(count_several, form, strategies, Lengths, timeout_seconds=400)
    plain = ranks2(count_several, "none", strategies, Lengths, timeout_seconds=200)
    for of_rank, plain_of_rank in zip(compiled, plain, strict=True):
        grows = [[a != b for a, b in pairwise([0, *found.graphs])] for found in of_rank]
        assert grows == 4 * [grows[0]], [found.graphs for found in of_rank]
        assert sum(grows[0]) > 1
        for found, uncompiled in zip(of_rank, plain_of_rank, strict=True):
            assert found.losses == uncompiled.losses


def test_graphs_are_those_of_fully_shard(ranks2):
    raw_graphs, raw_breaks = ranks2(count_raw, "blocks")[0]
    for found in ranks2(count_several, "blocks", [_settings(3), _settings(3, transport="torch")])[0]:
        assert (found.graphs[2], sum(found.breaks.values())) == (raw_graphs, raw_breaks)


def test_methods_in_python_end_no_graph(ranks2):
    for of_rank in ranks2(count_several, "blocks", ["ddp", *map(_settings, STAGES)], Halves, timeout_seconds=400):
        assert [(found.graphs, found.breaks) for found in of_rank] == 4 * [(of_rank[0].graphs, {})]
        assert [found.losses for found in of_rank] == 4 * [of_rank[0].losses]


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_with_other_settings(ranks2, options):
    for form in ("net", "blocks"):
        compiled = ranks2(_both, form, Compiled, options, timeout_seconds=300)
        for found, uncompiled in compiled:
            assert found.losses == uncompiled.losses
            assert found.graphs[-1] == found.graphs[len(found.graphs) // 2 - 1] > 0


@pytest.mark.parametrize("form", ["blocks", "net"])
def test_by_hand(ranks2, form):
    for found, uncompiled in ranks2(_both, form, ByHand, {}, timeout_seconds=300):
        assert found.losses == uncompiled.losses
        assert found.graphs[-1] == found.graphs[len(found.graphs) // 2 - 1] > 0


def _both(form: str, kind: Any, options: dict[str, Any], backend: str = BACKEND) -> list[compiling.Counted]:
    return [compiling.count(f, _settings(3), kind, backend, **options) for f in (form, "none")]


def _units(backend: str = BACKEND, **more: Any) -> dict[str, Any]:
    return {"target": "units", "backend": backend, **more}


class Printing(zoo.Block):
    """What no graph holds: with ``fullgraph`` it cannot be compiled."""

    def forward(self, x: Any) -> Any:
        print(end="")
        return super().forward(x)


class OnePrints(Compiled):
    def build(self) -> None:
        super().build()
        self.net.blocks[1] = Printing()


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


def _setting(
    settings: dict[str, Any], kind: Any = Compiled, **more: Any
) -> tuple[list[compiling.Counted], list[str], list[int]]:
    """A run with the setting and one without; what was said; compiled calls left behind after the run."""
    said = Said()
    logging.getLogger("lightning_zero").addHandler(said)
    try:
        runs = (
            compiling.count_setting(kind, {**settings, "compile": _units(compiling.register(), **more)}),
            compiling.count("none", "ddp" if settings["engine"] == "deepspeed" else settings, kind),
        )
    finally:
        logging.getLogger("lightning_zero").removeHandler(said)
    return list(runs), said.lines, [runs[0].left_behind]


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize(("engine", "stage"), [*(("fsdp2", n) for n in STAGES), ("deepspeed", 1), ("deepspeed", 2)])
def test_the_setting_compiles_units(ranks2, engine, stage):
    settings = _settings(stage, engine=engine)
    for (found, plain), said, left in ranks2(_setting, settings, LooksAtCopies, timeout_seconds=300):
        assert found.losses == plain.losses
        assert found.names == plain.names
        assert found.graphs[0] == 1  # of three equal blocks
        assert found.graphs[-1] == found.graphs[len(found.graphs) // 2 - 1]
        assert found.breaks == {}
        assert (said, left) == ([], [0])


def _one_that_cannot() -> Any:
    return _setting(_settings(3), OnePrints, fullgraph=True)


def test_a_unit_that_cannot_be_compiled_is_named(ranks2):
    for rank, ((found, plain), said, _) in enumerate(ranks2(_one_that_cannot, timeout_seconds=300)):
        assert found.losses == plain.losses
        assert found.graphs[0] == 1
        assert len(said) == (rank == 0)
        assert not said or said[0].startswith("compile='units': 'net.blocks.1' is not compiled")


def test_a_unit_that_dynamo_gives_up_is_named(ranks2):
    """Each one, although it looks at the code of equal ones once."""
    for rank, ((found, plain), said, _) in enumerate(ranks2(_setting, _settings(3), TwoLoop, timeout_seconds=300)):
        assert found.losses == plain.losses
        assert len(said) == (2 if rank == 0 else 0)
        for line, name in zip(said, ("net.blocks.0", "net.blocks.1"), strict=False):
            assert line.startswith(f"compile='units': {name!r} is not compiled")


def _unknown_backend() -> str:
    try:
        compiling.count("none", _settings(3, compile=_units("inducktor")))
    except ValueError as error:
        return str(error)
    return ""


def test_an_unknown_backend_is_refused(ranks2):
    for text in ranks2(_unknown_backend):
        assert text.startswith("compile.backend='inducktor': torch.compile knows ")


def test_inductor(ranks2):
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    for found, uncompiled in ranks2(_both, "blocks", Compiled, {}, "inductor", timeout_seconds=500):
        # kernels of its own add up in another order
        assert found.losses == pytest.approx(uncompiled.losses, rel=1e-5)


def test_what_lies_between_units_is_compiled_too(ranks2):
    """``fully_shard`` alone compiles the blocks of a compiled network; here its stem and its head are graphs, too."""
    raw_graphs, raw_breaks = ranks2(count_raw, "net")[0]
    (found,) = ranks2(count_several, "net", [_settings(3)], timeout_seconds=200)[0]
    assert (found.graphs[2], sum(found.breaks.values())) == (raw_graphs + 2, raw_breaks)


@pytest.mark.parametrize("form", ["blocks", "net", "copy beside", "function"])
def test_deepspeed_makes_the_graphs_of_ddp(ranks2, form):
    strategies = ["ddp", *({"engine": "deepspeed", "stage": stage} for stage in (1, 2))]
    compiled = ranks2(count_several, form, strategies, timeout_seconds=300)
    plain = ranks2(count_several, "none", strategies, timeout_seconds=200)
    for of_rank, plain_of_rank in zip(compiled, plain, strict=True):
        for found, uncompiled in zip(of_rank, plain_of_rank, strict=True):
            assert found.losses == uncompiled.losses
            assert (found.graphs, found.breaks, found.names) == (
                of_rank[0].graphs,
                of_rank[0].breaks,
                of_rank[0].names,
            )


@pytest.mark.parametrize("form", ["blocks", "net", "copy beside", WHOLE])
def test_deepspeed_refuses_compiled_modules_at_stage_3(ranks2, form):
    for name, text in ranks2(outcome, compiling.count, form, {"engine": "deepspeed", "stage": 3}):
        assert name == "ValueError"
        assert "is compiled, but DeepSpeed gathers" in text
        assert "use engine='fsdp2' or stage=2" in text
