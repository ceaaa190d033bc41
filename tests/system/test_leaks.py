"""Fits in one process leave nothing open."""

from __future__ import annotations

import os

import pytest
from torch.utils.data import DataLoader

from tests.helpers import account, zoo
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc on this system")


def _held_after_fits(fits: int) -> list[tuple[int, int]]:
    """Threads and open files of this process after each of several runs, each with a strategy of its own."""
    held = []
    for _ in range(fits):
        trainer = zoo.make_trainer({"stage": 3, "min_unit_numel": 1}, max_epochs=1, limit_train_batches=2)
        trainer.fit(account.Mlp(16), DataLoader(account.Tokens(), batch_size=4))
        held.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return held


def test_fits_in_one_process_leave_no_threads_or_files():
    """A group of its own for each strategy's agreements leaves three threads and five files for each fit."""
    with RankPool() as pool:  # processes of its own: what earlier jobs have left would be counted
        for held in pool.run(_held_after_fits, 6, world_size=2):
            (threads, files), (last_threads, last_files) = held[1], held[-1]
            assert last_threads <= threads + 1, held
            assert last_files <= files + 2, held
