"""The arithmetic of the plan: the paper's table, the popular formulas, and the account of a step against both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_zero.comm.costs import wire_bytes
from lightning_zero.planner.memory import (
    Layout,
    Moment,
    ParameterSize,
    StepRules,
    UnitSize,
    fsdp2_bytes,
    kept_bytes,
    offload_bytes,
    paper_bytes,
    paper_bytes_fp32,
    popular_bytes,
    scaled,
    simulate,
    state_bytes,
    untraced,
)

PSI, RANKS = 7.5e9, 64


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_papers_table(stage, gigabytes):
    """Figure 1 of arXiv:1910.02054: 7.5 B parameters, 64 GPUs, Adam in mixed precision, GB of 10^9 bytes."""
    assert round(paper_bytes(stage, PSI, RANKS) / 1e9, 1) == gigabytes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_popular_formulas_agree_with_the_paper_on_one_rank_only(stage):
    assert popular_bytes(stage, PSI, 1) == paper_bytes(stage, PSI, 1) == 16 * PSI
    for n in (2, 8, RANKS):
        assert (popular_bytes(stage, PSI, n) == paper_bytes(stage, PSI, n)) == (stage == 3)
    swapped = {1: lambda n: 12 + 4 / n, 2: lambda n: paper_bytes_fp32(1, 1, n), 3: lambda n: 16 / n}[stage]
    assert popular_bytes(stage, 1, 8) == pytest.approx(swapped(8))


def _layout(mixed: bool, blocks: int = 64, rows: int = 64, columns: int = 512, root_rows: int = 64) -> Layout:
    def size(name: str, rows: int) -> ParameterSize:
        return ParameterSize(
            name=name,
            shape=(rows, columns),
            itemsize=4,
            compute_itemsize=2 if mixed else 4,
            reduce_itemsize=4,
            state_per_element=8,
        )

    units = [UnitSize(name=f"blocks.{i}", parameters=(size(f"blocks.{i}.weight", rows),)) for i in range(blocks)]
    return Layout(units=(*units, UnitSize(name="(root)", parameters=(size("head.weight", root_rows),))))


@pytest.mark.parametrize("n", [1, 2, 64])
@pytest.mark.parametrize(("mixed", "accumulating"), [(True, False), (False, True)])
@pytest.mark.parametrize("between_hosts", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_walked_step_peaks_at_the_formula_and_a_few_units(stage, between_hosts, accumulating, mixed, n):
    """The formula counts states only, so what is beyond it is units on their way: of 65 never more than six."""
    layout = _layout(mixed)
    rules = StepRules(
        stage=stage,
        world_size=n,
        micro_batches=3 if accumulating else 1,
        gathers_in_place_from=0 if between_hosts else None,
        keeps_shards_in_copies=between_hosts,
    )
    found = simulate(layout, untraced(layout), rules).peak
    formula = fsdp2_bytes(stage, layout.num_parameters, n, mixed, accumulating, between_hosts)
    unit = layout.units[0].parameters[0].numel * 4
    assert formula <= found + unit  # stage 1's whole gradients: the last unit is reduced before it is shared out
    assert found <= formula + 6 * unit


@pytest.mark.parametrize("n", [2, 8])
def test_in_fp32_between_hosts_stages_1_and_2_take_what_the_paper_says(n):
    for stage, accumulating in ((1, True), (2, False)):
        found = fsdp2_bytes(stage, PSI, n, mixed=False, accumulating=accumulating, between_hosts=True)
        assert found == pytest.approx(paper_bytes_fp32(stage, PSI, n))


def test_what_is_kept_between_steps_is_what_other_ranks_own():
    layout, rules = _layout(mixed=False), StepRules(stage=2, world_size=4, keeps_shards_in_copies=True)
    psi = layout.num_parameters
    assert kept_bytes(layout, rules) == 4 * psi * 3 / 4
    assert kept_bytes(_layout(mixed=True), rules) == 0  # shards and copies have two dtypes
    for other in ({"stage": 3}, {"stage": 0}, {"world_size": 1}, {"keeps_shards_in_copies": False}):
        assert kept_bytes(layout, replace(rules, **other)) == 0


def test_without_accumulation_stage_1_is_stage_2():
    layout = _layout(mixed=True)
    steps = [simulate(layout, untraced(layout), StepRules(stage=s, world_size=4)) for s in (1, 2)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_sent_follow_the_paper(stage, micro_batches):
    """Section 7: DDP 2g, stage 1 g+p, stage 2 Ag+p, stage 3 A(2p+g), each times (N-1)/N; root and last unit are
    gathered once."""
    layout, n, a = _layout(mixed=True), 4, micro_batches
    psi, root, last = layout.num_parameters, *(u.parameters[0].numel for u in (layout.units[-1], layout.units[-2]))
    p, g = 2, 4
    elements = {
        0: 2 * g * psi,
        1: (g + p) * psi,
        2: (a * g + p) * psi,
        3: a * ((2 * p + g) * psi - p * (root + last)),
    }[stage]
    rules = StepRules(stage=stage, world_size=n, micro_batches=a, agrees_on_unused=False)
    assert simulate(layout, untraced(layout), rules).total_sent == pytest.approx(elements * (n - 1) / n)
    elements += a * p * last if stage == 3 else 0  # under manual optimization no unit is known to be the last
    rules = replace(rules, keeps_last=False)
    assert simulate(layout, untraced(layout), rules).total_sent == pytest.approx(elements * (n - 1) / n)


def test_nothing_is_sent_by_one_rank():
    layout = _layout(mixed=False)
    assert simulate(layout, untraced(layout), StepRules(stage=3, world_size=1)).total_sent == 0
    assert wire_bytes("all_reduce", 100, 1) == 0


@pytest.mark.parametrize(
    ("shape", "n", "shards"),
    [((7, 3), 2, [12, 9]), ((7, 3), 4, [6, 6, 6, 3]), ((2, 5), 4, [5, 5, 0, 0]), ((8,), 4, [2, 2, 2, 2])],
)
def test_shards_are_ceil_rows_until_there_are_none(shape, n, shards):
    p = ParameterSize(name="p", shape=shape, itemsize=4, compute_itemsize=4, reduce_itemsize=4)
    assert [p.shard_numel(n, rank) for rank in range(n)] == shards
    assert p.padded_numel(n) == shards[0]


def test_states_of_one_rank_count_replicated_and_unused_parameters():
    def size(name: str, **more: object) -> ParameterSize:
        shape = more.pop("shape", (6, 2))
        return ParameterSize(
            name=name,
            shape=shape,
            itemsize=4,
            compute_itemsize=4,
            reduce_itemsize=4,
            state_per_element=8,
            state_whole=4,
            **more,
        )

    layout = Layout(
        units=(UnitSize(name="(root)", parameters=(size("a"), size("b", used=False), size("c", trainable=False))),),
        replicated=(size("d", shape=()),),
    )
    state = state_bytes(layout, stage=2, world_size=4, rank=3)
    assert state.parameters == 4  # 6 rows on 4 ranks: 2, 2, 2, 0; the 0-dim one is whole
    assert (state.gradients, state.optimizer) == (4, 8 + 4 + 4)
    state = state_bytes(layout, stage=2, world_size=4, rank=0)
    assert (state.parameters, state.gradients) == (3 * 4 * 4 + 4, 4 * 4 + 4)
    assert state_bytes(layout, stage=0, world_size=4).parameters == 3 * 12 * 4 + 4


def test_the_peak_is_the_sum_of_its_kinds_and_activations_count_where_they_are():
    layout = _layout(mixed=False, blocks=2)
    moments = [
        Moment(event=m.event, unit=m.unit, gradient_bytes=m.gradient_bytes, peak_bytes=1e9 if i == 3 else 0)
        for i, m in enumerate(untraced(layout))
    ]
    step = simulate(layout, moments, StepRules(stage=3, world_size=2))
    assert step.peak == sum(step.at_peak.values())
    assert step.at_peak["activations"] == 1e9


def test_gradients_of_the_last_step_are_alive_in_the_next_forward():
    layout = _layout(mixed=False)
    forward = [Moment(event="forward", unit=len(layout.units) - 1, peak_bytes=1e9)]
    late, early = (
        simulate(layout, [*forward, *untraced(layout)], StepRules(stage=3, world_size=4, zeroes_late=late))
        for late in (True, False)
    )
    assert late.peak - early.peak == layout.num_parameters * 4 / 4


def test_what_is_replicated_stays_on_the_device():
    layout = _layout(mixed=False)
    odd = ParameterSize(name="odd", shape=(), itemsize=4, compute_itemsize=4, reduce_itemsize=4, state_per_element=8)
    rules = StepRules(stage=2, world_size=4)
    both = [replace(layout, replicated=(odd,)), layout]
    first, second = (offload_bytes(each, simulate(each, untraced(each), rules), rules, "cpu") for each in both)
    assert first == second


def test_host_shards_come_up_through_a_buffer_on_the_device():
    for mixed in (False, True):
        layout = _layout(mixed=mixed)
        rules = StepRules(stage=3, world_size=1, zeroes_late=False)  # on more ranks the gathered copy comes on top
        forward = [Moment(event="forward", unit=0)]
        stays, moves = (simulate(layout, forward, each) for each in (rules, replace(rules, from_host=True)))
        unit = layout.units[0]
        assert moves.peak - stays.peak == unit.shard_bytes(1) > 0
        assert (stays.gathered_shards, stays.reduced_shards) == (moves.gathered_shards, moves.reduced_shards)


def test_what_is_gathered_in_place_needs_no_message():
    layout, rules = _layout(mixed=False), StepRules(stage=3, world_size=2)
    forward = [Moment(event="forward", unit=0)]
    peaks = {
        small: simulate(layout, forward, replace(rules, gathers_in_place_from=small)).peak for small in (None, 10**9, 0)
    }
    assert peaks[None] - peaks[0] == peaks[10**9] - peaks[0] == layout.units[0].gathered_bytes(2) > 0


@pytest.mark.parametrize("target", ["cpu", "nvme"])
def test_offload_takes_the_shards_off_the_device(target):
    layout, rules = _layout(mixed=True), StepRules(stage=3, world_size=4)
    step = simulate(layout, untraced(layout), rules)
    moved = offload_bytes(layout, step, rules, target)
    psi = layout.num_parameters
    assert moved.host + moved.disk == pytest.approx((4 + 4 + 8) * psi / 4)
    assert (moved.disk == 0) == (target == "cpu")
    # ZeRO-Offload, section 4: at least 2 bytes per element each way; CPUOffloadPolicy brings the stored fp32 shards up
    assert moved.pcie_per_step >= 4 * psi / 4
    at_home = offload_bytes(layout, step, rules, target, host_is_device=True)
    assert (at_home.host, at_home.pcie_per_step, at_home.disk) == (0, 0, moved.disk)
    if target == "nvme":  # ZeRO-Infinity: states are read and written once per step
        assert moved.disk_per_step >= 2 * moved.disk


def test_moments_of_two_sizes_give_those_of_any():
    one = [Moment(event="forward", peak_bytes=10 + 5, live_bytes=10)]
    two = [Moment(event="forward", peak_bytes=10 + 10, live_bytes=10)]
    (at_four,) = scaled(one, two, 4)
    assert (at_four.peak_bytes, at_four.live_bytes) == (10 + 20, 10)
    (unmatched,) = scaled(one, [Moment(event="end")], 4)
    assert unmatched.peak_bytes == 60
