"""The benchmark measures what it says: the same training under each contender, bytes and steps counted."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

import pytest

from benchmarks import bench, bounds
from benchmarks.bench import ROOT, render
from benchmarks.contenders import CONTENDERS


def _run(contender: str, **settings: Any) -> list[dict[str, Any]]:
    job = {"contender": contender, "shape": "tiny", "ranks": 2, "steps": 3, **settings}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "contenders.py"), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.rest
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.full), 2])
def test_contenders_do_the_same_work(accumulate):
    reference = _run("ddp", accumulate=accumulate)
    for name in ("fully_shard", "engine-2", "zero3"):
        for rank, found in zip(reference, _run(name, accumulate=accumulate), strict=True):
            assert found["losses"] == pytest.approx(rank["losses"], rel=1e-5)  # gradients are added in another order
            assert len(found["seconds"]) == 3
            assert found["life_peak_bytes"] >= found["peak_bytes"] > found["imported_bytes"] > 0


@pytest.mark.rest
def test_contenders_that_stop_themselves_take_turns():
    table = {"shape": "tiny", "ranks": 2, "accumulate": 1, "steps": 6, "turn_steps": 2, "about": "units"}
    found = bench.run(table, ["ddp", "nobody", "fully_shard"])
    assert found["nobody"] == "KeyError: 'nobody'"
    for name in ("ddp", "fully_shard"):
        assert [len(rank["seconds"]) for rank in found[name]] == [6, 6]
    stops = sum(1 for _ in bench._turns({**table, "contender": "ddp"}))
    assert stops == 3  # after the warm-up and after 2 and 4 steps


def test_every_contender_runs_beside_the_anchors():
    names = [*CONTENDERS]
    for ranks, beside in ((2, 10), (4, 5)):
        groups = bench._groups(names, ranks)
        assert all(group[:3] == [*bench.ANCHORS] and len(group) <= beside for group in groups)
        assert sorted(name for group in groups for name in group[3:]) == sorted({*names} - {*bench.ANCHORS})
        # What a bound compares runs side by side.
        assert all(any({f"engine-{n}", f"zero{n}"} <= {*group} for group in groups) for n in (1, 2, 3))
    assert bench._groups([*bench.ANCHORS], 2) == [[*bench.ANCHORS]]


@pytest.mark.rest
def test_a_contender_that_fails_says_why():
    with pytest.raises(AssertionError, match="KeyError: 'nobody'"):
        _run("nobody")


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


def test_each_contender_has_a_table_and_each_table_a_file_of_its_own():
    assert {name for table in bench.TABLES for name in bench._contenders(table)} == {*CONTENDERS}
    assert {*CONTENDERS}.issuperset(name for _, names in bench.ABOUT.values() for name in names)
    assert len({bench._path(table) for table in bench.TABLES}) == len(bench.TABLES)
    subjects = {(table["shape"], table.get("about", "")) for table in bench.TABLES}
    assert subjects.issuperset((bound.shape, bound.about) for bound in bounds.BOUNDS)


def test_bounds_are_judged_by_what_is_stored():
    found = {bound.what: (median(values), bound.holds(values)) for bound, _, values in bounds.judged([_measured()])}
    assert found == {
        "`import lightning_zero` beside `import lightning.pytorch`": (pytest.approx(60), False),
        "stage 3: step to DDP's": (3.0, False),
        "stage 3: start-up to Lightning's DDP": (1.0, True),
        "stage 3: step to `fully_shard`'s": (0.75, True),
        "stage 3: peak memory to `fully_shard`'s": (1.0, False),
        "stage 3: peak memory to `fully_shard`'s, above what either imports": (1.0, False),
    }
    text = bounds.render([_measured()])
    assert "| stage 3: step to `fully_shard`'s | gpt, 2 | ≤ 0.8 | 0.75 (0.75–0.75) | met |" in text
    assert "| stage 3: step to DDP's | gpt, 2 | ≤ 1.35 | 3.00 (1.50–6.00) | **not met** |" in text


def test_bounds_need_only_the_contenders_that_are_measured_for_them():
    stored = bench._stored()
    for measured in stored:
        needed = bounds.contenders(measured["table"])
        fewer = {**measured, "rounds": [{n: ran[n] for n in ran if n in needed} for ran in measured["rounds"]]}
        assert [*bounds.judged([fewer])] == [
            (bound, fewer, values) for bound, _, values in bounds.judged([measured])
        ], measured["table"]
    assert sum(1 for _ in bounds.judged(stored)) > 40
