"""Measures the cost of watching for touched parameters, per torch call in a step and in hooks: tables of docs/speed.md.

python benchmarks/view.py        # 2 ranks, a few minutes; stores what was measured and writes the page

DDP and each stage take turns in the same ranks, with short runs in several rounds. The measure is CPU time of the
calling thread, which other processes do not affect; differences are taken within a round, and their median counts. For
hooks it is the time from step to step, because ranks wait for each other there.
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
from lightning.pytorch import Callback
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import bench
from tests.helpers import zoo
from tests.helpers.ranks import RankPool

RESULT = bench.RESULTS / "view.json"
STRATEGIES: dict[str, Any] = {"DDP": "ddp"} | {f"stage {n}": {"stage": n, **zoo.BLOCKS} for n in (1, 2, 3)}
NUM_ROUNDS, NUM_HOOK_ROUNDS, NUM_CALLS = 9, 2, 2000
SITES = {
    "step": "plain tensors, in `training_step`",
    "unit": "plain tensors, in a shard unit's forward",
    "own": "a unit's own parameter, in its forward",
}


class Quiet(Callback):
    """A hook that reads no parameter, and the time between its calls."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.then = 0.0

    def on_train_batch_start(self, *unused: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.then)
        self.then = now


class Average(Quiet):
    """Follows all parameters by an exponential average, as EMA callbacks do."""

    def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
        with torch.no_grad():
            if not hasattr(self, "means"):
                self.means = [p.detach().clone() for p in module.parameters()]
            for mean, p in zip(self.means, module.parameters(), strict=True):
                mean.lerp_(p.detach(), 0.1)


class ManySmall(zoo.Zoo):
    """3,000 small parameters, in units of the default size."""

    def build(self) -> None:
        self.net = zoo.Net(num_blocks=500)


HOOKS: dict[str, tuple[type[Quiet], type[zoo.Zoo]]] = {
    "a hook that reads none": (Quiet, zoo.Zoo),
    "an average of all parameters": (Average, zoo.Zoo),
    "3,000 small parameters, a hook that reads none": (Quiet, ManySmall),
    "3,000 small parameters, an average of all": (Average, ManySmall),
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
    """One mapping per round: strategy -> site -> seconds per call, on this rank."""
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


def measure_hooks() -> dict[str, dict[str, float]]:
    """Hook -> strategy -> median seconds per step, on this rank."""
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {hook: {name: [] for name in STRATEGIES} for hook in HOOKS}
    for _ in range(NUM_HOOK_ROUNDS):
        for hook, (callback, kind) in HOOKS.items():
            for name, strategy in STRATEGIES.items():
                timing = callback()
                if kind is ManySmall and isinstance(strategy, dict):
                    strategy = {"stage": strategy["stage"]}
                loader = DataLoader(zoo.RandomDataset(zoo.BATCH * 2 * 20), batch_size=zoo.BATCH)
                zoo.make_trainer(strategy, max_epochs=1, callbacks=[timing]).fit(kind(), loader)
                found[hook][name] += timing.seconds[5:]
    return {hook: {name: statistics.median(each) for name, each in of.items()} for hook, of in found.items()}


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
    lines += ["", "### What hooks cost: 2 ranks", "", f"| a step with | {' | '.join(f'{n}, ms' for n in STRATEGIES)} |"]
    lines.append(f"|---|{'---|' * len(STRATEGIES)}")
    for hook, seconds in measured["hooks"].items():
        lines.append(f"| {hook} | {' | '.join(f'{seconds[name] * 1e3:.2f}' for name in STRATEGIES)} |")
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
        hooks = pool.run(view.measure_hooks, world_size=2, timeout_seconds=600)[0]
    measured = {"machine": bench.machine(), "rounds": rounds, "hooks": hooks}
    RESULT.write_text(json.dumps(measured, indent=1) + "\n")
    print(render(measured))
    bench.PAGE.write_text(bench.page())


if __name__ == "__main__":
    main()
