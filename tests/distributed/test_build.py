"""``configure_model`` at stage 3 with ``fsdp2``: parameters are shared out as they are built, with the same values."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import building
from tests.helpers.pretrained import hugging_face
from tests.helpers.ranks import outcome
from tests.helpers.zoo import WIDTH

LAYER = 4 * WIDTH * WIDTH


@pytest.mark.parametrize("way", ["made", "given"])
def test_no_rank_ever_has_many_layers_whole(way, ranks2):
    """The newest, one that it comes from, and one that is closed as soon as the next comes."""
    for seen in ranks2(building.bytes_seen, {}, way):
        assert max(seen) <= 3 * LAYER
        assert len(seen) == (15 if way == "given" else 7)


def test_whole_on_request_and_below_stage_3(ranks2):
    for settings in ({"build": "whole"}, {"stage": 2}):
        for seen in ranks2(building.bytes_seen, settings):
            assert max(seen) == 8 * LAYER


@pytest.mark.parametrize(("world_size", "settings"), [(2, {}), (4, {"shard_size": 2, "offload": "cpu"})], ids=str)
def test_constructors_find_what_they_are_used_to(world_size, settings, ranks):
    for differ in ranks(building.differences, building.Wild, {"seeds_differ": True}, settings, world_size=world_size):
        assert differ == []


def test_rarer_things_that_constructors_do(ranks2):
    for found in ranks2(building.odd_ones):
        assert found == [(how, []) for how in building.ODD]


def test_models_from_pretrained(ranks2, tmp_path):
    pytest.importorskip("transformers")
    hugging_face("llama").save_pretrained(tmp_path)
    for differ in ranks2(building.differences, building.Pretrained, {"path": str(tmp_path)}, {}):
        assert differ == []


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


def test_a_module_whose_run_failed_trains_in_the_next(ranks2):
    for error, shapes, again, ordinary in ranks2(building.fit_again_after_failure):
        assert "holds a view of parameter 'body.0.inner'" in error
        assert set(shapes) <= {(0,), (WIDTH, WIDTH)}
        assert (0,) in shapes
        assert all(torch.equal(again[name], ordinary[name]) for name in ordinary)


def test_checkpoints_fill_what_is_shared_out(ranks2, tmp_path):
    for start, saved, validated in ranks2(building.resume, str(tmp_path / "x.ckpt")):
        assert saved.keys() == start.keys() == validated.keys()
        assert all(torch.equal(start[name], saved[name]) for name in saved)
        assert all(torch.equal(validated[name], saved[name]) for name in saved)
