"""Reads of parameters that not all ranks make: as under DDP, or one line that names them, soon.

That values are DDP's in every hook, at every stage, is the parity test's: kinds ``read_on_one_rank`` and
``histograms_on_one_rank``.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_zero.comm.reads import Ahead, Changes, HostCopies
from lightning_zero.engines.reads import Reader
from tests.helpers import reading, zoo

LIMIT = 600.0
"""Longer than a job may take: a rank that waited for it would fail the test."""
FSDP2 = {"stage": 3, "timeout_seconds": LIMIT, **zoo.BLOCKS}
DEEPSPEED = {"stage": 3, "timeout_seconds": LIMIT, "engine": "deepspeed"}
NAMES = {
    "unforeseen": r"a read of parameter 'net\.head\.weight' in {hook} by rank {rank} and not by .*, and others go",
    "gradient": r"a read of the gradient of .*'net\.head\.weight' in {hook} by rank {rank} and .*, and nothing is sent",
    "forward": r"a read of all parameters of .* in {hook} by rank {rank} and not by rank {other}, and nothing is sent",
    "write": r"a read of a parameter that is written to in {hook} by rank {rank} and not by rank {other}, and nothing",
    "written before": r"a read of .* by rank {rank} and not by rank {other}, and rank {rank} alone has written",
}
REPAIR = "make it on every rank, and write on one, as in `state = self.net.state_dict()`"


@pytest.mark.parametrize(
    ("settings", "hook", "what", "rank"),
    [
        pytest.param(FSDP2, "on_before_optimizer_step", "unforeseen", 0, id="before a step"),
        pytest.param(FSDP2, "on_train_epoch_end", "gradient", 1, id="gradient"),
        pytest.param(FSDP2, "on_train_epoch_end", "forward", 0, id="forward"),
        pytest.param(FSDP2, "on_train_epoch_end", "written before", 0, id="written"),
        pytest.param(FSDP2, "on_train_epoch_end", "write", 0, id="write"),
        pytest.param(DEEPSPEED, "on_before_optimizer_step", "gradient", 0, id="deepspeed"),
    ],
)
def test_what_is_not_sent_raises_before_the_limit_and_by_name(
    ranks2: Any, settings: dict[str, Any], hook: str, what: str, rank: int
) -> None:
    results = ranks2(reading.look, settings, hook, what, rank)
    (text,) = results[rank]["found"]
    pattern = NAMES[what].format(hook=rf"Reader\.{hook}", rank=rank, other=1 - rank)
    assert re.search(pattern, text), text
    assert REPAIR in text
    assert "timeout_seconds" not in text
    assert results[1 - rank]["found"] == []
    assert all(len(result["losses"]) == 4 for result in results)  # it can be caught, and ranks go on as one
    assert [result["threads"] for result in results] == [[], []]


@pytest.mark.parametrize("settings", [FSDP2, DEEPSPEED], ids=["fsdp2", "deepspeed"])
def test_processes_that_a_rank_starts_do_not_read_parameters(ranks2: Any, settings: dict[str, Any]) -> None:
    for text in ranks2(reading.in_a_fork, settings):
        assert re.search(r"RuntimeError.*in a process that this rank has started.*num_workers=0", text, re.S), text


def test_a_rank_that_comes_when_the_others_have_read_reads_the_same(ranks2: Any) -> None:
    first, second = ranks2(reading.look, FSDP2, "on_train_epoch_end", "norm", None, True)
    expected = ranks2(reading.look, "ddp", "on_train_epoch_end", "norm", None)[0]["found"]
    assert first["found"] == second["found"] == expected


def test_replicas_of_other_ranks_send_nothing(ranks: Any) -> None:
    """HSDP: only ranks 0 and 1 have the rows that rank 0 reads."""
    settings = {**FSDP2, "shard_size": 2}
    results = ranks(reading.look, settings, "on_train_epoch_end", "norm", 3, world_size=4)
    expected = ranks(reading.look, "ddp", "on_train_epoch_end", "norm", 3, world_size=4)
    # Four ranks' gradients are summed in another order than by DDP's all-reduce
    assert results[3]["found"] == pytest.approx(expected[3]["found"], rel=1e-6)


def test_ranks_meet_before_more_is_kept(ranks2: Any) -> None:
    """Rows of before are kept for the rank that reads alone, or it is waited for."""
    expected = ranks2(reading.shrink, "ddp", 0)
    for kept_bytes in (0, 300, 1 << 20):
        reads = ranks2(reading.shrink, FSDP2, kept_bytes)
        for found, of_ddp in zip(reads, expected, strict=True):
            assert found["found"] == pytest.approx(of_ddp["found"], rel=1e-6)  # a norm of rows put together
            assert found["losses"] == of_ddp["losses"]
            assert found["kept"] <= kept_bytes
        assert reads[0]["found"]
        assert reads[0]["kept"] or not kept_bytes


def test_changes_keep_what_was_there_before() -> None:
    changes, now = Changes(), torch.zeros(2)
    with changes.of({5: now}, 8):
        assert changes.done == 0  # readers of the next count wait
        now.add_(1)
    with changes.of({5: now, 6: now}, 16):
        now.add_(1)
    assert [changes.rows_at(done, 5, now).tolist() for done in (0, 1, 2)] == [[0, 0], [1, 1], [2, 2]]
    assert changes.rows_at(0, 6, now).tolist() == [1, 1]
    assert (changes.lost, changes.kept_bytes) == (0, 24)
    changes.forget()
    assert (changes.lost, changes.kept_bytes) == (2, 0)
    assert changes.rows_at(0, 5, now) is now
    changes.begin()
    assert (changes.lost, changes.begun, changes.done) == (3, 3, 2)
    changes.end()
    assert changes.done == 3


def test_ranks_meet_before_a_step_only_where_user_code_precedes_it() -> None:
    changes, asked, marks = Changes(), [], []
    changes.mark = lambda: marks.append(changes.ahead)  # on an accelerator readers' copies wait for it
    reads: Any = SimpleNamespace(meet=lambda: asked.append("met"))
    reader = Reader(reads, changes, SimpleNamespace(), is_between=lambda: True)
    reader.step_is_next()
    reader.step_begins()
    assert (asked, marks, changes.ahead) == ([], [], Ahead.STEP)
    reader.waits_before_step = True
    reader.step_is_next()
    assert (asked, marks, changes.ahead) == ([], [Ahead.MEETING], Ahead.MEETING)
    for _ in range(2):  # to clip, and to step
        reader.step_begins()
        assert (asked, changes.ahead) == (["met"], Ahead.STEP)
    reader.step_ends()
    assert changes.ahead is Ahead.MESSAGES


def test_rows_leave_an_accelerator_on_a_stream_that_waits_for_their_latest_change_alone() -> None:
    """The main thread's stream may wait for the rank that reads."""
    seen: list[str] = []
    event = SimpleNamespace(record=lambda: seen.append("recorded"))
    stream = SimpleNamespace(wait_event=lambda waited: seen.append("waits" if waited is event else "waits for another"))

    @contextmanager
    def on(current: Any) -> Any:
        seen.append("on it" if current is stream else "on another")
        yield
        seen.append("off")

    module = SimpleNamespace(Stream=lambda device: stream, Event=lambda: event, stream=on)
    rows, changes = torch.arange(6.0).view(3, 2), Changes()
    with mock.patch.object(torch, "get_device_module", return_value=module):
        copies = HostCopies(torch.device("cuda"), changes)
    assert seen == ["recorded"]  # what was there at first
    with changes.under_way():
        changes.end()
        changes.begin()
    assert seen == ["recorded"] * 3
    with changes.of({0: rows}, 0):
        assert seen == ["recorded"] * 3
    seen.clear()
    assert copies.of(rows).tolist() == list(range(6))
    assert seen == ["on it", "waits", "off"]
    assert HostCopies(torch.device("cpu"), changes).of(rows).data_ptr() == rows.data_ptr()
