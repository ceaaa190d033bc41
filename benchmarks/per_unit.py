"""Profiles steps with little compute: two tables of docs/speed.md.

python benchmarks/per_unit.py        # 2 ranks, three minutes; stores what was measured and writes the page

The first model has 200 small blocks, once with each block as a unit and once with automatic units. The second is so
small that only overhead is left; Lightning's DDP runs it as well. Steps are timed without a profiler. Then cProfile
shows where rank 0's main thread spends its time; it runs forward, hooks, backward and step. The time of a C function
counts for the Python function that calls it. Profiling slows down Python but not C, so shares are rough.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bench, contenders
from benchmarks.contenders import CONTENDERS, WARMUP_STEPS, Job

RESULT = bench.RESULTS / "per_unit.json"
TABLES = {
    # the model -> contenders and counted steps
    "many": (["ddp", "fully_shard", "zero1", "zero1-units", "zero3", "zero3-units"], 12),
    "tiny": (["lightning-ddp", "fully_shard", "zero1", "zero3"], 300),
}
PLACES = {
    # a part of a file's path -> the column; the first that fits
    "lightning_zero/comm/": "messages",
    "lightning_zero/": "our Python",
    "torch/distributed/": "`torch.distributed`",
    # Spans for torch.profiler; all but two a step are of fully_shard's hooks
    "torch/autograd/profiler": "`torch.distributed`",
    "site-packages/lightning": "Lightning",
    "torch/nn/": "the model and autograd",
    "torch/autograd/": "the model and autograd",
    "torch/_tensor": "the model and autograd",
    "benchmarks/": "the model and autograd",
    "torch/optim/": "optimizer and clipping",
}
OTHERS = "the rest"
COLUMNS = [*dict.fromkeys(PLACES.values()), OTHERS]


class Profiled(Job):
    """Profiles the counted steps of rank 0."""

    def tick(self, loss: Any) -> None:
        super().tick(loss)
        if self.rank == 0 and self.ticks == WARMUP_STEPS:
            self.profile = cProfile.Profile()
            self.profile.enable()
        elif self.rank == 0 and self.ticks == WARMUP_STEPS + self.steps:
            self.profile.disable()

    def result(self) -> dict[str, Any]:
        return super().result() | ({"places": _places(pstats.Stats(self.profile))} if self.rank == 0 else {})


def _places(stats: pstats.Stats) -> dict[str, float]:
    """Seconds by column."""
    found = dict.fromkeys(COLUMNS, 0.0)
    for (file, _, _), (_, _, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if file != "~":
            found[_column(file)] += own
        for (caller, _, _), (_, _, of_caller, _) in callers.items() if file == "~" else ():
            found[_column(caller)] += of_caller
    return found


def _column(file: str) -> str:
    return next((column for part, column in PLACES.items() if part in file), OTHERS)


def measure() -> dict[str, Any]:
    """Model -> contender -> milliseconds of a step, and the share of each column."""
    launch = partial(contenders.launch, timeout_seconds=300, script=__file__)
    tables: dict[str, Any] = {shape: {} for shape in TABLES}
    for shape, (names, steps) in TABLES.items():
        for name in names:
            plain = Job(contender=name, shape=shape, steps=steps)
            step = statistics.median(contenders.launch(plain)[0]["seconds"])
            places = launch(plain)[0]["places"]
            found = {"step": step * 1e3, "shares": {c: places[c] / sum(places.values()) for c in COLUMNS}}
            print(shape, name, found, file=sys.stderr, flush=True)
            tables[shape][name] = found
    return {"tables": tables, "machine": bench.machine()}


def render(measured: dict[str, Any]) -> str:
    tables = measured["tables"]
    return "\n".join(
        [
            "### Where the time of many small units goes",
            "",
            *_rows("200 blocks of 64, 2 ranks", tables["many"], 0),
            "",
            "Milliseconds of a step, divided by where cProfile finds rank 0's main thread"
            " (`python benchmarks/per_unit.py`); *messages* includes waiting for the other rank.",
            "",
            "### Where the time of a tiny model's step goes",
            "",
            *_rows("2 ranks", tables["tiny"], 2),
            "",
            "As above; DDP's messages are autograd's. *`torch.distributed`* is `fully_shard`'s own hooks here, spans"
            " for `torch.profiler` included.",
        ]
    )


def _rows(first: str, found: dict[str, Any], digits: int) -> list[str]:
    columns = [column for column in COLUMNS if any(each["shares"][column] for each in found.values())]
    return [
        f"| {first} | step, ms | {' | '.join(columns)} |",
        "|---" * (2 + len(columns)) + "|",
        *(
            f"| {CONTENDERS[name][0]} | {each['step']:.{digits}f} | "
            + " | ".join(f"{each['step'] * each['shares'][column]:.{digits}f}" for column in columns)
            + " |"
            for name, each in found.items()
        ),
    ]


def _run_rank(settings: str) -> None:
    import torch

    job = Profiled(**json.loads(settings))
    torch.set_num_threads(1)
    CONTENDERS[job.contender][1](job)
    Path(job.folder, f"{job.rank}.json").write_text(json.dumps(job.result()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _run_rank(sys.argv[2])
    else:
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
        bench.PAGE.write_text(bench.page())
