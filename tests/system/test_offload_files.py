"""``offload="nvme"`` of engine ``fsdp2``: as ``offload="cpu"``, digit by digit, in less memory; what lies where.

What a failure localises: one kind alone, to what the kind names; every kind with AdamW and not with SGD, to states in
files; all, to shards there. Times are ``benchmarks/offload_files.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import DataLoader

from lightning_zero import OffloadConfig
from lightning_zero.engines.model_state import KINDS, PLACES
from tests.helpers import account, disk, whereabouts, zoo
from tests.helpers.ranks import outcome


def _files(folder: Any, stage: int = 3, **settings: Any) -> dict[str, Any]:
    return {"stage": stage, "offload": OffloadConfig(target="nvme", path=str(folder)), **zoo.BLOCKS, **settings}


# -- training


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("accumulation_and_clip", 2),
        ("gan", 3),
        ("third_party_lamb", 1),  # steps on whole tensors
    ],
)
def test_trains_as_in_host_memory(ranks2, tmp_path, kind, stage):
    files = _files(tmp_path, stage)
    reference = ranks2(zoo.train, kind, {**files, "offload": "cpu"}, True)
    difference = zoo.difference(ranks2(zoo.train, kind, files, True), reference)
    assert difference.largest == 0, difference
    assert not list(tmp_path.iterdir())  # files have no names


# -- what lies where


def test_parameters_and_states_lie_on_the_disk(ranks2, tmp_path):
    """Bytes per parameter of two ranks in fp32 with AdamW: shards are half of 4, 4 and 8."""
    expected = {"parameters": {"disk": 2.0}, "gradients": {"host": 2.0}, "optimizer": {"disk": 4.0}}
    for found in ranks2(whereabouts.held, _files(tmp_path)):
        for kind in KINDS:
            for place in PLACES:  # Adam's step counters come on top
                assert found[kind][place] == pytest.approx(expected[kind].get(place, 0.0), rel=1e-3, abs=1e-3), kind
        one_unit_and_the_next = 2 * 4.0 / account.Stack.NUM_UNITS
        assert found["inside"] == pytest.approx(one_unit_and_the_next, rel=1e-3)


BLOCKS, WIDTH = 24, 768
UNIT_BYTES = 4 * WIDTH * (WIDTH + 1)


def test_memory_is_that_of_gradients_and_a_few_units(ranks2, tmp_path):
    """A rank's share of 27 MiB: the process holds gradients, and reads the rest from the disk, where values are."""
    args = BLOCKS, WIDTH, 3, str(tmp_path)
    settings = {"stage": 3, "min_unit_numel": 1}
    ranks2(disk.steps, {**settings, "offload": {"target": "cpu"}}, *args)  # maps what libraries use
    files = ranks2(disk.steps, {**settings, "offload": {"target": "nvme"}}, *args, True, True)
    memory = ranks2(disk.steps, {**settings, "offload": {"target": "cpu"}}, *args, False, True)
    share = BLOCKS * UNIT_BYTES / 2
    for mine, host in zip(files, memory, strict=True):
        assert mine["losses"] == host["losses"]
        # Three shares lie in the files: parameters and two states. Gradients are in both; beside them this process
        # holds the last of what was gathered.
        assert host["alive"] - mine["alive"] == pytest.approx(3 * share, rel=0.05)
        assert mine["alive"] < share + 4 * UNIT_BYTES
        assert mine["read"] > 4 * share  # parameters before the forward; all three before the step


# -- the end, and what goes on from it


def _half(path: str, settings: dict[str, Any]) -> None:
    trainer = zoo.make_trainer(settings, max_epochs=1)
    trainer.fit(zoo.make_module("parameter_groups"), DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    trainer.save_checkpoint(path)


def _second_half(path: str, settings: dict[str, Any]) -> list[float]:
    module = zoo.make_module("parameter_groups")
    loader = DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH)
    zoo.make_trainer(settings).fit(module, loader, ckpt_path=path)
    return module.losses


def test_checkpoints_are_those_of_a_run_in_memory(ranks1, ranks2, tmp_path):
    files = _files(tmp_path, checkpoint="sharded")
    memory = {**files, "offload": "cpu"}
    for saved in (files, memory):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "half.ckpt")
            ranks2(_half, path, saved)
            expected = ranks2(_second_half, path, memory)
            assert ranks2(_second_half, path, files) == expected
            assert all(expected)
            assert ranks1(_second_half, path, files) == ranks1(_second_half, path, memory)


# -- errors


def test_a_path_that_cannot_be_used_is_an_error_on_every_rank(ranks2, tmp_path):
    for name, text in ranks2(outcome, zoo.train, "adam", _files(tmp_path / "nowhere")):
        assert name == "ValueError"
        assert "offload.path=" in text
        assert "(No such file or directory): create the folder" in text


def _short_of_room(settings: dict[str, Any]) -> Any:
    usage = mock.Mock(free=1000)
    with mock.patch("lightning_zero.engines.fsdp2.run.shutil.disk_usage", return_value=usage):
        return zoo.train("adam", settings)


def test_too_little_room_is_an_error_on_every_rank(ranks2, tmp_path):
    for name, text in ranks2(outcome, _short_of_room, _files(tmp_path)):
        assert name == "ValueError"
        assert "GiB free on" in text
        assert "offload='cpu'" in text
