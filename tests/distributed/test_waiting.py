"""A rank that waits in vain says for whom, and in which call of the user's, long before ``timeout_seconds``."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_zero.launch import waiting
from tests.helpers import zoo


class Waits(zoo.Zoo):
    """Rank 0 reaches a barrier that rank 1 is late for."""

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            late()
        dist.barrier()


def late() -> None:
    time.sleep(3)


class GoesOn(zoo.Zoo):
    """Each look finds rank 0 in a barrier, but in another one."""

    def on_train_start(self) -> None:
        for _ in range(50):
            if self.global_rank == 1:
                time.sleep(0.05)
            dist.barrier()


def _said(module: type[zoo.Zoo]) -> str:
    waiting.WAIT_SECONDS, waiting.POLL_SECONDS = 1.0, 0.2
    trainer = zoo.make_trainer({"stage": 3}, max_epochs=1)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trainer.fit(module(), DataLoader(zoo.RandomDataset(8), batch_size=2))
    return said.getvalue()


def _about_the_hook(said: str) -> list[str]:
    """On a busy machine ranks may wait for each other elsewhere, too."""
    return [text for text in said.split("lightning_zero: ") if "in on_train_start" in text]


def test_who_waits_for_whom_in_which_call(ranks2: Any) -> None:
    first, second = ranks2(_said, Waits)
    assert second == ""
    (said,) = _about_the_hook(first)  # once
    head, waits, for_whom = said.splitlines()
    assert head.startswith("rank 0 has waited ")
    assert waits.startswith(f"  rank 0 waits in barrier, called at {__file__}:")
    assert waits.endswith("in on_train_start: dist.barrier()")
    assert for_whom.startswith(f"  rank 1 is at {__file__}:")
    assert for_whom.endswith("in late: time.sleep(3)")


def test_ranks_that_go_on_say_nothing(ranks2: Any) -> None:
    first, second = ranks2(_said, GoesOn)
    assert _about_the_hook(first) == []
    assert second == ""
