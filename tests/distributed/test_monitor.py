"""``ZeroMonitor`` and the meter under it: what is counted, where it is shown, and that its hooks do little."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import DataLoader

from lightning_zero.callbacks import ZeroMonitor, zero_monitor
from lightning_zero.comm import meter as meter_module
from lightning_zero.comm.meter import TrafficMeter
from tests.helpers import account, zoo

# -- the meter -------------------------------------------------------------------------------------------------------


def _count() -> tuple[dict[str, int], dict[str, float], dict[str, float], bool]:
    dist.init_process_group("gloo")
    before = {(m, name): getattr(m, name) for m in (dist, c10d) for name in ("all_reduce", "broadcast", "all_gather")}
    meter = TrafficMeter()
    meter.install()
    meter.install()
    n = dist.get_world_size()
    dist.all_reduce(torch.ones(10))  # 2 (n-1)/n x 40
    dist.broadcast(torch.ones(5), src=0)  # 20 from rank 0
    dist.all_gather([torch.ones(3) for _ in range(n)], torch.ones(3))  # (n-1)/n x 12n
    dist.all_gather_into_tensor(torch.ones(4 * n), torch.ones(4))  # (n-1)/n x 16n
    dist.reduce_scatter_tensor(output=torch.ones(2), input=torch.ones(2 * n))  # (n-1)/n x 8n
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, "x")
    calls = dict(meter.calls)
    meter.remove()
    dist.all_reduce(torch.ones(1000))
    put_back = all(getattr(m, name) is original for (m, name), original in before.items())
    return calls, dict(meter.sent), dict(meter.received), put_back and calls == dict(meter.calls)


def test_the_meter_counts_each_collective_once_and_by_its_bytes(ranks3):
    n = 3
    for rank, (calls, sent, received, put_back) in enumerate(ranks3(_count)):
        assert put_back
        assert calls["all_reduce"] >= 1
        assert sent["all_reduce"] == received["all_reduce"] == pytest.approx(2 * (n - 1) / n * 40 * calls["all_reduce"])
        assert (sent.get("broadcast", 0), received.get("broadcast", 0)) == ((20, 0) if rank == 0 else (0, 20))
        assert sent["reduce_scatter"] == pytest.approx((n - 1) * 8)
        gathered = (n - 1) * (12 + 16)
        assert gathered <= sent["all_gather"] < gathered + (n - 1) * 200  # and a pickled letter with its length


# -- the callback ----------------------------------------------------------------------------------------------------


class _Clock:
    """Stands in for ``time``: passes where a test lets it pass, and by ``WAIT`` in each collective."""

    WAIT = 0.04

    def __init__(self) -> None:
        self.now = 100.0
        self._inside = threading.local()

    def __deepcopy__(self, memo: Any) -> _Clock:
        return self  # the plan is made of a copy of the module

    def perf_counter(self) -> float:
        return self.now

    def of_meter(self) -> Any:
        """The same clock for the meter, which reads it when a collective begins and when it ends."""
        return SimpleNamespace(perf_counter=self._begin_or_end)

    def _begin_or_end(self) -> float:
        self._inside.value = not getattr(self._inside, "value", False)
        if not self._inside.value:
            self.now += self.WAIT
        return self.now

    @contextmanager
    def installed(self) -> Iterator[None]:
        with mock.patch.object(zero_monitor, "time", self), mock.patch.object(meter_module, "time", self.of_meter()):
            yield


class _Slow(account.Vectors):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock = clock

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now += 0.02
        return super().__getitem__(index)


class _Paced(account.Stack):
    """20 ms for data (by :class:`_Slow`), and 50 ms of compute."""

    NUM_UNITS = 4

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.clock.now += 0.05
        return super().training_step(batch, batch_idx)


def _paced(strategy: Any, folder: str) -> tuple[dict[str, float], list[str], dict[str, float]]:
    clock, monitor = _Clock(), ZeroMonitor(every_n_steps=2)
    with clock.installed():
        trainer = zoo.make_trainer(
            strategy,
            max_epochs=1,
            limit_train_batches=8,
            callbacks=[monitor],
            logger=CSVLogger(folder),
            log_every_n_steps=2,
        )
        trainer.fit(_Paced(clock), DataLoader(_Slow(clock), batch_size=1))
    shown = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    return monitor.rows[trainer.global_rank], monitor.table(trainer).splitlines(), shown


def test_a_steps_time_is_told_to_loggers_and_the_progress_bar(ranks2, tmp_path):
    for row, table, shown in ranks2(_paced, {"stage": 3, "min_unit_numel": 1}, str(tmp_path)):
        assert row["communication_seconds"] >= _Clock.WAIT * 0.99
        assert row["step_seconds"] - row["communication_seconds"] == pytest.approx(0.07)
        assert row["samples_per_second"] == pytest.approx(1 / row["step_seconds"])
        assert table[0].split() == ["ZeroMonitor", "plan", "rank", "0", "rank", "1"]
        assert shown["zero/samples_per_second"] > 0
    (path,) = tmp_path.glob("*/*/metrics.csv")
    columns, *lines = path.read_text().splitlines()
    for name in ("step_seconds", "communication_seconds", "parameters_bytes", "sent_bytes_per_step"):
        assert f"zero/{name}" in columns.split(",")
    assert len(lines) >= 3
