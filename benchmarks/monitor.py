"""What ZeroMonitor itself costs: its hooks' share of a step, and the meter's time per collective.

python benchmarks/monitor.py        # under a minute
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.ranks import RankPool

NUM_CALLS = 20_000


def main() -> None:
    from benchmarks import monitor  # the ranks import what they run by name
    from tests.distributed.test_monitor import _overhead

    with RankPool() as pool:
        ((spent, seconds),) = pool.run(_overhead, world_size=1, timeout_seconds=300)
        (per_call,) = pool.run(monitor.meter_seconds_per_call, world_size=1, timeout_seconds=300)
    print(f"hooks: {spent * 1e3:.1f} ms of {seconds:.2f} s of steps, {spent / seconds:.3%}")
    print(f"meter: {per_call * 1e6:.1f} us per collective")


def meter_seconds_per_call() -> float:
    """Difference between counted and plain calls of a collective that has nothing to send."""
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
