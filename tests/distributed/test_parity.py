"""Every kind of module trains under every stage as under DDP: losses, metrics, weights, on every rank.

What a failure localises: the kind names the feature; the stage says which life-cycle (3: units come and go, 2:
gradients are reduced per micro-batch, 1: at the last one); ``blocks`` against ``whole`` says whether it takes several
units; ``different`` seeds fail alone when rank 0's values did not reach the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.helpers import zoo
from tests.helpers.batches import Batches, Run, reference
from tests.helpers.ranks import RankError, outcome
from tests.helpers.zoo import KINDS

LAYOUTS: dict[str, dict[str, Any]] = {"blocks": zoo.BLOCKS, "whole": zoo.WHOLE}
ROTATION = (1, 3, 4)
QUICK_WORLD_SIZES = (2, 2, 3, 2, 2, 4, 2, 1)
"""Eight, so that each of them meets each stage."""
FOUND = (("data_written_before_backward", 3, 1), ("transforms_around_parameters", 1, 1))
"""Kind, stage and ranks of faults that only the full matrix has found."""


@dataclass(frozen=True)
class Case:
    kind: str
    stage: int
    world_size: int
    layout: str
    seeds: str
    """``"same"`` on all ranks, or ``"different"`` (rank 0 wins)."""
    engine: str = "fsdp2"

    def __str__(self) -> str:
        name = f"{self.kind}-zero{self.stage}-{self.world_size}ranks-{self.layout}-{self.seeds}"
        return name if self.engine == "fsdp2" else f"{name}-{self.engine}"

    @property
    def refusal(self) -> str | None:
        """The pattern of the error that every rank owes."""
        kind = KINDS[self.kind]
        if refusal := kind.refusal(self.engine, self.stage):
            return refusal
        if self.world_size == 1:
            return None
        if self.engine == "deepspeed":
            return kind.unsupported_deepspeed.get(self.stage) or kind.raises
        return (kind.unsupported_units.get(self.stage) if self.layout == "blocks" else None) or kind.raises

    @property
    def run(self) -> Run:
        layout = LAYOUTS[self.layout] if self.engine == "fsdp2" else {}
        settings = {"engine": self.engine, "stage": self.stage, **layout}
        refused, different = self.refusal is not None, self.seeds == "different"
        return Run(self.kind, tuple(settings.items()), self.world_size, different, refused)

    @property
    def reference(self) -> Run:
        return reference(self.kind, self.world_size, self.seeds == "different")


def _quick_stage(index: int) -> int:
    return 1 + index % 3


def _quick() -> set[Case]:
    """Every kind once, stages and world sizes in turn; every sixth through DeepSpeed, too. None that compiles."""
    cases = set()
    for index, kind in enumerate(KINDS):
        if KINDS[kind].compiles:
            continue
        world_size = QUICK_WORLD_SIZES[index % len(QUICK_WORLD_SIZES)]
        cases.add(Case(kind, _quick_stage(index), world_size, "whole" if index % 5 == 4 else "blocks", "different"))
        if index % 6 == 0 and KINDS[kind].on_deepspeed:
            cases.add(Case(kind, 1 + (index // 6) % 3, 2, "blocks", "different", "deepspeed"))
    return cases


def _sample() -> set[Case]:
    """Every kind at 2 ranks, and every third kind once at 1, 3 or 4.

    Together with the quick ones, each kind meets stage 3 and one of the others; kinds that compile, of which none is
    quick, meet them here. At 2 ranks stages 1 and 3 start from different seeds in blocks, stage 2 from the same as one
    unit; the rotation walks so that every pair of world size, stage and layout meets several kinds. Through DeepSpeed,
    every fifth kind at 2 ranks, its stage in turn, and a few at 3 ranks. ``make test-all`` walks the rest.
    """
    cases = {Case(*found, "blocks", "different") for found in FOUND}
    for index, kind in enumerate(KINDS):
        compiles, quick_stage = KINDS[kind].compiles, _quick_stage(index)
        if compiles or quick_stage != 3:
            cases.add(Case(kind, 3, 2, "blocks", "different"))
        if compiles or quick_stage == 3:
            cases.add(Case(kind, 2, 2, "whole", "same") if index % 2 else Case(kind, 1, 2, "blocks", "different"))
        turn, left_out = divmod(index, 3)
        if not left_out:
            world_size, stage = ROTATION[turn % 3], 1 + (turn // 3 + turn) % 3
            cases.add(Case(kind, stage, world_size, "whole" if turn % 4 == 3 else "blocks", "different"))
        if index % 5 == 0 and KINDS[kind].on_deepspeed:
            cases.add(Case(kind, 1 + (index // 5) % 3, 2, "blocks", "different", "deepspeed"))
        if index % 15 == 7 and KINDS[kind].on_deepspeed:
            cases.add(Case(kind, 1 + (index // 15) % 3, 3, "blocks", "different", "deepspeed"))
    return cases


def _cases() -> list[Any]:
    quick, sample = _quick(), _sample()
    cases = [
        # Different seeds find all that the same ones do. How the units are cut is tried where ranks share them out
        Case(kind, stage, world_size, layout, "different")
        for kind in KINDS
        for world_size in (2, *ROTATION)
        for stage in (1, 2, 3)
        for layout in (LAYOUTS if world_size in (2, 3) else ["blocks"])
    ]
    cases += [
        Case(kind, stage, world_size, "blocks", "different", "deepspeed")
        for kind in KINDS
        if KINDS[kind].on_deepspeed
        for world_size in (2, 3, 1)
        for stage in (1, 2, 3)
    ]
    cases += sorted((quick | sample) - set(cases), key=str)
    return [pytest.param(case, id=str(case), marks=_level(case, quick, sample)) for case in cases]


def _level(case: Case, quick: set[Case], sample: set[Case]) -> Any:
    if case in quick:
        return ()
    return pytest.mark.rest if case in sample else pytest.mark.full


@pytest.fixture(scope="module")
def batches(ranks, request) -> Batches:
    """Trains what the selected cases need, many kinds per job."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.module is request.module]
    cases = [call.params["case"] for call in calls if call is not None and "case" in call.params]
    return Batches(ranks, [run for case in cases for run in (case.run, *([] if case.refusal else [case.reference]))])


@pytest.mark.timeout(600)  # a job of many kinds, and where it fails one of this kind alone
@pytest.mark.parametrize("case", _cases())
def test_training_equals_ddp(case: Case, batches: Batches) -> None:
    """Through DeepSpeed also: no gradient is clipped unasked, and accumulation scales once."""
    kind = KINDS[case.kind]
    if case.refusal is not None:
        for name, text in batches[case.run]:
            assert name != "ok"
            assert re.search(case.refusal, text), text
        return
    difference = zoo.difference(batches[case.run], batches[case.reference])
    assert difference.largest <= kind.tolerance, (difference, kind.reason)


def test_ddp_refuses_what_the_table_says_lightning_refuses(ranks2) -> None:
    for name, kind in KINDS.items():
        if kind.raises is not None:
            for error, text in ranks2(outcome, zoo.train, name, kind.reference):
                assert error != "ok"
                assert re.search(kind.raises, text), text


def test_registered_names_are_the_stages(batches: Batches) -> None:
    """``strategy="zero3"`` is what users write; the matrix above uses keywords."""
    expected = batches[reference("sgd_momentum", 2)]
    for name in ("zero1", "zero2", "zero3"):
        result = batches[Run("sgd_momentum", name, 2)]
        assert zoo.difference(result, expected).largest <= KINDS["sgd_momentum"].tolerance, name


@pytest.mark.parametrize("cases", [_quick, _sample])
def test_samples_cover_every_pair(cases: Callable[[], set[Case]]) -> None:
    sample = cases()
    for stage in (1, 2, 3):
        assert any(c.engine == "deepspeed" and c.stage == stage for c in sample), stage
    sample = {c for c in sample if c.engine == "fsdp2"}
    for world_size in (1, 2, 3, 4):
        for stage in (1, 2, 3):
            assert any(c.world_size == world_size and c.stage == stage for c in sample), (world_size, stage)
        for layout in LAYOUTS:
            assert any(c.world_size == world_size and c.layout == layout for c in sample), (world_size, layout)
    assert {c.kind for c in sample} == {name for name, kind in KINDS.items() if cases is _sample or not kind.compiles}


def test_the_samples_take_every_kind_through_stage_3_and_another() -> None:
    stages: dict[str, set[int]] = {}
    for case in _quick() | _sample():
        if case.engine == "fsdp2":
            stages.setdefault(case.kind, set()).add(case.stage)
    assert stages.keys() == KINDS.keys()
    assert all(3 in found and found & {1, 2} for found in stages.values())


def test_training_moves_every_reference(ranks1, batches: Batches) -> None:
    """A kind whose weights never move would agree with anything."""
    cases = {case.kind: case for case in _quick() if case.engine == "fsdp2" and case.refusal is None}
    before = ranks1(_initial_weights, list(cases))[0]
    for name, case in cases.items():
        after = batches[case.reference][0]
        assert len(after.losses) >= 4, name  # fewer where a kind leaves steps out on the rank that is looked at
        kept = {key: value for key, value in before[name].items() if value.numel() and key in after.weights}
        moved = [key for key, value in kept.items() if not torch.equal(value, after.weights[key])]
        assert len(moved) >= len(before[name]) / 3, (name, moved)


def test_another_strategy_would_be_told_apart(ranks2, batches: Batches) -> None:
    """The comparison fails for a run whose ranks do not exchange gradients, and for one with another seed."""
    expected = batches[reference("sgd_momentum", 2)]
    alone = ranks2(_train_without_exchange)
    assert zoo.difference(alone, expected).losses > 1e-3
    assert zoo.difference(alone, expected).weights > 1e-3


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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_both_transports_train_alike(stage: int, ranks2) -> None:
    """Two addends have one order of addition, so at 2 ranks the results are equal to the last bit; with more, gloo
    adds in another order than direct exchange does."""
    direct, torchs = (
        ranks2(zoo.train, "adam", {"stage": stage, "transport": transport, **zoo.BLOCKS}, True)
        for transport in ("direct", "torch")
    )
    assert zoo.difference(direct, torchs).largest == 0.0
