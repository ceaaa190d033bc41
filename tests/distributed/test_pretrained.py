"""``load_pretrained``: what ``save_pretrained`` and checkpoints hold arrives, wherever the module stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lightning_zero
from lightning_zero.checkpoint import weights
from lightning_zero.errors import CheckpointError
from tests.helpers.pretrained import MOMENTS, Reads, read_in_run
from tests.helpers.ranks import outcome
from tests.helpers.zoo import make_trainer

# -- names -----------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, rows)
        self.second = nn.Linear(3, rows, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def write(path: Path, state: dict[str, torch.Tensor]) -> str:
    from safetensors.torch import save_file

    save_file(state, str(path))
    return str(path)


STATE = {
    "first.weight": torch.arange(15.0).view(5, 3),
    "first.bias": torch.arange(5.0),
    "table": torch.ones(4),
    "count": torch.tensor(7),
}


def test_one_name_of_a_tied_weight_is_enough(tmp_path):
    small = Small()
    assert lightning_zero.load_pretrained(small, write(tmp_path / "x.safetensors", STATE)) == ([], [])
    assert torch.equal(small.second.weight, STATE["first.weight"])
    assert small.second.weight is small.first.weight
    assert small.count.item() == 7
    assert torch.equal(small.table, STATE["table"])


@pytest.mark.parametrize(
    ("state", "options"),
    [
        ({f"model.{k}": v for k, v in STATE.items()} | {"other.weight": torch.ones(2)}, {"strip": "model."}),
        (
            {k.replace("first.", "old.one."): v for k, v in STATE.items()},
            {"rename": {"old.": "x.", "old.one.": "first."}},
        ),
        (
            {k.upper(): v for k, v in STATE.items()} | {"EXTRA": torch.ones(2)},
            {"rename": lambda name: None if name == "EXTRA" else name.lower()},
        ),
    ],
)
def test_names_are_changed(state, options, tmp_path):
    small = Small()
    assert lightning_zero.load_pretrained(small, write(tmp_path / "x.safetensors", state), **options) == ([], [])
    assert torch.equal(small.first.bias, STATE["first.bias"])


def test_what_is_missing_and_left_over_is_told(tmp_path):
    state = {**{k: v for k, v in STATE.items() if k != "first.bias"}, "head.weight": torch.ones(2)}
    path = write(tmp_path / "x.safetensors", state)
    small = Small()
    before = small.table.clone()
    with pytest.raises(CheckpointError, match=r"lacks 'first.bias'; the module lacks 'head.weight'"):
        lightning_zero.load_pretrained(small, path)
    assert torch.equal(small.table, before), "something was written before the error"
    assert lightning_zero.load_pretrained(small, path, strict=False) == (["first.bias"], ["head.weight"])
    assert torch.equal(small.table, STATE["table"])


def test_shapes_that_differ_are_named_with_file_and_key(tmp_path):
    path = write(tmp_path / "x.safetensors", STATE)
    with pytest.raises(
        CheckpointError, match=r"x.safetensors: 'first.weight' is \(5, 3\), but 'first.weight' .* \(6, 3\)"
    ):
        lightning_zero.load_pretrained(Small(rows=6), path)
    path = write(tmp_path / "y.safetensors", {**STATE, "count": torch.tensor(7.5)})
    with pytest.raises(CheckpointError, match=r"'count' is torch.float32, but 'count' of the module is torch.int64"):
        lightning_zero.load_pretrained(Small(), path)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "header", "foreign"])
def test_damaged_files_are_named(damage, tmp_path):
    path = Path(write(tmp_path / "x.safetensors", STATE))
    content = path.read_bytes()
    path.write_bytes(
        {"cut": content[:-5], "header": content[:9] + b"!" + content[10:], "foreign": b"\xff" * 40}[damage]
    )
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        lightning_zero.load_pretrained(Small(), path)


def test_an_incomplete_folder_is_named(tmp_path):
    write(tmp_path / "model-00001-of-00002.safetensors", {k: v for k, v in STATE.items() if k != "table"})
    with pytest.raises(CheckpointError, match=r"1 of the 2 files"):
        lightning_zero.load_pretrained(Small(), tmp_path)
    with pytest.raises(FileNotFoundError, match="snapshot_download"):
        lightning_zero.load_pretrained(Small(), "somebody/some-model")


# -- ranks -----------------------------------------------------------------------------------------------------------


def _at_every_moment(settings: dict[str, Any], path: str) -> list[Any]:
    return [read_in_run(settings, Small, (), path, moment) for moment in MOMENTS]


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_at_every_moment_of_a_run(engine, ranks2, tmp_path):
    """On ranks that rows cannot be shared out to evenly."""
    wanted = Small()
    lightning_zero.load_pretrained(wanted, path := write(tmp_path / "x.safetensors", STATE))
    for found in ranks2(_at_every_moment, {"stage": 3, "engine": engine}, path):
        for keys, seen in found:
            assert keys == ([], [])
            assert seen.keys() == wanted.state_dict().keys()
            assert all(torch.equal(seen[name], value) for name, value in wanted.state_dict().items())


def _reads_own_file(path: str) -> Any:
    """Under the same path rank 1 finds a file without a tensor that rank 0 finds."""
    read = weights.read_safetensors

    def lacking(path: str) -> Any:
        return {name: value for name, value in read(path).items() if name != "first.bias"}

    with mock.patch.object(weights, "read_safetensors", lacking if os.environ["RANK"] == "1" else read):
        return outcome(read_in_run, "zero3", Small, (), path, "on_fit_start")


def test_an_error_of_one_rank_is_raised_on_all(ranks2, tmp_path):
    for kind, text in ranks2(_reads_own_file, write(tmp_path / "x.safetensors", STATE)):
        assert kind == "CheckpointError"
        assert "first.bias" in text or "holds different tensors on rank 1" in text


def _run(settings: dict[str, Any], path: str) -> Any:
    module = Reads(Small, path, "on_fit_start")
    trainer = make_trainer({"stage": 3, **settings}, max_steps=1, limit_val_batches=0)
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(8, 1), batch_size=1))
    return module, trainer


def _save(form: str, path: str, target: str) -> None:
    _run({"checkpoint": form}, path)[1].save_checkpoint(target)


@pytest.mark.parametrize("form", ["file", "sharded"])
def test_a_checkpoint_is_read(form, ranks2, tmp_path):
    target = str(tmp_path / "x.ckpt")
    ranks2(_save, form, write(tmp_path / "x.safetensors", STATE), target)
    small = Small()
    assert lightning_zero.load_pretrained(small, target, strip="model.") == ([], [])
    assert torch.equal(small.first.weight, STATE["first.weight"])


def _after_a_run(path: str) -> Any:
    module, _ = _run({"after_fit": "sharded"}, path)
    lightning_zero.load_pretrained(module.model, path)
    return module.model.state_dict()


def test_between_runs_a_sharded_module_is_filled(ranks2, tmp_path):
    for state in ranks2(_after_a_run, write(tmp_path / "x.safetensors", STATE)):
        assert all(torch.equal(state[name], STATE[name]) for name in STATE)
