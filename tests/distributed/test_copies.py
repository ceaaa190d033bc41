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

from lightning_zero.comm.shards import gathered
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.fsdp2.engine import Fsdp2Engine
from lightning_zero.engines.precision import DtypePolicy

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


def _engine() -> Fsdp2Engine:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config = ZeroConfig(stage=2, min_unit_numel=1, find_unused_parameters=False)
    engine = Fsdp2Engine(config, torch.device("cpu"), DtypePolicy())
    engine.shard(Module())
    return engine


def _where(engine: Fsdp2Engine) -> list[int]:
    return [p.to_local().untyped_storage().data_ptr() for p in engine.shards.values()]


def _held() -> dict[str, Any]:
    """Bytes of this rank's parameters before, in and after a step, and whether shards have stayed where they were."""
    engine = _engine()
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


def test_shards_lie_in_copies(ranks3):
    found = ranks3(_held)
    padded = 3 * -(-ROWS // 3)
    full = 4 * 3 * (padded * ROWS + padded)
    for rank in found:
        spare = max(each["own"] for each in found) - rank["own"]  # rows that only make the parts equal
        assert rank["held"] == [full - spare] * 3
        assert rank["stayed"]
        assert rank["in copies"] == 6


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
    engine = _engine()
    with torch.no_grad():
        for _ in range(2):  # from the second on nothing has changed
            before = engine.run("training_step", torch.ones(2, ROWS))
        WRITES[way](engine, rank in (None, dist.get_rank()))
        found = engine.run("training_step", torch.ones(2, ROWS))
        module = Module()
        for p, full in zip(module.parameters(), engine.module.parameters(), strict=True):
            p.copy_(gathered(engine.shards[full]))
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
