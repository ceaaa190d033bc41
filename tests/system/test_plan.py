"""The plan is what happens: predicted bytes against those that every rank really stores and sends.

Model states are counted tensor by tensor, traffic call by call (both by ``ZeroMonitor``, which also makes the plan in
the run it measures), peaks by the CPU allocator's own record of every block.

What a failure localises: parameters or gradients to ``units`` and ``memory.state_bytes``; optimizer states to the
planner's fake step; gathers and reductions to ``memory.traffic``; a peak alone to ``tracing``. More peaks are
compared by ``make memory``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import account

STAGES = (1, 2, 3)


@pytest.mark.parametrize(("kind", "world_size"), [("adafactor", 2), ("tied_embedding_and_head", 2), ("odd_shapes", 2)])
def test_states_and_traffic(ranks, kind, world_size):
    """Kinds whose bytes on a rank are not Ψ/N."""
    results = ranks(account.observe_kind, kind, (0, *STAGES), world_size=world_size)
    for of_ranks in zip(*results, strict=True):
        _agree(of_ranks)


def test_states_and_traffic_with_offload(ranks2):
    results = ranks2(account.observe_kind, "odd_shapes_and_dtypes", STAGES, "cpu")
    for of_ranks in zip(*results, strict=True):
        _agree(of_ranks)
        for each in of_ranks:
            assert each["planned"].offload == "cpu"
            measured = each["measured"]
            held = sum(measured[f"{state} bytes"] for state in ("parameters", "gradients", "optimizer"))
            assert 0.8 * held < measured["of these on host bytes"] <= held  # all but what is replicated


def _agree(of_ranks: tuple[dict[str, Any], ...]) -> None:
    """The plan is for the fullest rank, which rank 0 is; states within 1 %, and 8 bytes for a step counter."""
    planned = of_ranks[0]["planned"]
    for kind in ("parameters", "gradients", "optimizer"):
        most = max(each["measured"][f"{kind} bytes"] for each in of_ranks)
        assert getattr(planned, kind) == pytest.approx(most, rel=0.01, abs=8), (planned.name, kind)
    for each in of_ranks:
        assert not account.disagreements(each)


@pytest.mark.parametrize(
    ("kind", "world_size", "options"),
    [
        ("mlp", 2, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
        ("attention", 2, {"recompute": "selective"}),
    ],
)
def test_peak_with_activations(ranks, kind, world_size, options):
    for found in account.observe_peaks(ranks, kind, (0, *STAGES), options, world_size=world_size):
        for each in found:
            assert not each["notes"]
            assert not account.disagreements(each)
