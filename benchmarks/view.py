"""What watching for touched parameters costs each torch call of a step, beside DDP: a table of docs/speed.md.

python benchmarks/view.py        # 2 ranks, about a minute; stores what was measured and writes the page

DDP and each stage take turns in the same ranks, a short run each, several rounds. Measured is CPU time of the thread
that calls, which other processes don't lengthen; a difference is taken within a round, and its median counts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bench
from tests.helpers import zoo
from tests.helpers.ranks import RankPool

RESULT = bench.RESULTS / "view.json"
STRATEGIES: dict[str, Any] = {"DDP": "ddp"} | {f"stage {n}": {"stage": n, **zoo.BLOCKS} for n in (1, 2, 3)}
NUM_ROUNDS, NUM_CALLS = 9, 2000
SITES = {
    "step": "plain tensors, in `training_step`",
    "unit": "plain tensors, in a shard unit's forward",
    "own": "a unit's own parameter, in its forward",
}


class Counts(zoo.Zoo):
    """Times small calls at three places of each step."""

    def build(self) -> None:
        super().build()
        self.seconds: dict[str, list[float]] = {site: [] for site in SITES}
        self.net.blocks[1].register_forward_hook(self._in_unit)

    def _in_unit(self, block: Any, inputs: Any, output: Tensor) -> None:
        with torch.no_grad():
            x, bias = output.detach(), block.up.bias
            self._time("unit", lambda: x + x)
            self._time("own", lambda: bias + bias)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        self._time("step", lambda: x + x)
        return super().loss(batch)

    def _time(self, site: str, call: Callable[[], Any]) -> None:
        begun = time.thread_time()
        for _ in range(NUM_CALLS):
            call()
        self.seconds[site].append((time.thread_time() - begun) / NUM_CALLS)


def measure() -> list[dict[str, dict[str, float]]]:
    """By round: strategy -> site -> seconds per call, on this rank."""
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    rounds = []
    for number in range(NUM_ROUNDS + 1):
        found = {}
        for name, strategy in STRATEGIES.items():
            module = Counts()
            loader = DataLoader(zoo.RandomDataset(zoo.BATCH * 2 * 4), batch_size=zoo.BATCH)
            zoo.make_trainer(strategy, max_epochs=1).fit(module, loader)
            found[name] = {site: statistics.median(seconds) for site, seconds in module.seconds.items()}
        if number:  # the first warms up
            rounds.append(found)
    return rounds


def render(measured: dict[str, Any]) -> str:
    """The table as Markdown."""
    names = [name for name in STRATEGIES if name != "DDP"]
    lines = [
        "### What watching for touched parameters adds to a torch call: 2 ranks",
        "",
        f"| a call of | DDP, µs | {' | '.join(f'{name}, µs more' for name in names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for site, text in SITES.items():
        cells = [f"{statistics.median(r['DDP'][site] for r in measured['rounds']) * 1e6:.2f}"]
        cells += [f"{added(measured, name, site) * 1e6:.2f}" for name in names]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    machine = measured["machine"]
    made = (
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, {machine['versions']}; CPU time, medians"
        f" of {len(measured['rounds'])} rounds. Made by `python benchmarks/view.py`."
    )
    return "\n".join([*lines, "", made]) + "\n"


def added(measured: dict[str, Any], name: str, site: str) -> float:
    """Seconds per call beyond DDP's."""
    return statistics.median(r[name][site] - r["DDP"][site] for r in measured["rounds"])


def main() -> None:
    from benchmarks import view  # the ranks import what they run by name

    with RankPool() as pool:
        rounds = pool.run(view.measure, world_size=2, timeout_seconds=600)[0]
    measured = {"machine": bench.machine(), "rounds": rounds}
    RESULT.write_text(json.dumps(measured, indent=1) + "\n")
    print(render(measured))
    bench.PAGE.write_text(bench.page())


if __name__ == "__main__":
    main()
