"""``zero_auto``: one stage for all ranks, picked before anything is sharded, and training as with its name."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from lightning_zero import ZeroConfig, auto, plan, strategy
from lightning_zero.planner import GIB
from tests.helpers import account, zoo
from tests.helpers.ranks import outcome

OPTIONS: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 4, "accumulate_grad_batches": 2}


class Small(account.Mlp):
    def __init__(self) -> None:
        super().__init__(width=32)
        self.blocks = self.blocks[:2]


def _fit(settings: Any, module: Any = None) -> tuple[int, list[str], list[float]]:
    """The stage that ran, what was said on this rank, the parameters' sums."""
    torch.manual_seed(1)
    module = module or Small()
    said: list[str] = []
    with mock.patch.object(strategy, "rank_zero_info", rank_zero_only(said.append)):
        trainer = zoo.make_trainer(settings, **OPTIONS)
        trainer.fit(module, DataLoader(account.Tokens(), batch_size=4))
    of_plan = [line for line in said if line.startswith("zero_auto")]
    return trainer.strategy.config.stage, of_plan, [float(p.sum()) for p in module.parameters()]


def _between(below: str, above: str) -> float:
    """GiB in which ``below`` fits and ``above`` does not."""
    made = plan(
        Small(),
        torch.zeros(4, 65, dtype=torch.long),
        world_size=2,
        micro_batches=2,
        config=ZeroConfig(min_unit_numel=1),
    )
    low, high = made.row(below).peak, made.row(above).peak
    assert low < high
    return (low + high) / 2 / GIB / (1 - auto.HEADROOM)


def test_the_cheapest_stage_that_fits_is_run_on_every_rank(ranks2):
    settings = {"auto": True, "min_unit_numel": 1, "device_memory_gib": _between("zero2", "zero1")}
    results = ranks2(_fit, settings)
    named = ranks2(_fit, {"stage": 2, "min_unit_numel": 1})
    assert [r[0] for r in results] == [2, 2]
    assert [r[2] for r in results] == [r[2] for r in named]
    (line,) = results[0][1]
    assert line.startswith("zero_auto takes zero2: needs")
    assert results[1][1] == []


def _fit_as_if_on_two_hosts(settings: Any) -> tuple[Any, list[str]]:
    plan_of_run, said = auto.plan_of_run, list[str]()
    with (
        mock.patch.object(auto, "plan_of_run", partial(plan_of_run, ranks_per_host=2)),
        mock.patch.object(strategy, "rank_zero_info", rank_zero_only(said.append)),
    ):
        module = Small()
        trainer = zoo.make_trainer(settings, **OPTIONS)
        for _ in range(2):  # the second decides anew
            trainer.fit(module, DataLoader(account.Tokens(), batch_size=4))
    return trainer.strategy.config.shard_size, said


def test_groups_are_those_of_hosts_where_they_fit(ranks4):
    chosen = ranks4(_fit_as_if_on_two_hosts, {"stage": 3, "min_unit_numel": 1, "shard_size": "auto"})
    assert [c[0] for c in chosen] == [2] * 4
    lines = [line for line in chosen[0][1] if "shard_size='auto'" in line]
    assert len(lines) == 2
    assert "takes 2, the ranks of one host: zero3 needs" in lines[0]


def _fit_as_if_on_cuda(settings: Any) -> tuple[Any, list[str], str]:
    """Planned for a GPU, whose memory is not the host's; run here."""
    seen: list[str] = []

    class Watch(Small):
        def on_train_start(self) -> None:
            seen.append(self.trainer.strategy.config.offload.target)

    with mock.patch.object(auto, "plan_of_run", partial(auto.plan_of_run, device="cuda")):
        stage, said, _ = _fit(settings, Watch())
    return stage, said, seen[0]


def test_offload_is_taken_where_nothing_fits_without(ranks2):
    example = torch.zeros(4, 65, dtype=torch.long)
    options: Any = {"world_size": 2, "micro_batches": 2, "device": "cuda", "config": ZeroConfig(min_unit_numel=1)}
    made = plan(Small(), example, **options)
    rows = {r.name: r.peak for r in made.rows if r.checkpointing}
    least = min(value for name, value in rows.items() if "_" not in name)
    assert rows["zero3_offload"] < least
    gib = (rows["zero3_offload"] + least) / 2 / GIB / (1 - auto.HEADROOM)
    settings = {"auto": True, "min_unit_numel": 1, "device_memory_gib": gib}
    for stage, said, target in ranks2(_fit_as_if_on_cuda, settings):
        assert target == "cpu"
        assert not said or said[0].startswith(f"zero_auto takes zero{stage}_offload")
    for stage, said, target in ranks2(_fit_as_if_on_cuda, {**settings, "device_memory_gib": 10, "offload": "cpu"}):
        assert (stage, target) == (1, "cpu")
        assert not said or "zero1_offload" in said[0]


class CannotBeCopied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lines = (line for line in "abc")  # a generator


def _fit_what_cannot_be_copied() -> None:
    _fit("zero_auto", CannotBeCopied())


def test_a_module_that_cannot_be_planned_is_an_error_on_every_rank(ranks2):
    for kind, text in ranks2(outcome, _fit_what_cannot_be_copied):
        assert kind == "ValueError"
        assert "strategy='zero_auto': the run could not be planned" in text
        assert "use strategy='zero1'" in text
