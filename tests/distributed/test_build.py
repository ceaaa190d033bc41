"""``configure_model`` at stage 3 with ``fsdp2``: parameters are shared out as they are built, with the same values."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.helpers import born, building
from tests.helpers.pretrained import KINDS as PUBLISHED
from tests.helpers.pretrained import hugging_face
from tests.helpers.ranks import ROOT, outcome
from tests.helpers.zoo import KINDS, WIDTH

LAYER = 4 * WIDTH * WIDTH


@pytest.mark.parametrize("way", ["made", "copied", "given"])
def test_no_rank_ever_has_many_layers_whole(way, ranks2):
    """The newest, one that it comes from, and one that is closed as soon as the next comes."""
    for seen in ranks2(building.bytes_seen, {}, way):
        assert max(seen) <= 3 * LAYER
        assert len(seen) == (15 if way == "given" else 7)


def test_whole_on_request_and_below_stage_3(ranks2):
    for settings in ({"build": "whole"}, {"stage": 2}):
        for seen in ranks2(building.bytes_seen, settings):
            assert max(seen) == 8 * LAYER


def test_constructors_find_what_they_are_used_to(ranks2):
    for options in ({}, {"seeds_differ": True}):
        for differ in ranks2(building.differences, building.Wild, options, {}):
            assert differ == []


@pytest.mark.rest
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [(3, {}), (4, {"shard_size": 2}), (2, {"offload": "cpu"}), (3, {"transport": "torch", "units": []})],
    ids=str,
)
def test_so_they_do_with_other_settings(world_size, settings, ranks):
    for differ in ranks(building.differences, building.Wild, {}, settings, world_size=world_size):
        assert differ == []


@pytest.mark.rest
def test_rarer_things_that_constructors_do(ranks2):
    for found in ranks2(building.odd_ones):
        assert found == [(how, []) for how in building.ODD]


@pytest.mark.rest
@pytest.mark.parametrize("kind", PUBLISHED)
def test_models_from_config(kind, ranks):
    pytest.importorskip("transformers")
    for differ in ranks(building.differences, building.Published, {"kind": kind}, {}, world_size=3):
        assert differ == []


@pytest.mark.rest
def test_models_from_pretrained(ranks2, tmp_path):
    pytest.importorskip("transformers")
    hugging_face("llama").save_pretrained(tmp_path)
    options = {"kind": "llama", "path": str(tmp_path)}
    for differ in ranks2(building.differences, building.Published, options, {}):
        assert differ == []


SAMPLE = ("tied_embedding_and_head", "odd_parameters_together", "transformer", "gru", "batch_norm",
          "parametrized_weights", "non_contiguous_parameter", "bare_parameters_and_buffers")  # fmt: skip


@pytest.mark.rest
def test_kinds_of_the_zoo(ranks2):
    for found in ranks2(building.of_zoo, SAMPLE):
        assert [(kind, differ) for kind, differ in found if differ] == []


NOT_COMPARED = {
    # refused at stage 3, with build="whole" as well
    "step_returns_none", "view_held", "sparse_embedding", "sparse_adam", "scripted", "backward_reads_gradients",
    "linearized_in_a_step", "linearized_in_a_hook", "values_written_as_a_list", "values_written_by_out",
    "unused_on_some_ranks_blocks", "unused_on_some_ranks_fewer_blocks",
    # Lightning's callback prunes before configure_model, under DDP as well
    "pruned_by_callback", "lottery_ticket",
    # they build themselves in a way of their own
    "built_in_configure_model", "built_half_and_half", "compiled_late", "steps_return_early", "lazy_layers",
}  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_the_zoo(world_size, ranks):
    found = ranks(building.of_zoo, list(KINDS), world_size=world_size, timeout_seconds=850)
    for of_rank in found:
        assert [(kind, differ) for kind, differ in of_rank if differ not in ("", "-")] == []
        assert {kind for kind, differ in of_rank if differ == "-"} == NOT_COMPARED


@pytest.mark.rest
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_rank_holds_what_the_plan_counts(device):
    """One rank of eight, whose others are not there: half of the module is the root's, which is whole at the end."""
    pytest.importorskip("transformers")
    sizes = {**born.SEVEN_BILLION, "hidden_size": 1024, "num_hidden_layers": 6, "vocab_size": 32000}
    sizes |= {"intermediate_size": 2752, "num_attention_heads": 8, "num_key_value_heads": 8}
    job = json.dumps({"world_size": 8, "device": device, "sizes": sizes, "room_gib": 4})
    command = [sys.executable, "-m", "tests.helpers.born", job]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] == pytest.approx(found["planned"], rel=0.1)
    assert found["peak"] < 0.7 * 4 * found["parameters"]  # never whole


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("builds more", ["rank 1:", "Linear.weight", "build='whole'"]),
        ("reads", ["rank 0: end", "rank 1: open Layer.inner", "build='whole'"]),
    ],
)
def test_ranks_that_differ_all_say_so(how, texts, ranks2):
    for error, text in ranks2(outcome, building.fit_unlike, how, "auto"):
        assert error == "RuntimeError"
        for each in texts:
            assert each in text


def test_an_error_of_one_rank_ends_all(ranks2):
    (first, text), (last, own) = ranks2(outcome, building.fit_unlike, "raises", "auto")
    assert (first, last) == ("RuntimeError", "KeyError")
    assert "on rank 1: 'no such layer'" in text
    assert "no such layer" in own


@pytest.mark.rest
def test_a_thread_that_uses_what_is_shared_out_is_named(ranks2):
    """It is in no exchange, so without an error it would read freed memory, and crash."""
    for error, text in ranks2(outcome, building.fit_odd, "reads_in_threads", "auto"):
        assert error == "RuntimeError"
        for each in ("thread ThreadPoolExecutor", "uses Linear.weight", "build='whole'"):
            assert each in text
    (first, text), (last, own) = ranks2(outcome, building.fit_odd, "fails_in_a_thread", "auto")
    assert (first, last) == ("RuntimeError", "RuntimeError")
    assert "on rank 1: thread Thread-" in text
    assert "build='whole'" in own
    for found, _ in ranks2(outcome, building.fit_odd, "reads_in_threads", "whole"):
        assert found == "ok"


@pytest.mark.rest
def test_one_rank_may_read_a_whole_module(ranks2):
    for found, _ in ranks2(outcome, building.fit_unlike, "reads", "whole"):
        assert found == "ok"


@pytest.mark.rest
def test_a_module_whose_run_failed_trains_in_the_next(ranks2):
    for error, shapes, again, ordinary in ranks2(building.fit_again_after_failure):
        assert "holds a view of parameter 'body.0.inner'" in error
        assert set(shapes) <= {(0,), (WIDTH, WIDTH)}
        assert (0,) in shapes
        assert all(torch.equal(again[name], ordinary[name]) for name in ordinary)


@pytest.mark.rest
def test_checkpoints_fill_what_is_shared_out(ranks2, tmp_path):
    for start, saved, validated in ranks2(building.resume, str(tmp_path / "x.ckpt")):
        assert saved.keys() == start.keys() == validated.keys()
        assert all(torch.equal(start[name], saved[name]) for name in saved)
        assert all(torch.equal(validated[name], saved[name]) for name in saved)
