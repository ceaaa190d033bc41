"""The formulas against what the papers say, and against what must hold for any numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import scaling
from benchmarks.scaling import Cluster, Run
from lightning_zero.comm import tree

SEVEN = Run(parameters=7.5e9, num_layers=32, gpus=64)


def test_memory_is_the_papers():
    """Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 GPUs."""
    found = [scaling.state_bytes_per_gpu(replace(SEVEN, stage=stage)) / 1e9 for stage in (0, 1, 2, 3)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_of_one_micro_batch_is_the_papers(stage, times):
    """Section 7: stages 1 and 2 send what DDP sends, 2 Psi; stage 3 half as much again, 3 Psi."""
    run = replace(SEVEN, stage=stage)
    elements = sum(scaling.sent_bytes(run).values()) / 2
    assert elements == pytest.approx(times * 7.5e9 * 63 / 64)


def test_tokens_that_hide_stage_3_are_those_of_the_rule_of_thumb():
    """F (2p + g) / (6 BW): about 9,900 tokens at 495 TFLOP/s and 50 GB/s per rank, latency left out."""
    cluster = Cluster(gpus_per_node=1, node_latency_seconds=1e-15, network_latency_seconds=1e-15)
    assert scaling.tokens_that_hide_the_traffic(SEVEN, cluster) == pytest.approx(9900 * 63 / 64, rel=0.01)


def test_replicas_send_less_along_the_shards_and_add_an_all_reduce():
    whole, grouped = scaling.sent_bytes(SEVEN), scaling.sent_bytes(replace(SEVEN, shard_size=8))
    assert whole["replicate"] == 0
    assert grouped["shard"] == pytest.approx(6 * 7.5e9 * 7 / 8)
    assert grouped["replicate"] == pytest.approx(2 * 2 * 7.5e9 / 8 * 7 / 8)
    assert scaling.sent_bytes(replace(SEVEN, shard_size=64)) == whole


def test_a_ring_across_hosts_uses_all_their_adapters_and_groups_of_one_rank_a_host_their_own():
    fast = Cluster(node_latency_seconds=1e-15, network_latency_seconds=1e-15)
    sent = sum(scaling.sent_bytes(SEVEN).values())
    assert scaling.communication_seconds(SEVEN, fast) == pytest.approx(sent / (8 * 50e9))
    grouped = replace(SEVEN, shard_size=8)
    sent_inside, sent_across = scaling.sent_bytes(grouped).values()
    expected = sent_inside / 450e9 + sent_across / 50e9
    assert scaling.communication_seconds(grouped, fast) == pytest.approx(expected)


def test_groups_win_where_latency_rules():
    many = replace(SEVEN, gpus=4096)
    groups = replace(many, shard_size=8)
    assert scaling.step_seconds(groups, Cluster()) < 0.5 * scaling.step_seconds(many, Cluster())
    assert scaling.best_shard_size(many, Cluster(), 60e9) < 4096
    huge = replace(SEVEN, parameters=70e9, num_layers=80, gpus=512)
    assert scaling.state_bytes_per_gpu(replace(huge, shard_size=8)) > 60e9  # a host is too small for it
    assert scaling.best_shard_size(huge, Cluster(), 60e9) > 8
    assert scaling.best_shard_size(replace(huge, gpus=8), Cluster(), 60e9) is None


def test_a_step_takes_at_least_its_parts_and_more_accumulation_more():
    for stage in (0, 1, 2, 3):
        run = replace(SEVEN, stage=stage)
        step = scaling.step_seconds(run, Cluster())
        assert step >= scaling.compute_seconds(run, Cluster())
        assert step >= scaling.communication_seconds(run, Cluster())
        assert scaling.step_seconds(replace(run, micro_batches=4), Cluster()) > step


def test_checkpoints_and_start():
    assert scaling.checkpoint_seconds(SEVEN, Cluster(), False) == pytest.approx(90e9 / 2e9)
    assert scaling.checkpoint_seconds(SEVEN, Cluster(), True) == pytest.approx(90e9 / 16e9)
    many = replace(SEVEN, gpus=4096)
    assert scaling.checkpoint_seconds(many, Cluster(), True) == pytest.approx(90e9 / 100e9)
    assert scaling.start_seconds(many, Cluster()) > scaling.start_seconds(SEVEN, Cluster())


@pytest.mark.parametrize("ranks", [2, 64, 4096])
def test_what_ranks_agree_on_stays_small_however_many_there_are(ranks):
    """The tree is that of the package; on accelerators at most 64 sockets, also with HSDP's two communicators."""
    edges = [len(tree.children(rank, ranks)) + bool(rank) for rank in range(ranks)]
    assert max(edges) <= scaling.tree_levels(ranks)
    assert max(len(tree.children(rank, ranks)) for rank in range(ranks)) == scaling.host_messages(ranks)
    assert scaling.accelerator_sockets(ranks, communicators=2) <= 64
    assert scaling.host_agreement_seconds(ranks, Cluster()) <= 0.7e-3


@pytest.mark.parametrize("wrong", [{"stage": 4}, {"shard_size": 7}])
def test_impossible_runs_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(SEVEN, **wrong)
