"""The plan is what happens: predicted bytes against those that every rank really stores and sends.

Model states are counted tensor by tensor, traffic call by call (both by ``ZeroMonitor``, which also makes the plan in
the run it measures), peaks by the CPU allocator's own record of every block.

What a failure localises: parameters or gradients to ``units`` and ``memory.state_bytes``; optimizer states to the
planner's fake step; gathers and reductions to ``memory._FullyShard``; a peak alone to ``tracing``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import account, zoo

pytestmark = pytest.mark.sampled

STAGES = (1, 2, 3)
ALWAYS = (
    "adam",
    "adafactor",
    "muon_and_adamw",
    "frozen_in_optimizer",
    "unused_everywhere",
    "tied_embedding_and_head",
    "odd_parameters_together",
    "indivisible_dims",
    "accumulation_and_clip",
    "gan",
)
"""A kind for each way in which a rank's bytes are not Ψ/N; the others are walked by ``make test-all``."""
NOT_COMPARED = {
    "step_returns_none": "Lightning refuses it at more than one rank",
    "lbfgs": "its state is a list of vectors as long as the module, which grows for history_size steps",
    "unused_on_some_ranks_blocks": "refused at stage 3",
    "unused_on_some_ranks_fewer_blocks": "refused at stage 3",
    "unused_on_some_ranks_in_unit": "each rank plans after its own batch, and DDP has everyone's gradients",
    "unused_on_some_ranks_heads": "each rank plans after its own batch, and DDP has everyone's gradients",
    "layerdrop": "which parameters have states depends on chance",
    "unused_in_turn": "which parameters have states depends on the step",
    "unused_and_accumulation": "which parameters have states depends on the step",
    "manual_skips_backward": "its first three batches step no optimizer, so nothing is measured",
    "checkpointed_reentrant": "DDP trains it only without looking for unused parameters",
    "parameter_of_a_class": "its optimizer goes by a parameter's class, which is a fake tensor's in a plan",
    "averaged_model": "a hook makes a second model, after the plan",
    "validated_by_copies": "a hook makes a second model, after the plan",
    "changed_at_the_end": "a module with torch's old weight_norm cannot be copied for a plan, which the monitor says",
    "lazy_layers": "the monitor's plan is of the module before configure_model fills it; it says that it has none",
    "read_on_one_rank": "on_fit_end reads on one rank, when the run has ended and left shards, as it does here",
    "lookahead": "its slow weights come with its third step, and a plan looks at the first, which it says",
    "accumulation_scheduler": "accumulates another number of micro-batches in each epoch",
}
PADDED_APART = {("adafactor", 4)}
"""Where traffic is not compared: a factor of one row is sent padded to a row for each rank, and the plan pads its
matrix, which has no padding here: 792 bytes of 10 kB."""
MANUAL = ("gan",)
"""Steps of the user's own run units as often as they like, which the plan says it does not count."""
EVERY_WORLD_SIZE = ("indivisible_dims",)
IN_CI = ("lookahead_own_state", "sam", "compiled_functions")
"""Optimizers around optimizers, functions that know the module: a step that the copy must not take on the original."""


def _level(name: str, world_size: int) -> Any:
    if name in EVERY_WORLD_SIZE or (world_size == 2 and name in ALWAYS):
        return ()
    return pytest.mark.rest if world_size == 2 and name in IN_CI else pytest.mark.full


CASES = [
    pytest.param(name, n, marks=_level(name, n))
    for name in zoo.KINDS
    if name not in NOT_COMPARED and zoo.KINDS[name].refused is None
    for n in (1, 2, 4)
]


@pytest.mark.parametrize(("kind", "world_size"), CASES)
def test_states_and_traffic(ranks, kind, world_size):
    results = ranks(account.observe_kind, kind, (0, *STAGES), world_size=world_size, timeout_seconds=240)
    for stage in (0, *STAGES):
        of_ranks = [rank[stage] for rank in results]
        _states_agree([r["measured"] for r in of_ranks], of_ranks[0]["planned"])
        if kind in ALWAYS and kind not in MANUAL and (kind, world_size) not in PADDED_APART:
            for each in of_ranks:
                _traffic_agrees(each["measured"], each["planned"])


@pytest.mark.parametrize("kind", ["adam", "odd_parameters_together"])
def test_states_and_traffic_with_offload(ranks2, kind):
    results = ranks2(account.observe_kind, kind, STAGES, "cpu", timeout_seconds=240)
    for index in range(len(STAGES)):
        of_ranks = [rank[index] for rank in results]
        planned = of_ranks[0]["planned"]
        assert planned.offload == "cpu"
        _states_agree([r["measured"] for r in of_ranks], planned)
        for each in of_ranks:
            _traffic_agrees(each["measured"], each["planned"])
            measured = each["measured"]
            held = sum(measured[f"{state} bytes"] for state in ("parameters", "gradients", "optimizer"))
            assert 0.9 * held < measured["of these on host bytes"] <= held  # all but what is replicated


def _states_agree(measured: list[dict[str, float]], planned: Any) -> None:
    """The plan is for the fullest rank, which rank 0 is; within 1 %, and 8 bytes for a step counter."""
    for kind in ("parameters", "gradients", "optimizer"):
        most = max(row[f"{kind} bytes"] for row in measured)
        assert getattr(planned, kind) == pytest.approx(most, rel=0.01, abs=8), (planned.name, kind)


def _traffic_agrees(measured: dict[str, float], planned: Any) -> None:
    for collective in ("all_gather", "reduce_scatter"):
        found = measured.get(f"sent per step: {collective} bytes", 0.0)
        assert planned.sent.get(collective, 0.0) == pytest.approx(found, rel=0.01), (planned.name, collective)
    # Where ranks stand travels beside each batch, and clipping's norm beside each step: 72 and 6 bytes at 4 ranks
    found = sum(value for name, value in measured.items() if name.startswith("sent per step"))
    assert planned.sent_total == pytest.approx(found, rel=0.01, abs=80), planned.name


@pytest.mark.rest
@pytest.mark.parametrize(
    ("kind", "world_size", "options"),
    [
        ("mlp", 1, {}),
        ("mlp", 2, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
        ("recomputed", 2, {}),
        ("mlp", 2, {"recompute": "full"}),
        ("attention", 2, {"recompute": "selective"}),
        ("mlp", 2, {"recompute": ["blocks.*.up", "blocks.1"]}),
        pytest.param("mlp", 2, {"recompute": "selective"}, marks=pytest.mark.full),
        pytest.param("attention", 4, {"recompute": "full", "precision": "bf16-mixed"}, marks=pytest.mark.full),
        pytest.param("attention", 2, {"recompute": ["blocks.0", "blocks.2"]}, marks=pytest.mark.full),
        ("looked_at", 2, {"accumulate_grad_batches": 3}),
        pytest.param("looked_at", 2, {"accumulate_grad_batches": 3, "precision": "bf16-mixed"}, marks=pytest.mark.full),
        ("convolutions", 2, {}),
        ("attention", 4, {}),
        pytest.param("mlp", 4, {}, marks=pytest.mark.full),
        pytest.param("mlp", 2, {}, marks=pytest.mark.full),
        pytest.param("mlp", 2, {"accumulate_grad_batches": 3}, marks=pytest.mark.full),
        pytest.param("mlp", 2, {"precision": "bf16-true"}, marks=pytest.mark.full),
        pytest.param("mlp", 2, {"gradient_clip_val": 0.5}, marks=pytest.mark.full),
        pytest.param("recomputed", 4, {"precision": "bf16-mixed"}, marks=pytest.mark.full),
        pytest.param("recomputed", 1, {}, marks=pytest.mark.full),
        pytest.param("attention", 1, {}, marks=pytest.mark.full),
        pytest.param("attention", 2, {"precision": "bf16-mixed"}, marks=pytest.mark.full),
        pytest.param("convolutions", 1, {}, marks=pytest.mark.full),
        pytest.param("convolutions", 4, {"precision": "bf16-mixed"}, marks=pytest.mark.full),
    ],
)
def test_peak_with_activations(ranks, kind, world_size, options):
    """Within 10 %: the allocator's peak over two steps against the walked one.

    Blocks that gloo's threads release are missed by the record, which only ever adds to it; so where the first run is
    too high, the lower of two counts.
    """
    # DDP's own peak in bf16-true is 12 % above the plan's, seen with 2 ranks
    stages = STAGES if options.get("precision") == "bf16-true" else (0, *STAGES)
    results = ranks(_peaks, kind, stages, options, world_size=world_size, timeout_seconds=200)
    again = None
    for stage in stages:
        for rank, found in enumerate(results):
            each = found[stages.index(stage)]
            assert not each["notes"]
            _traffic_agrees(each["measured"], each["planned"])
            expected, peak = each["expected"], each["peak"]
            if world_size > 1 and expected < 0.9 * peak:
                again = again or ranks(_peaks, kind, stages, options, world_size=world_size, timeout_seconds=200)
                peak = min(peak, again[rank][stages.index(stage)]["peak"])
            assert expected == pytest.approx(peak, rel=0.1), each["planned"].name


def _peaks(kind: str, stages: tuple[int, ...], options: dict[str, Any]) -> list[dict[str, Any]]:
    return account.observe_peak(kind, stages, **options)
