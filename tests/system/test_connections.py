"""A rank has one connection to each peer in mid-run, and not another one for each group of ranks that is made."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.helpers import account, zoo
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc on this system")


class _Counts(account.Mlp):
    """Remembers how many sockets its process has open in the step after a sharded save."""

    sockets = 0

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 2:
            self.sockets = _sockets()
        return super().training_step(batch, index)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/saved.ckpt")


def _sockets() -> int:
    return sum(_is_socket(name) for name in os.listdir("/proc/self/fd"))


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except OSError:  # the folder's own descriptor
        return False


def _sockets_of_a_run(folder: str) -> int:
    before = _sockets()
    settings = {"stage": 3, "min_unit_numel": 1, "checkpoint": "sharded"}
    trainer = zoo.make_trainer(settings, max_epochs=1, limit_train_batches=4, default_root_dir=folder)
    module = _Counts(16)
    trainer.fit(module, DataLoader(account.Tokens(), batch_size=4))
    return module.sockets - before


def test_a_rank_has_one_connection_to_each_peer(tmp_path):
    """Where each group connects all with all, three ranks more are 12 to 18 sockets more. The collectives of
    ``torch.distributed.checkpoint`` would connect rank 0 to each other rank for good."""
    with RankPool() as pool:  # processes of its own: what earlier jobs have left would be counted
        runs = [pool.run(_sockets_of_a_run, str(tmp_path), world_size=n) for n in (1 + 1, 1 + 4)]
    for sockets in runs:
        sockets[0] -= len(sockets)  # rank 0 serves the store, to which each rank has a connection
    few, many = map(max, runs)
    assert many - few <= 8, (few, many)


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
    with RankPool() as pool:
        for held in pool.run(_held_after_fits, 6, world_size=2):
            (threads, files), (last_threads, last_files) = held[1], held[-1]
            assert last_threads <= threads + 1, held
            assert last_files <= files + 2, held
