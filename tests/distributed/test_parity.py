"""Every kind of module trains as under DDP: losses, metrics, weights, on every rank. And the comparison can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers import zoo
from tests.helpers.parity import (
    FEATURES,
    Batches,
    Case,
    Run,
    batches,  # noqa: F401  (the fixture)
    cases,
    compare,
    reference,
)
from tests.helpers.zoo import KINDS

RANKS = {
    # kind -> ranks: where rows do not divide, and where nobody is there to share with
    "odd_shapes_and_dtypes": 3,
    "gan": 3,
    "accumulation_and_clip": 1,
    "data_written_before_backward": 1,
    "transforms_around_parameters": 1,
}

NAMED = [Run("sgd_momentum", name, 2) for name in ("zero1", "zero2", "zero3")]
TRANSPORTS = [
    tuple(Run("adam", (("stage", stage), ("transport", each), *zoo.BLOCKS.items()), 2) for each in ("direct", "torch"))
    for stage in (1, 3)
]
LAYERS = Run("transformer", (("stage", 3), ("units", ("embedding", "encoder.layers.*", "head"))), 2)
RUNS = [*NAMED, *(run for pair in TRANSPORTS for run in pair), LAYERS]
"""Trained in the jobs of the cases."""

CASES = [*cases(FEATURES), *(Case(name, "fsdp2", 1 + i % 3, ranks) for i, (name, ranks) in enumerate(RANKS.items()))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_ddp(case: Case, batches: Batches) -> None:  # noqa: F811
    """Through DeepSpeed also: no gradient is clipped unasked, and accumulation scales once."""
    compare(case, batches)


def test_registered_names_are_the_stages(batches: Batches) -> None:  # noqa: F811
    """``strategy="zero3"`` is what users write; the matrix above uses keywords."""
    expected = batches[reference("sgd_momentum", 2)]
    for run in NAMED:
        assert zoo.difference(batches[run], expected).largest <= KINDS["sgd_momentum"].tolerance, run.strategy


def test_an_embedding_and_a_head_are_units_of_their_own(batches: Batches) -> None:  # noqa: F811
    """As large ones are. Nothing that an embedding gets needs a gradient."""
    found = zoo.difference(batches[LAYERS], batches[reference("transformer", 2)])
    assert found.largest <= KINDS["transformer"].tolerance


def test_training_moves_every_reference(ranks1, batches: Batches) -> None:  # noqa: F811
    """A kind whose weights never move would agree with anything."""
    cases = {case.kind: case for case in CASES if case.world_size == 2 and case.refusal is None}
    before = ranks1(_initial_weights, list(cases))[0]
    for name, case in cases.items():
        after = batches[case.reference][0]
        assert len(after.losses) >= 4, name  # fewer where a kind leaves steps out on the rank that is looked at
        kept = {key: value for key, value in before[name].items() if value.numel() and key in after.weights}
        moved = [key for key, value in kept.items() if not torch.equal(value, after.weights[key])]
        assert len(moved) >= len(before[name]) / 3, (name, moved)


def test_another_strategy_would_be_told_apart(ranks2, batches: Batches) -> None:  # noqa: F811
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


def test_both_transports_train_alike(batches: Batches) -> None:  # noqa: F811
    """Two addends have one order of addition, so at 2 ranks the results are equal to the last bit; with more, gloo
    adds in another order than direct exchange does."""
    for direct, torchs in TRANSPORTS:
        assert zoo.difference(batches[direct], batches[torchs]).largest == 0.0, direct
