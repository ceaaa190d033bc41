"""Bounds that the stored runs must meet: the first table of docs/speed.md."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

Measured = dict[str, Any]
"""One stored table: ``table``, ``imports`` and ``rounds``, each contender -> run of those measured side by side."""


@dataclass(frozen=True)
class Bound:
    """An upper bound on a figure of every table of one shape; a lower bound if ``at_least``."""

    what: str
    limit: float
    of: Callable[[Measured], list[float]]
    """A value per round, whose median counts; none if the table lacks a contender."""
    shape: str = "gpt"
    about: str = ""
    """The subject of the table, where it is not all contenders'."""
    at_least: bool = False
    unit: str = ""

    def concerns(self, table: dict[str, Any]) -> bool:
        return (table["shape"], table["accumulate"], table.get("about", "")) == (self.shape, 1, self.about)

    def holds(self, values: list[float]) -> bool:
        value = statistics.median(values)
        return value >= self.limit if self.at_least else value <= self.limit


def rounds(measured: Measured, *names: str) -> list[tuple[dict[str, Any], ...]]:
    """The results of these contenders in each round in which all of them ran."""
    return [tuple(ran[name] for name in names) for ran in measured["rounds"] if all(name in ran for name in names)]


def _ratio(name: str, anchor: str, key: str) -> Callable[[Measured], list[float]]:
    return lambda measured: [mine[key] / other[key] for mine, other in rounds(measured, name, anchor)]


def _above_engine(stage: int) -> Callable[[Measured], list[float]]:
    """Percent that strategy and Trainer together add to the engine in a bare loop."""
    ratio = _ratio(f"zero{stage}", f"engine-{stage}", "step_seconds")
    return lambda measured: [(each - 1) * 100 for each in ratio(measured)]


def _own_share(stage: int) -> Callable[[Measured], list[float]]:
    """Milliseconds that the strategy adds to its engine, the Trainer's own left out: it adds those to DDP as well."""

    def of(measured: Measured) -> list[float]:
        names = f"zero{stage}", f"engine-{stage}", "lightning-ddp", "ddp"
        steps = [[run["step_seconds"] for run in each] for each in rounds(measured, *names)]
        return [((ours - engine) - (lightning - bare)) * 1e3 for ours, engine, lightning, bare in steps]

    return of


def _start_up(stage: int) -> Callable[[Measured], list[float]]:
    """Ratio to the median of Lightning's DDP, over all rounds: each process starts while no other runs."""

    def of(measured: Measured) -> list[float]:
        ours, theirs = (
            [run["start_up_seconds"] for (run,) in rounds(measured, name)] for name in (f"zero{stage}", "lightning-ddp")
        )
        return [each / statistics.median(theirs) for each in ours] if theirs else []

    return of


BOUNDS = [
    *(
        bound
        for stage, to_ddp in ((1, 1.20), (2, 1.20), (3, 1.35))
        for bound in (
            Bound(f"stage {stage}: step to DDP's", to_ddp, _ratio(f"zero{stage}", "ddp", "step_seconds")),
            Bound(
                f"stage {stage}: strategy and Trainer on top of the engine alone",
                2,
                _above_engine(stage),
                unit=" %",
            ),
            Bound(
                f"stage {stage}: the strategy's own share, without the Trainer's",
                1.0,
                _own_share(stage),
                shape="tiny",
                unit=" ms",
            ),
            Bound(
                f"stage {stage}: clipping and the optimizer's step, `fully_shard`'s to ours",
                3,
                _ratio("fully_shard", f"engine-{stage}", "update_seconds"),
                shape="many",
                at_least=True,
            ),
        )
    ),
    *(
        bound
        for stage in (2, 3)
        for bound in (
            Bound(
                f"stage {stage}: step to `fully_shard`'s", 0.80, _ratio(f"zero{stage}", "fully_shard", "step_seconds")
            ),
            Bound(
                f"stage {stage}: peak memory to `fully_shard`'s",
                1.2,
                _ratio(f"zero{stage}", "fully_shard", "peak_bytes"),
            ),
        )
    ),
    *(
        Bound(
            f"stage {stage}, compiled: step to compiled `fully_shard`'s",
            0.80,
            _ratio(f"zero{stage}-compiled", "fully_shard-compiled", "step_seconds"),
            shape=shape,
            about="compiled",
        )
        for stage in (1, 2, 3)
        for shape in ("gpt", "many")
    ),
    *(
        Bound(
            f"stage {stage}, automatic units: step to DDP's",
            limit,
            _ratio(f"zero{stage}-units", "lightning-ddp", "step_seconds"),
            shape="many",
            about="units",
        )
        for stage, limit in ((1, 1.5), (2, 1.5), (3, 1.7))
    ),
    *(
        Bound(
            f"stage {stage}: step to `fully_shard`'s",
            0.8,
            _ratio(f"zero{stage}", "fully_shard", "step_seconds"),
            shape="tiny",
        )
        for stage in (1, 2, 3)
    ),
    *(Bound(f"stage {stage}: start-up to Lightning's DDP", 1.1, _start_up(stage)) for stage in (1, 2, 3)),
    Bound(
        "`import lightning_zero` on top of `import lightning.pytorch`",
        50,
        lambda measured: [measured["imports"]["lightning_zero_adds"] * 1e3],
        unit=" ms",
    ),
]


class _Asked(dict[str, Any]):
    """A run of all contenders, whose figures are some numbers; notes whose are asked for."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> dict[str, float]:
        self[name] = defaultdict(count(1).__next__)
        return self[name]


def contenders(table: dict[str, Any]) -> set[str]:
    """The contenders that the bounds of ``table`` need."""
    asked = _Asked()
    for bound in BOUNDS:
        if bound.concerns(table):
            bound.of({"table": table, "imports": defaultdict(float), "rounds": [asked]})
    return set(asked)


def judged(stored: list[Measured]) -> Iterator[tuple[Bound, Measured, list[float]]]:
    """Every bound with every table it concerns and its values there, where the table has any."""
    for bound in sorted(BOUNDS, key=lambda each: each.what):
        for measured in stored:
            if bound.concerns(measured["table"]):
                values = bound.of(measured)
                if values:
                    yield bound, measured, values


def render(stored: list[Measured]) -> str:
    """The judgement as a Markdown table."""
    lines = ["| | model, ranks | bound | measured | |", "|---|---|---|---|---|"]
    for bound, measured, values in judged(stored):
        table = measured["table"]
        sign = "≥" if bound.at_least else "≤"
        lines.append(
            f"| {bound.what} | {table['shape']}, {table['ranks']} | {sign} {bound.limit:g}{bound.unit}"
            f" | {with_range(values)}{bound.unit} | {'met' if bound.holds(values) else '**not met**'} |"
        )
    return "\n".join(lines)


def with_range(values: list[float]) -> str:
    """The median and, of several, the smallest and the largest."""
    spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"
