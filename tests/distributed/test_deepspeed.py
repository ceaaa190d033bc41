"""What the engine ``deepspeed`` owes beyond the table of kinds (``test_parity``): later runs, what the
module is afterwards, checkpoints to and from other strategies, precision.

A failure in ``..._ordinary...`` is about what DeepSpeed leaves behind, in ``test_checkpoint...`` about pieces and full
tensors. Loops outside of training are in ``test_uneven``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import test_loops as loops
from tests.helpers import moves, zoo
from tests.helpers.zoo import make_trainer

pytest.importorskip("deepspeed")


def _strategy(stage: int, **settings: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "stage": stage, **settings}


# -- loops and runs --------------------------------------------------------------------------------------------------


def test_runs_under_both_engines_in_turn(ranks2) -> None:
    strategies = [
        _strategy(3, after_fit="sharded"),
        _strategy(3, after_fit="whole"),
        {"stage": 3, **zoo.BLOCKS},
        _strategy(1),
        "ddp",
    ]
    reference = ranks2(loops._fit_in_turn, ["ddp"] * len(strategies))
    for result, expected in zip(ranks2(loops._fit_in_turn, strategies), reference, strict=True):
        assert loops._close(result, expected)


def _what_a_run_leaves(strategy: dict[str, Any]) -> list[str]:
    """Names in torch that are something else after a run than before it."""
    import deepspeed  # noqa: F401  (what its import adds is not ours to judge)

    places = (
        torch,
        torch.nn.functional,
        torch.nn.Module,
        torch.nn.Linear,
        torch.Tensor,
        torch.optim.Optimizer,
        torch.autograd.Function,
        torch.distributed,
    )
    before = [dict(vars(place)) for place in places]
    zoo.train("adam", strategy)
    return [
        f"{place.__name__}.{name}"
        for place, names in zip(places, before, strict=True)
        for name, value in vars(place).items()
        if callable(value) and names.get(name) is not value
    ]


def _linear_is_torchs() -> bool:
    return torch.nn.functional.linear is torch._C._nn.linear


def test_torch_is_left_as_found(ranks2) -> None:
    """DeepSpeed alone keeps an ``F.linear`` of its own, which fails on weights that fsdp2 has sharded."""
    assert ranks2(_what_a_run_leaves, _strategy(3)) == [[], []]
    assert ranks2(_linear_is_torchs) == [True, True]


def test_afterwards_the_module_is_ordinary_on_every_rank(ranks2) -> None:
    results = ranks2(loops._ordinary_afterwards, _strategy(3, after_fit="whole"), "frozen")
    reference = ranks2(loops._ordinary_afterwards, "ddp", "frozen")
    for result, expected in zip(results, reference, strict=True):
        assert result.keys() == expected.keys()
        assert loops._close(result["weights"], expected["weights"])
        assert [key for key, value in result.items() if value is False] == []


# -- checkpoints -----------------------------------------------------------------------------------------------------


MOVES = [
    moves.Move(*source, *target, "mid-epoch, stateful", "features")
    for source, target in (
        (("zero3_deepspeed", 2, "file"), ("ddp", 2, "file")),
        (("zero1_deepspeed", 2, "sharded-async"), ("zero3_deepspeed", 3, "sharded")),
    )
]


def test_checkpoints_go_to_and_from_other_strategies(ranks, tmp_path: Path) -> None:
    travel = moves.Travel(ranks, tmp_path)
    for move in MOVES:
        assert travel.difference(move) <= moves.TOLERANCES[move.kind], move


# -- precision -------------------------------------------------------------------------------------------------------


def _in_precision(strategy: Any, precision: str) -> tuple[list[float], set[str]]:
    module = zoo.make_module("adam")
    make_trainer(strategy, precision=precision, max_epochs=1, limit_val_batches=0).fit(module, loops._loader())
    return list(module.losses), {str(p.dtype) for p in module.parameters()}  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize(("precision", "stage"), [("bf16-mixed", 1), ("bf16-true", 3)])
def test_low_precision_is_ddps(precision: str, stage: int, ranks2) -> None:
    """Losses differ by bf16's rounding at most: ``bf16-true`` steps on fp32 masters, DDP on the bf16 weights."""
    reference = ranks2(_in_precision, "ddp", precision)
    results = ranks2(_in_precision, _strategy(stage), precision)
    for (losses, dtypes), (expected, expected_dtypes) in zip(results, reference, strict=True):
        assert dtypes == expected_dtypes
        assert losses == pytest.approx(expected, rel=2**-7)
