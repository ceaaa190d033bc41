"""Modules built on the meta device train with the values that ordinary construction would have given them."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import meta
from tests.helpers.pretrained import hugging_face, read_in_run
from tests.helpers.ranks import outcome

BLOCKS = {"min_unit_numel": 1}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mixed", {"stage": 3, **BLOCKS}),
        ("rotary", {"stage": 1, "offload": "cpu"}),
        ("rotary", {"stage": 2, "engine": "deepspeed"}),
        ("mixed", {"stage": 3, "engine": "deepspeed"}),
    ],
    ids=str,
)
def test_values_are_those_of_ordinary_construction(kind, settings, ranks2):
    for differ in ranks2(meta.differences, kind, settings):
        assert differ == []


def test_without_a_fit(ranks2):
    for ordinary, materialized in ranks2(meta.validate, "rotary", "zero3"):
        assert ordinary == materialized


# -- what cannot be filled -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("scaled", "model.scale"),
        ("half initialized", "model.frequencies"),
        ("masked", "model.mask"),
    ],
)
def test_what_has_no_initializer_is_named_on_all_ranks(kind, named, ranks2):
    for error, text in ranks2(outcome, meta.fit, kind, {"stage": 3, **BLOCKS}):
        assert error == "ValueError"
        assert f"'{named}'" in text
        assert "linear" not in text
        assert "reset_parameters" in text


# -- values from files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "form"), [("mixed", "file"), ("scaled", "sharded")])
def test_a_checkpoint_fills_what_has_no_initializer(kind, form, ranks2, tmp_path):
    path, settings = str(tmp_path / "x.ckpt"), {"stage": 3, **BLOCKS}
    saved = ranks2(meta.fit, kind, {**settings, "checkpoint": form}, "cpu", None, path)
    ordinary = ranks2(meta.fit, kind, settings, "cpu", path)
    materialized = ranks2(meta.fit, kind, settings, "meta", path)
    for one, other in zip(ordinary, materialized, strict=True):
        assert one[0] == other[0]
        assert len(one[0]) == 2
        for name, value in saved[0][2].items():
            assert torch.equal(other[1][name.removeprefix("model.")], value)
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


def test_models_from_config_read_published_weights(ranks2, tmp_path):
    pytest.importorskip("transformers.core_model_loading")  # transformers 4 cannot recompute its buffers
    torch.manual_seed(5)
    model = hugging_face("mixtral")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    weights = model.state_dict()
    args = ({"stage": 3, **BLOCKS}, hugging_face, ("mixtral",), str(tmp_path), "configure_model")
    for keys, seen in ranks2(_read_on_meta, *args):
        assert keys == ([], [])
        assert seen.keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(seen[name], value), name


def _read_on_meta(*args):
    return read_in_run(*args, meta=True)


def test_models_from_config_initialize_themselves(ranks2):
    """Spread and constants are those of ordinary construction, and so are buffers; transformers draws twice there, so
    the numbers are others."""
    pytest.importorskip("transformers.core_model_loading")  # transformers 4 cannot recompute its buffers
    torch.manual_seed(0)
    ordinary = hugging_face("llama")
    buffers = {f"inner.{name}": b for name, b in ordinary.named_buffers()}
    for _, start, _ in ranks2(meta.fit, "llama", {"stage": 3, **BLOCKS}):
        for name, value in ordinary.state_dict().items():
            found = start[f"inner.{name}"]
            if value.numel() > 100 and value.std() > 0:
                assert found.std().item() == pytest.approx(value.std().item(), rel=0.3), name
                assert found.mean().item() == pytest.approx(value.mean().item(), abs=0.6 * value.std().item()), name
            elif value.std() == 0:
                assert torch.equal(found, value), name
        for name, value in buffers.items():
            assert torch.equal(start[name], value), name


def test_init_module_with_empty_init(ranks2):
    (lay, one), (_, other) = ranks2(meta.init_module, "zero3")
    assert lay == {"meta"}
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(value.isfinite().all() and value.std() > 0 for value in one.values() if value.dim() > 1)
