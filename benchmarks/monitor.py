"""Measures the cost of ZeroMonitor itself: its hooks' share of a step, and the meter's time per collective.

python benchmarks/monitor.py        # under a minute
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.ranks import RankPool

NUM_CALLS = 20_000
NUM_STEPS = 30
PER_STEP = (
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def main() -> None:
    from benchmarks import monitor  # the ranks import what they run by name

    with RankPool() as pool:
        ((spent, seconds),) = pool.run(monitor.overhead, world_size=1, timeout_seconds=300)
        (per_call,) = pool.run(monitor.meter_seconds_per_call, world_size=1, timeout_seconds=300)
    print(f"hooks: {spent * 1e3:.1f} ms of {seconds:.2f} s of steps, {spent / seconds:.3%}")
    print(f"meter: {per_call * 1e6:.1f} us per collective")


def overhead() -> tuple[float, float]:
    """Seconds in the monitor's own hooks and of the steps around them; on one rank, so that no rank waits."""
    from torch.utils.data import DataLoader

    from lightning_zero.callbacks import ZeroMonitor
    from tests.helpers import account, zoo

    class Timed(ZeroMonitor):
        seconds = 0.0

    def timed(name: str) -> Any:
        original = getattr(ZeroMonitor, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(self, *args, **kwargs)
            finally:
                Timed.seconds += time.perf_counter() - begun

        return hook

    for name in PER_STEP:
        setattr(Timed, name, timed(name))
    monitor = Timed(predict=False)
    trainer = zoo.make_trainer(
        {"stage": 3, "min_unit_numel": 1}, max_epochs=1, limit_train_batches=NUM_STEPS, callbacks=[monitor]
    )
    trainer.fit(account.Mlp(256), DataLoader(account.Tokens(), batch_size=16))
    return Timed.seconds, monitor.rows[0]["step_seconds"] * NUM_STEPS


def meter_seconds_per_call() -> float:
    """Difference in time between a counted and a plain call of a collective with nothing to send."""
    import torch
    import torch.distributed as dist

    from lightning_zero.comm.meter import TrafficMeter

    dist.init_process_group("gloo")
    tensor = torch.zeros(1)

    def seconds() -> float:
        begun = time.perf_counter()
        for _ in range(NUM_CALLS):
            dist.all_reduce(tensor)
        return (time.perf_counter() - begun) / NUM_CALLS

    plain = min(seconds() for _ in range(3))
    meter = TrafficMeter()
    meter.install()
    counted = min(seconds() for _ in range(3))
    meter.remove()
    return counted - plain


if __name__ == "__main__":
    main()
