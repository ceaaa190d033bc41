"""The arithmetic of the plan: the paper's table, the popular formulas, and the account of a step against both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.memory import fsdp2_bytes, paper_bytes, paper_bytes_fp32, popular_bytes
from lightning_zero.comm.costs import wire_bytes
from lightning_zero.planner.memory import (
    Layout,
    Moment,
    ParameterSize,
    StepRules,
    UnitSize,
    account,
    kept_bytes,
    offloaded_bytes,
    state_bytes,
    traffic,
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


def _size(name: str, shape: tuple[int, ...] = (6, 2), compute: int = 4, **more: Any) -> ParameterSize:
    return ParameterSize(name=name, shape=shape, itemsize=4, compute_itemsize=compute, reduce_itemsize=4, **more)


def _layout(mixed: bool, blocks: int = 64) -> Layout:
    names = [*(f"blocks.{i}" for i in range(blocks)), "head"]
    sizes = [_size(name, (64, 512), 2 if mixed else 4, state_per_element=8) for name in names]
    return Layout(units=tuple(UnitSize(parameters=(size,)) for size in sizes))


def _peak(layout: Layout, rules: StepRules) -> float:
    return max(sum(kinds.values()) for kinds in account(layout, untraced(layout), rules))


def _psi(layout: Layout) -> int:
    return sum(p.numel for p in layout.parameters)


@pytest.mark.parametrize("n", [1, 2, 64])
@pytest.mark.parametrize(("mixed", "accumulating"), [(True, False), (False, True)])
@pytest.mark.parametrize("between_hosts", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_peaks_at_the_formula_and_a_few_units(stage, between_hosts, accumulating, mixed, n):
    """The formula counts states only, so what is beyond it is units on their way: of 65 never more than six."""
    layout = _layout(mixed)
    rules = StepRules(
        stage=stage, world_size=n, micro_batches=3 if accumulating else 1, in_place=between_hosts, automatic=True
    )
    found = _peak(layout, rules)
    formula = fsdp2_bytes(stage, _psi(layout), n, mixed, accumulating, between_hosts)
    unit = layout.units[0].parameters[0].numel * 4
    assert formula <= found + unit  # stage 1's unsharded gradients: the last unit is reduced before it is sharded
    assert found <= formula + 6 * unit


@pytest.mark.parametrize("n", [2, 8])
def test_in_fp32_between_hosts_stages_1_and_2_take_what_the_paper_says(n):
    for stage, accumulating in ((1, True), (2, False)):
        found = fsdp2_bytes(stage, PSI, n, mixed=False, accumulating=accumulating, between_hosts=True)
        assert found == pytest.approx(paper_bytes_fp32(stage, PSI, n))


def test_what_is_kept_between_steps_is_what_other_ranks_own():
    layout, rules = _layout(mixed=False), StepRules(stage=2, world_size=4, in_place=True)
    assert kept_bytes(layout, rules) == 4 * _psi(layout) * 3 / 4
    assert kept_bytes(_layout(mixed=True), rules) == 0  # shards and copies have two dtypes
    for other in ({"stage": 3}, {"stage": 0}, {"world_size": 1}, {"in_place": False}, {"offload": "nvme"}):
        assert kept_bytes(layout, replace(rules, **other)) == 0


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_sent_follow_the_paper(stage, micro_batches):
    """Section 7: DDP 2g, stage 1 g+p, stage 2 Ag+p, stage 3 A(2p+g), each times (N-1)/N; root and last unit are
    gathered once."""
    layout, n, a = _layout(mixed=True), 4, micro_batches
    psi, unit, p, g = _psi(layout), layout.units[0].parameters[0].numel, 2, 4
    stage_3 = a * ((2 * p + g) * psi - p * 2 * unit)
    elements = {0: 2 * g * psi, 1: (g + p) * psi, 2: (a * g + p) * psi, 3: stage_3}[stage]
    rules = StepRules(stage=stage, world_size=n, micro_batches=a)
    sent, *_ = traffic(layout, untraced(layout), rules)
    assert sum(sent.values()) == pytest.approx(elements * (n - 1) / n)
    elements += a * p * unit if stage == 3 else 0  # under manual optimization no unit is known to be the last
    sent, *_ = traffic(layout, untraced(layout), replace(rules, automatic=False))
    assert sum(sent.values()) == pytest.approx(elements * (n - 1) / n)


def test_nothing_is_sent_by_one_rank():
    layout = _layout(mixed=False)
    assert traffic(layout, untraced(layout), StepRules(stage=3, world_size=1))[0] == {}
    assert wire_bytes("all_reduce", 100, 1) == 0


def test_states_count_replicated_and_unused_parameters():
    states: dict[str, Any] = {"state_per_element": 8, "state_replicated": 4}
    parameters = (
        _size("a", **states),
        _size("b", stepped=False, **states),
        _size("c", trainable=False, stepped=False, **states),
    )
    layout = Layout(units=(UnitSize(parameters=parameters),), replicated=(_size("d", (), **states),))
    state = state_bytes(layout, stage=2, world_size=4)  # 6 rows on 4 ranks: 2, 2, 2, 0; the 0-dim one is replicated
    assert state == {"parameters": 3 * 4 * 4 + 4, "gradients": 4 * 4 + 4, "optimizer": 4 * 8 + 4 + 8 + 4}
    assert state_bytes(layout, stage=0, world_size=4)["parameters"] == 3 * 12 * 4 + 4


def test_gradients_of_the_last_step_are_alive_in_the_next_forward():
    layout, trace = _layout(mixed=False), untraced(_layout(mixed=False))
    trace.moments.insert(0, Moment(unit=layout.root, activations=1e9))
    late, early = (
        account(layout, trace, StepRules(stage=3, world_size=4, automatic=automatic))[0] for automatic in (True, False)
    )
    assert late["gradients"] - early["gradients"] == _psi(layout) * 4 / 4


@pytest.mark.parametrize("target", ["cpu", "nvme"])
def test_offload_takes_the_shards_off_the_device(target):
    layout, rules = _layout(mixed=True), StepRules(stage=3, world_size=4, offload=target)
    psi = _psi(layout)
    off = offloaded_bytes(layout, rules)
    assert off == {"parameters": 4 * psi / 4, "gradients": 4 * psi / 4, "optimizer": 8 * psi / 4}
    assert _peak(layout, rules) < 16 * layout.units[0].parameters[0].numel  # units on their way
    # ZeRO-Offload, section 4: at least 2 bytes per element each way; CPUOffloadPolicy brings the stored fp32 shards up
    _, gathered, reduced = traffic(layout, untraced(layout), rules)
    assert gathered + reduced >= 8 * psi / 4
    at_home = offloaded_bytes(layout, replace(rules, host_is_device=True))
    assert set(at_home) == (set() if target == "cpu" else {"parameters", "optimizer"})
    odd = replace(layout, replicated=(_size("odd", (), state_per_element=8),))  # stays on the device
    assert offloaded_bytes(odd, rules) == off
