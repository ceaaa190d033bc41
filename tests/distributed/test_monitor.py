"""``ZeroMonitor`` and the meter under it: what is counted, where it is shown, and that it costs next to nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader

from lightning_zero.callbacks import ChromeTrace, ZeroMonitor
from lightning_zero.callbacks.zero_monitor import PARTS, HostClock
from lightning_zero.comm.meter import TrafficMeter
from tests.helpers import account, zoo

pytestmark = pytest.mark.sampled

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
    mesh = dist.init_device_mesh("cpu", (n,)) if hasattr(dist, "init_device_mesh") else None
    mesh = mesh or torch.distributed.device_mesh.init_device_mesh("cpu", (n,))
    DTensor.from_local(torch.ones(6, 2), mesh, [Shard(0)]).full_tensor()  # (n-1)/n x 48n
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, "x")
    calls = dict(meter.calls)
    meter.remove()
    dist.all_reduce(torch.ones(1000))
    put_back = all(getattr(m, name) is original for (m, name), original in before.items())
    assert meter.seconds > 0
    return calls, dict(meter.sent), dict(meter.received), put_back and calls == dict(meter.calls)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_meter_counts_each_collective_once_and_by_its_bytes(ranks, world_size):
    n = world_size
    for rank, (calls, sent, received, put_back) in enumerate(ranks(_count, world_size=n)):
        assert put_back
        assert calls["all_reduce"] >= 1
        assert sent["all_reduce"] == received["all_reduce"] == pytest.approx(2 * (n - 1) / n * 40 * calls["all_reduce"])
        assert (sent.get("broadcast", 0), received.get("broadcast", 0)) == ((20, 0) if rank == 0 else (0, 20))
        assert sent["reduce_scatter"] == pytest.approx((n - 1) * 8)
        gathered = (n - 1) * (12 + 16 + 48)
        assert gathered <= sent["all_gather"] < gathered + (n - 1) * 200  # and a pickled letter with its length


# -- the callback ----------------------------------------------------------------------------------------------------


class _Slow(account.Vectors):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().__getitem__(index)


class _SlowOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        time.sleep(0.03)
        return result


class _Paced(account.Stack):
    """Known waits: 20 ms for data, 30 ms in the optimizer, 50 ms of compute; rank 1 comes 40 ms late."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        late = 0.04 * self.global_rank
        time.sleep(0.05 + late)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return _SlowOptimizer(self.parameters(), lr=0.1)


def _paced(strategy: Any, folder: str) -> tuple[dict[str, float], list[str], dict[str, float]]:
    monitor = ZeroMonitor(every_n_steps=2, peak_flops=1e9)
    trainer = zoo.make_trainer(
        strategy,
        max_epochs=1,
        limit_train_batches=8,
        callbacks=[monitor],
        logger=CSVLogger(folder),
        log_every_n_steps=2,
    )
    trainer.fit(_Paced(), DataLoader(_Slow(), batch_size=1))
    shown = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    return monitor.rows[trainer.global_rank], monitor.table(trainer).splitlines(), shown


@pytest.mark.parametrize("strategy", ["ddp", {"stage": 1}, {"stage": 3, "min_unit_numel": 1}])
def test_a_steps_time_is_split_into_where_it_went(ranks2, tmp_path, strategy):
    results = ranks2(_paced, strategy, str(tmp_path))
    for rank, (row, table, _) in enumerate(results):
        assert sum(row[f"{part}_seconds"] for part in PARTS) == pytest.approx(row["step_seconds"], rel=1e-3)
        assert row["data_seconds"] >= 0.02
        assert row["optimizer_seconds"] >= 0.03
        assert row["compute_seconds"] >= 0.05
        # the early rank waits for the late one, inside a collective, and not the other way round
        if rank == 0:
            assert row["communication_seconds"] >= 0.03
        assert row["samples_per_second"] == pytest.approx(1 / row["step_seconds"], rel=0.01)
        assert row["mfu"] == pytest.approx(row["tflops_per_second"] * 1e3)
        assert table[0].split() == ["ZeroMonitor", "plan", "rank", "0", "rank", "1"]


def test_loggers_and_the_progress_bar_are_told(ranks2, tmp_path):
    _, _, shown = ranks2(_paced, {"stage": 2}, str(tmp_path))[0]
    assert shown["zero/samples_per_second"] > 0
    (path,) = tmp_path.glob("*/*/metrics.csv")
    columns, *lines = path.read_text().splitlines()
    for name in ("compute_seconds", "communication_seconds", "parameters_bytes", "sent_bytes_per_step", "mfu"):
        assert f"zero/{name}" in columns.split(",")
    assert len(lines) >= 3


class _LateMarks(HostClock):
    """As CUDA events do, a mark passes only after the host has gone on."""

    def __init__(self) -> None:
        self.asked: dict[float, int] = {}
        self.late = 0

    def passed(self, mark: float) -> bool:
        self.asked[mark] = self.asked.get(mark, 0) + 1
        self.late += self.asked[mark] == 1
        return self.asked[mark] > 1

    def seconds(self, begin: float, end: float) -> float:
        assert self.asked, "read before it was asked whether it had passed"
        return super().seconds(begin, end)


class _AsOnCuda(ZeroMonitor):
    """Takes CUDA's way through the callback, with a host clock in the place of events."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self._clock, self._on_host = _LateMarks(), False
        self._step_sync(trainer)


def _as_on_cuda() -> tuple[int, int, int, dict[str, float], int]:
    monitor = _AsOnCuda(every_n_steps=2)
    pairs: list[int] = []
    original = monitor._read

    def read() -> None:
        pairs.extend(len(w.waits) for w in monitor._pending)
        original()

    monitor._read = read  # type: ignore[method-assign]
    torch.cuda.synchronize, kept = lambda: None, torch.cuda.synchronize
    try:
        trainer = zoo.make_trainer(
            {"stage": 3, "min_unit_numel": 1}, max_epochs=1, limit_train_batches=6, callbacks=[monitor]
        )
        trainer.fit(_Paced(), DataLoader(account.Vectors(), batch_size=1))
    finally:
        torch.cuda.synchronize = kept
    return (
        monitor._totals["steps"],
        max(pairs),
        monitor._clock.late,
        monitor._rates(monitor._totals),
        len(monitor._handles),
    )


def test_marks_that_pass_late_are_read_late_and_waits_are_seen_around_every_unit(ranks2):
    for steps, waits, late, rates, handles in ranks2(_as_on_cuda):
        assert steps in (4, 5)  # without the first, and the last may still be under way
        assert late > 0
        # a unit waits before its forward and its backward, and the step at the end of its backward
        assert waits >= 2 * account.Stack.NUM_UNITS
        assert 0 < rates["communication_seconds"] < rates["step_seconds"]
        assert handles == 0


class _Timed(ZeroMonitor):
    """Adds up the time spent in the monitor's own hooks."""

    seconds = 0.0


def _timed(name: str) -> Any:
    original = getattr(ZeroMonitor, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            _Timed.seconds += time.perf_counter() - begun

    return hook


PER_STEP = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "_after_optimizer",
    "on_train_batch_end",
)
for _name in PER_STEP:
    setattr(_Timed, _name, _timed(_name))


def _overhead() -> tuple[float, float]:
    _Timed.seconds = 0.0
    monitor = _Timed(predict=False)
    trainer = zoo.make_trainer(
        {"stage": 3, "min_unit_numel": 1}, max_epochs=1, limit_train_batches=30, callbacks=[monitor]
    )
    trainer.fit(account.Mlp(256), DataLoader(account.Tokens(), batch_size=16))
    return _Timed.seconds, monitor._totals["seconds"]


def test_its_own_time_is_below_one_percent_of_a_steps(ranks1):
    """One rank, so that nobody waits; a step of some 100 ms, which is short."""
    ((spent, seconds),) = ranks1(_overhead, timeout_seconds=200)
    assert spent < 0.01 * seconds, f"{spent / seconds:.2%}"


def _traced(folder: str, num_batches: int) -> str:
    trace = ChromeTrace(folder, skip_steps=1, num_steps=2)
    trainer = zoo.make_trainer({"stage": 2}, max_epochs=1, limit_train_batches=num_batches, callbacks=[trace])
    trainer.fit(zoo.Zoo(), DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    assert trace.path is not None
    return str(trace.path)


@pytest.mark.parametrize("num_batches", [2, 5])
def test_a_chrome_trace_per_rank(ranks2, tmp_path, num_batches):
    paths = ranks2(_traced, str(tmp_path), num_batches)
    assert [Path(p).name for p in paths] == ["trace-rank0.json", "trace-rank1.json"]
    assert all("traceEvents" in Path(p).read_text() for p in paths)
