"""Stages 1 and 2 on CPUs, and any stage of a process alone: a shard is a part of its gathered copy.

That training is right with it is seen by every parity test. Here: where shards lie, that they stay there, and what
happens when they no longer do.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.checkpoint.collected import Collected
from lightning_zero.comm.shards import gathered, gathered_on_rank_0
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.fsdp2.engine import Fsdp2Engine
from lightning_zero.engines.precision import DtypePolicy
from tests.helpers import pretend

MIXED = DtypePolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLAIN = DtypePolicy()
ROWS = 5
"""Not a multiple of 2 or 3: the last rank's shard has room for a row more than it owns."""


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(ROWS, ROWS) for _ in range(2))
        self.head = nn.Linear(ROWS, ROWS)

    def training_step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.to(block.weight.dtype))
        return self.head(x.to(self.head.weight.dtype)).float().square().mean()


def _engine(stage: int, dtypes: DtypePolicy = PLAIN, **settings: Any) -> Fsdp2Engine:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config = ZeroConfig(stage=stage, min_unit_numel=1, find_unused_parameters=False, **settings)
    engine = Fsdp2Engine(config, torch.device("cpu"), dtypes)
    engine.shard(Module())
    return engine


def _step(engine: Fsdp2Engine, optimizer: torch.optim.Optimizer) -> None:
    engine.backward(engine.run("training_step", torch.ones(2, ROWS)).backward)
    engine.step(optimizer)
    with engine.view():
        optimizer.zero_grad()


def _where(engine: Fsdp2Engine) -> list[int]:
    return [p.to_local().untyped_storage().data_ptr() for p in engine.shards.values()]


def _held(stage: int, dtypes: DtypePolicy, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes of this rank's parameters before, in and after a step, and whether shards have stayed where they were."""
    engine = _engine(stage, dtypes, **settings)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    places = _where(engine)
    held = [engine.model_state([]).held("parameters")]
    loss = engine.run("training_step", torch.ones(2, ROWS))
    held.append(engine.model_state([]).held("parameters"))
    gathered_now = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
    engine.backward(loss.backward)
    engine.step(optimizer)
    held.append(engine.model_state([]).held("parameters"))
    own = sum(p.to_local().nbytes for p in engine.shards.values())
    return {"held": held, "own": own, "stayed": places == _where(engine), "in copies": len(gathered_now & {*places})}


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 3), (3, 1)])
def test_shards_lie_in_copies(ranks, stage, world_size):
    found = ranks(_held, stage, PLAIN, {}, world_size=world_size)
    padded = world_size * -(-ROWS // world_size)
    whole = 4 * 3 * (padded * ROWS + padded)
    for rank in found:
        spare = max(each["own"] for each in found) - rank["own"]  # rows that only make the parts equal
        assert rank["held"] == [whole - spare] * 3
        assert rank["stayed"]
        assert rank["in copies"] == 6


@pytest.mark.parametrize(
    ("stage", "dtypes", "settings"),
    [(3, PLAIN, {}), (2, MIXED, {}), (2, PLAIN, {"offload": pretend.OFFLOAD})],
    ids=["stage 3", "another dtype", "offloaded"],
)
def test_other_copies_go(ranks2, stage, dtypes, settings):
    for rank in ranks2(_held, stage, dtypes, settings):
        before, inside, after = rank["held"]
        assert before == rank["own"] < inside
        assert after == rank["own"] or stage == 3
        assert not rank["in copies"]


def _on_rank_0(shard_size: int | None) -> tuple[bool, int]:
    """Whether tensors that rank 0 collects are those that all gather, and are nowhere else."""
    engine = _engine(3, shard_size=shard_size)
    alike = []
    for shard in engine.shards.values():
        found = gathered_on_rank_0(shard, Collected([]).empty)
        alike.append(torch.equal(found, gathered(shard)) if found is not None else gathered(shard) is None)
    return all(alike), sum(alike)


@pytest.mark.parametrize(("world_size", "shard_size"), [(3, None), (4, 2)])
def test_rank_0_collects_what_ranks_gather(ranks, world_size, shard_size):
    first, *others = ranks(_on_rank_0, shard_size, world_size=world_size)
    assert first == (True, 6)
    assert all(each == (False, 0) for each in others)


def _moved(stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after three steps; before the second, the module's are put elsewhere, as ``Module.to`` does."""
    results = []
    for moves in (False, True):
        engine = _engine(stage)
        optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
        for step in range(3):
            if moves and step == 1:
                places = _where(engine)
                with engine.view():
                    engine.module._apply(torch.clone)
                assert places == _where(engine)
            _step(engine, optimizer)
        results.append([gathered(p) for p in engine.shards.values()])
    return results[0], results[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_puts_parameters_elsewhere_writes_to_them(ranks2, stage):
    for expected, found in ranks2(_moved, stage):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _restored() -> list[tuple[bool, int]]:
    """Of each parameter after the run: whether it is what the shards were together, and bytes held beyond its own."""
    engine = _engine(2)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    _step(engine, optimizer)
    expected = [gathered(engine.shards[p]) for p in engine.module.parameters()]
    engine.restore(True)
    return [
        (torch.equal(p, whole), p.untyped_storage().nbytes() - p.nbytes)
        for p, whole in zip(engine.module.parameters(), expected, strict=True)
    ]


def test_what_is_left_after_a_run_holds_no_more_than_itself(ranks2):
    assert ranks2(_restored) == [[(True, 0)] * 6] * 2


class Raw(torch.optim.Optimizer):
    """Element-wise, and writes where no tensor's version tells of it, as kernels of other libraries do."""

    def __init__(self, params: Any, added: float) -> None:
        super().__init__(params, {"added": added})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.detach().numpy()[...] += group["added"]
        return loss


def _by_local_tensor(engine: Fsdp2Engine, mine: bool) -> None:
    for p in engine.shards.values() if mine else ():
        p.to_local().add_(1.0)


def _through_the_view(engine: Fsdp2Engine, mine: bool) -> None:
    with engine.view():
        for p in engine.module.parameters():  # in a bare loop all ranks touch what one does
            p.add_(float(mine))


def _through_data(engine: Fsdp2Engine, mine: bool) -> None:
    with engine.view():
        for p in engine.module.parameters():
            p.data.add_(float(mine))


def _elsewhere(engine: Fsdp2Engine, mine: bool) -> None:
    with engine.view():  # reads whole ones: every rank calls it
        engine.module._apply(lambda t: t + float(mine))


def _by_optimizer(engine: Fsdp2Engine, mine: bool) -> None:
    with engine.view():
        engine.step(Raw(engine.module.parameters(), 1.0 * mine))


def _to_the_copies(engine: Fsdp2Engine, mine: bool) -> None:
    """A forward is collective; one rank alone writes in it."""

    def writes(module: Module, x: Tensor) -> Tensor:
        for p in module.parameters() if mine else ():
            p.add_(1.0)
        return x

    with mock.patch.object(Module, "training_step", writes):
        engine.run("training_step", torch.ones(1))


WRITES = {
    "local": _by_local_tensor,
    "view": _through_the_view,
    "data": _through_data,
    "elsewhere": _elsewhere,
    "optimizer": _by_optimizer,
    "copies": _to_the_copies,
}


def _after_writing(way: str, rank: int | None) -> tuple[float, float, float]:
    """The loss before ``rank`` writes, the loss afterwards, and that of a whole module with the same values."""
    engine = _engine(2)
    with torch.no_grad():
        for _ in range(2):  # from the second on nothing has changed
            before = engine.run("training_step", torch.ones(2, ROWS))
        WRITES[way](engine, rank in (None, dist.get_rank()))
        found = engine.run("training_step", torch.ones(2, ROWS))
        module = Module()
        for p, whole in zip(module.parameters(), engine.module.parameters(), strict=True):
            p.copy_(gathered(engine.shards[whole]))
        return before.item(), found.item(), module.training_step(torch.ones(2, ROWS)).item()


def _after_writing_in_turn(way: str) -> list[tuple[float, float, float]]:
    return [_after_writing(way, rank) for rank in (0, 1, None)]


@pytest.mark.parametrize("way", WRITES)
def test_what_one_rank_writes_between_batches_reaches_all(ranks2, way):
    for losses in ranks2(_after_writing_in_turn, way):
        for before, found, expected in losses:
            assert before != found == expected


def test_a_rank_without_rows_has_nothing_to_write(ranks4):
    """Five rows are shared out as 2, 2, 1 and 0. What the last rank writes to its copies must not stay in them."""
    for before, found, expected in ranks4(_after_writing, "copies", 3):
        assert before == found == expected
