"""What the benchmark's tables and bounds make of the results that are stored."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from benchmarks import bounds
from benchmarks.bench import render
from benchmarks.contenders import CONTENDERS


def _measured() -> dict[str, Any]:
    def run(seconds: float, loss: float) -> dict[str, Any]:
        return {
            "step_seconds": seconds,
            "cpu_seconds": seconds,
            "update_seconds": float("nan"),
            "peak_bytes": 1e8,
            "imported_bytes": 4e7 if seconds < 2 else 2e7,
            "wire_bytes": 1e6,
            "start_up_seconds": 3.0,
            "losses": [loss],
        }

    return {
        "table": {"shape": "gpt", "ranks": 2, "accumulate": 1},
        "rounds": [
            {
                "floor": run(scale, 5.0),
                "ddp": run(1, 4.0),
                "fully_shard": run(2 * scale, 4.0),
                "zero3": run(1.5 * scale, loss),
            }
            for scale, loss in ((1, 4.1), (2, 4.0), (4, 4.0))
        ]
        + [{"floor": run(1, 5.0), "ddp": run(1, 4.0), "lightning-ddp": run(1, 4.0)}],
        "failed": {"deepspeed-1": "no compiler"},
        "imports": {"lightning": 2.0, "lightning_zero_adds": 0.06},
    }


def test_tables_show_ratios_within_a_round_and_who_did_other_work():
    lines = {line.split(" | ")[0].strip("| "): line for line in render(_measured()).splitlines()}
    assert "| 1.50 (1.50–1.50) | 0.75 (0.75–0.75) |" in lines[f"{CONTENDERS['zero3'][0]} (**other losses**)"]
    assert "failed: no compiler" in lines[CONTENDERS["deepspeed-1"][0]]


def test_bounds_are_judged_by_what_is_stored():
    found = {bound.what: (median(values), bound.holds(values)) for bound, _, values in bounds.judged([_measured()])}
    assert found == {
        "`import lightning_zero` on top of `import lightning.pytorch`": (pytest.approx(60), False),
        "stage 3: step to DDP's": (3.0, False),
        "stage 3: start-up to Lightning's DDP": (1.0, True),
        "stage 3: step to `fully_shard`'s": (0.75, True),
        "stage 3: peak memory to `fully_shard`'s": (1.0, False),
        "stage 3: peak memory to `fully_shard`'s, above what either imports": (1.0, False),
    }
    text = bounds.render([_measured()])
    assert "| stage 3: step to `fully_shard`'s | gpt, 2 | ≤ 0.8 | 0.75 (0.75–0.75) | met |" in text
    assert "| stage 3: step to DDP's | gpt, 2 | ≤ 1.35 | 3.00 (1.50–6.00) | **not met** |" in text
