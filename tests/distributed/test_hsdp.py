"""``shard_size``: shards inside groups, replicas between them. 4 ranks as 2 x 2 train as DDP on 4 ranks does.

A failure of ``clip_by_norm`` alone says that replicas were counted twice, of ``accumulation`` that a group's gradients
were not averaged with the others', of ``adafactor`` that whole tensors were put together over the wrong axis.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero.config import ZeroConfig
from lightning_zero.engines.fsdp2.engine import Fsdp2Engine
from lightning_zero.engines.precision import DtypePolicy
from tests.helpers import moves, zoo
from tests.helpers.ranks import outcome
from tests.helpers.zoo import KINDS, make_trainer

pytestmark = pytest.mark.sampled

OFTEN = (
    ("adam", 3),
    ("clip_by_norm", 3),
    ("accumulation_and_clip", 2),
    ("unused_on_some_ranks_heads", 1),
    ("gan", 3),
    ("adafactor", 3),
    ("grad_norm_logged", 2),
    ("penalty_over_parameters", 3),
    ("batch_norm", 1),
)


def _cases() -> list:
    trains = [kind for kind in KINDS if KINDS[kind].raises is None and KINDS[kind].refused is None]
    everything = [(kind, stage) for kind in trains for stage in (1, 2, 3)]
    return [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.full) for case in everything]


@pytest.mark.parametrize(("kind", "stage"), _cases())
def test_two_by_two_equals_ddp(kind: str, stage: int, ranks4) -> None:
    if KINDS[kind].unsupported_units.get(stage):
        pytest.skip("this kind does not train in blocks at this stage, with or without replicas")
    reference = ranks4(zoo.train, kind, KINDS[kind].reference, True)
    results = ranks4(zoo.train, kind, {"stage": stage, "shard_size": 2, **zoo.BLOCKS}, True)
    difference = zoo.difference(results, reference)
    assert difference.largest <= KINDS[kind].tolerance, (difference, KINDS[kind].reason)


def _shard_two_by_two() -> tuple[list[int], float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 6, bias=False)
    engine = Fsdp2Engine(ZeroConfig(stage=3, shard_size=2), torch.device("cpu"), DtypePolicy())
    engine.shard(module)
    shard = engine.shards[module.weight].to_local()
    return list(shard.shape), shard.sum().item()


def test_shards_lie_in_groups_of_consecutive_ranks(ranks4) -> None:
    shapes, sums = zip(*ranks4(_shard_two_by_two), strict=True)
    assert list(shapes) == [[3, 8]] * 4  # half, not a quarter
    assert sums[0] == sums[2] != sums[1] == sums[3]


def test_unequal_groups_are_refused_on_all_ranks(ranks3) -> None:
    answers = ranks3(outcome, zoo.train, "adam", {"stage": 3, "shard_size": 2})
    assert all("shard_size=2 does not divide the 3 ranks" in text for _, text in answers), answers


def test_a_group_of_all_is_no_group(ranks2) -> None:
    reference = ranks2(zoo.train, "adam", {"stage": 3})
    assert zoo.difference(ranks2(zoo.train, "adam", {"stage": 3, "shard_size": 2}), reference).largest == 0.0


def _save_and_resume(settings: dict[str, Any], path: str, resume: str | None) -> moves.Run:
    torch.manual_seed(2)
    module = moves.Features()
    trainer = make_trainer({"min_unit_numel": 1, **settings}, max_steps=10 if resume is None else 14)
    trainer.fit(module, moves.loader("mid-epoch", 4), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return moves.Run(module.losses, {k: v.detach().clone() for k, v in module.state_dict().items()}, None)


@pytest.mark.parametrize("form", ["file", "sharded"])
def test_replicas_save_once_and_resume_anywhere(form: str, ranks4, tmp_path: Path) -> None:
    groups, whole = {"stage": 3, "shard_size": 2, "checkpoint": form}, {"stage": 2}
    first, second, third = (str(tmp_path / name) for name in ("1.ckpt", "2.ckpt", "3.ckpt"))
    ranks4(_save_and_resume, groups, first, None)
    into_groups = ranks4(_save_and_resume, groups, second, first)
    into_one = ranks4(_save_and_resume, whole, third, first)
    for ours, reference in zip(into_groups, into_one, strict=True):
        torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(reference.losses), rtol=1e-5, atol=1e-6)
        for name, weight in reference.weights.items():  # order of summation
            torch.testing.assert_close(ours.weights[name], weight, rtol=1e-5, atol=1e-6)
