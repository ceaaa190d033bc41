"""``ZeroMonitor`` and the meter under it: what is counted, where it is shown, and that its hooks do little."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import DataLoader

from lightning_zero.callbacks import ZeroMonitor, zero_monitor
from lightning_zero.comm import meter as metering
from lightning_zero.comm.meter import TrafficMeter
from tests.helpers import account, zoo

# -- the meter -------------------------------------------------------------------------------------------------------


def _count() -> tuple[dict[str, int], dict[str, float], bool]:
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
    return calls, dict(meter.sent), put_back and calls == dict(meter.calls)


def test_the_meter_counts_each_collective_once_and_by_its_bytes(ranks3):
    n = 3
    for rank, (calls, sent, put_back) in enumerate(ranks3(_count)):
        assert put_back
        assert calls["all_reduce"] >= 1
        assert sent["all_reduce"] == pytest.approx(2 * (n - 1) / n * 40 * calls["all_reduce"])
        assert sent.get("broadcast", 0) == (20 if rank == 0 else 0)
        assert sent["reduce_scatter"] == pytest.approx((n - 1) * 8)
        gathered = (n - 1) * (12 + 16)
        assert gathered <= sent["all_gather"] < gathered + (n - 1) * 200  # and a pickled letter with its length


# -- the callback ----------------------------------------------------------------------------------------------------


class _Clock:
    """Stands in for ``time``: passes where a test lets it pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __deepcopy__(self, memo: Any) -> _Clock:
        return self  # the plan is made of a copy of the module

    def perf_counter(self) -> float:
        return self.now


class _Ticks(_Clock):
    """The same clock for the meter, which reads it before and after a collective or a wait: each takes 1 ms."""

    def __init__(self, clock: _Clock) -> None:
        self.clock, self.num_readings = clock, 0

    def perf_counter(self) -> float:
        self.num_readings += 1
        self.clock.now += 0.0 if self.num_readings % 2 else 0.001
        return self.clock.now


class _Slow(account.Vectors):
    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock = clock

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now += 0.02
        return super().__getitem__(index)


class _Paced(account.Stack):
    """20 ms for data (by :class:`_Slow`), 50 ms of compute, and 10 ms of the optimizer."""

    NUM_UNITS = 4

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.clock.now += 0.05
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.clock.now += 0.01


def _paced(strategy: Any, folder: str) -> tuple[dict[str, float], list[str]]:
    clock, monitor = _Clock(), ZeroMonitor(every_n_steps=2)
    with mock.patch.object(zero_monitor, "time", clock), mock.patch.object(metering, "time", _Ticks(clock)):
        trainer = zoo.make_trainer(
            strategy,
            max_epochs=1,
            limit_train_batches=16,
            accumulate_grad_batches=2,
            callbacks=[monitor],
            logger=CSVLogger(folder),
            log_every_n_steps=2,
        )
        trainer.fit(_Paced(clock), DataLoader(_Slow(clock), batch_size=1))
    return monitor.rows[trainer.global_rank], monitor.table(trainer).splitlines()


def test_the_parts_of_a_steps_time_add_up_and_are_logged(ranks2, tmp_path):
    for row, table in ranks2(_paced, {"stage": 3, "min_unit_numel": 1}, str(tmp_path)):
        parts = {part: row[f"{part}_seconds"] for part in zero_monitor.PARTS}
        assert parts["data"] == pytest.approx(2 * 0.02)
        assert parts["compute"] == pytest.approx(2 * 0.05)
        assert parts["optimizer"] == pytest.approx(0.01)
        assert parts["communication"] > 0
        assert sum(parts.values()) == pytest.approx(row["step_seconds"])
        assert table[0].split() == ["ZeroMonitor", "plan", "rank", "0", "rank", "1"]
    (path,) = tmp_path.glob("*/*/metrics.csv")
    columns, *lines = path.read_text().splitlines()
    for name in ("step_seconds", "communication_seconds", "parameters_bytes", "sent_bytes_per_step"):
        assert f"zero/{name}" in columns.split(",")
    assert len(lines) >= 3
