"""``load_pretrained`` reads models of transformers as ``save_pretrained`` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lightning_zero
from tests.helpers.pretrained import KINDS, hugging_face, read_in_run

pytest.importorskip("transformers")


def _publish(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights that are now in ``folder``, in several files."""
    torch.manual_seed(5)
    model = hugging_face(kind)
    model.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return {name: value.clone() for name, value in model.state_dict().items()}


def _assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_arrives_outside_of_a_run(kind: str, tmp_path: Path) -> None:
    weights = _publish(kind, tmp_path)
    torch.manual_seed(6)
    model = hugging_face(kind)
    assert lightning_zero.load_pretrained(model, tmp_path) == ([], [])
    _assert_equal(model.state_dict(), weights)


def test_every_rank_reads_its_rows(ranks3, tmp_path: Path) -> None:
    """Of experts, which become one tensor."""
    weights = _publish("mixtral", tmp_path)
    strategy = {"stage": 3, "min_unit_numel": 1}
    for keys, seen in ranks3(read_in_run, strategy, hugging_face, ("mixtral",), str(tmp_path), "on_fit_start"):
        assert keys == ([], [])
        _assert_equal(seen, weights)
