"""Every kind of module trains under every stage as under DDP: losses, metrics, weights, on every rank.

What a failure localises: the kind names the feature; the stage says which life-cycle (3: units come and go, 2:
gradients are reduced per micro-batch, 1: at the last one); ``blocks`` against ``whole`` says whether it takes several
units; ``different`` seeds fail alone when rank 0's values did not reach the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.helpers import zoo
from tests.helpers.ranks import RankError, outcome
from tests.helpers.zoo import KINDS

LAYOUTS: dict[str, dict[str, Any]] = {"blocks": zoo.BLOCKS, "whole": zoo.WHOLE}
ROTATION = (1, 3, 4)
TIMEOUT_SECONDS = 45.0
"""One run takes well under 2 s."""


@dataclass(frozen=True)
class Case:
    kind: str
    stage: int
    world_size: int
    layout: str
    seeds: str
    """``"same"`` on all ranks, or ``"different"`` (rank 0 wins)."""

    def __str__(self) -> str:
        return f"{self.kind}-zero{self.stage}-{self.world_size}ranks-{self.layout}-{self.seeds}"


def _sample() -> set[Case]:
    """Every kind at 2 ranks under stage 3 and in turn 1 or 2, and every third kind once at 1, 3 or 4.

    At 2 ranks stages 1 and 3 start from different seeds in blocks, stage 2 from the same as one unit; the rotation
    walks so that every pair of world size, stage and layout meets several kinds. ``make test-full``
    walks the rest.
    """
    cases = set()
    for index, kind in enumerate(KINDS):
        cases.add(Case(kind, 3, 2, "blocks", "different"))
        cases.add(Case(kind, 2, 2, "whole", "same") if index % 2 else Case(kind, 1, 2, "blocks", "different"))
        turn, left_out = divmod(index, 3)
        if not left_out:
            world_size, stage = ROTATION[turn % 3], 1 + (turn // 3 + turn) % 3
            cases.add(Case(kind, stage, world_size, "whole" if turn % 4 == 3 else "blocks", "different"))
    return cases


def _cases() -> list[Any]:
    sample = _sample()
    cases = [
        Case(kind, stage, world_size, layout, seeds)
        for kind in KINDS
        for world_size in (2, *ROTATION)
        for seeds in ("same", "different")
        for stage in (1, 2, 3)
        for layout in LAYOUTS
        if not (world_size == 1 and seeds == "different" and Case(kind, stage, 1, layout, seeds) not in sample)
    ]
    return [pytest.param(case, id=str(case), marks=() if case in sample else pytest.mark.full) for case in cases]


@pytest.fixture(scope="module")
def references(ranks):
    """``(kind, world size, seeds)`` -> every rank's result under DDP, computed when first asked for."""
    known: dict[tuple[str, int, str], list[zoo.Result]] = {}

    def get(case: Case) -> list[zoo.Result]:
        # Without random numbers in training, DDP ends in the same place from either seeding: rank 0 wins there too.
        seeds = case.seeds if KINDS[case.kind].random else "different"
        key = (case.kind, case.world_size, seeds)
        if key not in known:
            strategy = KINDS[case.kind].reference
            known[key] = ranks(zoo.train, case.kind, strategy, seeds == "different", world_size=case.world_size)
        return known[key]

    return get


@pytest.mark.parametrize("case", _cases())
def test_training_equals_ddp(case: Case, ranks, references) -> None:
    kind = KINDS[case.kind]
    strategy = {"stage": case.stage, **LAYOUTS[case.layout]}
    arguments = (case.kind, strategy, case.seeds == "different")
    in_blocks = kind.unsupported_units.get(case.stage) if case.layout == "blocks" else None
    refusal = in_blocks or kind.raises
    if refusal is not None and case.world_size > 1:
        answers = ranks(outcome, zoo.train, *arguments, world_size=case.world_size, timeout_seconds=TIMEOUT_SECONDS)
        for name, text in answers:
            assert name != "ok"
            assert re.search(refusal, text), text
        return
    results = ranks(zoo.train, *arguments, world_size=case.world_size, timeout_seconds=TIMEOUT_SECONDS)
    difference = zoo.difference(results, references(case))
    assert difference.largest <= kind.tolerance, (difference, kind.reason)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_both_transports_train_alike(stage: int, ranks2) -> None:
    """Two addends have one order of addition, so at 2 ranks the results are equal to the last bit; with more, gloo
    adds in another order than direct exchange does."""
    direct, torchs = (
        ranks2(zoo.train, "adam", {"stage": stage, "transport": transport, **zoo.BLOCKS}, True)
        for transport in ("direct", "torch")
    )
    assert zoo.difference(direct, torchs).largest == 0.0


def _deepspeed_cases() -> list[Any]:
    """Every fifth kind at 2 ranks, its stage in turn, and a few at 3 ranks; all other cases are ``full``."""
    cases = []
    for index, kind in enumerate(KINDS):
        for world_size in (2, 3, 1):
            for stage in (1, 2, 3):
                case = Case(kind, stage, world_size, "blocks", "different")
                sampled = world_size == 2 and index % 5 == 0 and stage == 1 + (index // 5) % 3
                sampled |= world_size == 3 and index % 15 == 7 and stage == 1 + (index // 15) % 3
                cases.append(pytest.param(case, id=f"{case}-deepspeed", marks=() if sampled else pytest.mark.full))
    return cases


@pytest.mark.parametrize("case", _deepspeed_cases())
def test_deepspeed_equals_ddp(case: Case, ranks, references) -> None:
    """As above, through ``deepspeed.initialize``: no gradient is clipped unasked, and accumulation scales once."""
    kind = KINDS[case.kind]
    arguments = (case.kind, {"engine": "deepspeed", "stage": case.stage}, True)
    refusal = kind.unsupported_deepspeed.get(case.stage) or kind.raises
    if refusal is not None and case.world_size > 1:
        for name, text in ranks(outcome, zoo.train, *arguments, world_size=case.world_size, timeout_seconds=120.0):
            assert name != "ok"
            assert re.search(refusal, text), text
        return
    results = ranks(zoo.train, *arguments, world_size=case.world_size, timeout_seconds=120.0)
    difference = zoo.difference(results, references(case))
    assert difference.largest <= kind.tolerance, (difference, kind.reason)


def test_ddp_refuses_what_the_table_says_lightning_refuses(ranks2) -> None:
    for name, kind in KINDS.items():
        if kind.raises is not None:
            for error, text in ranks2(outcome, zoo.train, name, kind.reference):
                assert error != "ok"
                assert re.search(kind.raises, text), text


def test_registered_names_are_the_stages(ranks2, references) -> None:
    """``strategy="zero3"`` is what users write; the matrix above uses keywords."""
    reference = references(Case("sgd_momentum", 1, 2, "whole", "same"))
    for name in ("zero1", "zero2", "zero3"):
        result = ranks2(zoo.train, "sgd_momentum", name)
        assert zoo.difference(result, reference).largest <= KINDS["sgd_momentum"].tolerance, name


def test_sample_covers_every_pair() -> None:
    sample = _sample()
    for world_size in (1, 2, 3, 4):
        for stage in (1, 2, 3):
            assert any(c.world_size == world_size and c.stage == stage for c in sample), (world_size, stage)
        for layout in LAYOUTS:
            assert any(c.world_size == world_size and c.layout == layout for c in sample), (world_size, layout)
    assert {c.kind for c in sample} == set(KINDS)


def test_training_moves_every_reference(ranks1, references) -> None:
    """A kind whose weights never move would agree with anything."""
    names = [name for name, kind in KINDS.items() if kind.raises is None]
    before = ranks1(_initial_weights, names)[0]
    for name in names:
        after = references(Case(name, 1, 2, "blocks", "different"))[0]
        assert len(after.losses) >= 6, name
        moved = [
            key for key, value in before[name].items() if value.numel() and not torch.equal(value, after.weights[key])
        ]
        assert len(moved) >= len(before[name]) / 3, (name, moved)


def test_another_strategy_would_be_told_apart(ranks2, references) -> None:
    """The comparison fails for a run whose ranks do not exchange gradients, and for one with another seed."""
    reference = references(Case("sgd_momentum", 1, 2, "blocks", "different"))
    alone = ranks2(_train_without_exchange)
    assert zoo.difference(alone, reference).losses > 1e-3
    assert zoo.difference(alone, reference).weights > 1e-3


def test_difference_reports_what_is_wrong() -> None:
    good = zoo.Result([1.0, 2.0], {"w": torch.ones(3), "e": torch.ones(0)}, {"m": 1.0}, {"x": torch.ones(2)})
    assert zoo.difference([good], [good]).largest == 0.0
    for bad, part in (
        (replace(good, losses=[1.0]), "losses"),
        (replace(good, losses=[1.0, float("nan")]), "losses"),
        (replace(good, weights={"w": torch.ones(3)}), "weights"),
        (replace(good, weights=good.weights | {"w": torch.ones(2)}), "weights"),
        (replace(good, weights=good.weights | {"w": torch.ones(3).double()}), "weights"),
        (replace(good, weights=good.weights | {"w": torch.nn.Parameter(torch.ones(3))}), "weights"),
        (replace(good, metrics={}), "metrics"),
        (replace(good, extra={}), "metrics"),
    ):
        assert getattr(zoo.difference([bad], [good]), part) == float("inf"), (bad, part)
    off = replace(good, weights=good.weights | {"w": torch.tensor([1.0, 1.0, 1.5])})
    assert zoo.difference([good, off], [good, good]).weights == pytest.approx(0.5)
    assert zoo.difference([good, off], [good, good]).worst_weight == "w"


def test_failing_rank_under_the_strategy_is_shown(ranks2) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        ranks2(_raise_on_rank_1, {"stage": 3, **zoo.BLOCKS}, timeout_seconds=20)
    assert "the batch that only rank 1 cannot read" in str(caught.value)


def _initial_weights(names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    weights = {}
    for name in names:
        module = zoo.make_module(name)
        module.configure_model()
        weights[name] = {k: v.detach().clone() for k, v in module.state_dict().items()}
    return weights


def _train_without_exchange() -> zoo.Result:
    import os

    os.environ["WORLD_SIZE"] = "1"
    return zoo.train("sgd_momentum", "auto", True)


class _RaisesOnRank1(zoo.Zoo):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == 1:
            raise OSError("the batch that only rank 1 cannot read")
        return super().training_step(batch, batch_idx)


def _raise_on_rank_1(strategy: dict[str, Any]) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH)
    zoo.make_trainer(strategy).fit(_RaisesOnRank1(), loader)
