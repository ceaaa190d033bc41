"""The table of docs/parity.md: how far each kind of module is from DDP under both engines at stages 1, 2 and 3.

    python benchmarks/parity.py > docs/parity.md            # every kind, 2 ranks, about 10 minutes
    python benchmarks/parity.py --ranks 3 adam gan          # some kinds, other ranks

Every rank starts from another seed (rank 0's values are everybody's), every repeated block is a unit. A line of
progress per kind goes to stderr; the exit status is 1 if any cell is beyond its tolerance.
"""

from __future__ import annotations

import argparse
import platform
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import PAGE, section_of  # the script beside this one, which writes the second table

from tests.helpers import zoo
from tests.helpers.ranks import RankError, RankPool, outcome
from tests.helpers.zoo import KINDS

STAGES = (1, 2, 3)
ENGINES = ("fsdp2", "deepspeed")
COLUMNS = [(engine, stage) for engine in ENGINES for stage in STAGES]
TIMEOUT_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kinds", nargs="*", choices=[[], *KINDS], metavar="KIND", help="kinds to compare (default: all)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    options = parser.parse_args()
    names = options.kinds or list(KINDS)

    failed: list[str] = []
    rows = []
    with RankPool() as pool:
        for number, name in enumerate(names, 1):
            cells = _row(pool, name, options.ranks)
            failed += [f"{name} at stage {s}, {e}" for (e, s), cell in zip(COLUMNS, cells, strict=True) if "**" in cell]
            rows.append((name, *cells, f"{KINDS[name].tolerance:.0e}", KINDS[name].reason))
            print(f"{number}/{len(names)} {name}: {', '.join(cells)}", file=sys.stderr, flush=True)
    _print_page(rows, options.ranks)
    for failure in failed:
        print(f"beyond its tolerance: {failure}", file=sys.stderr)
    return int(bool(failed))


def _row(pool: RankPool, name: str, world_size: int) -> list[str]:
    """One cell per engine and stage: ``losses / weights``, or what is refused instead."""
    kind = KINDS[name]
    if kind.raises and world_size > 1:
        answers = [
            pool.run(outcome, zoo.train, name, strategy, True, world_size=world_size)
            for strategy in (kind.reference, *(_strategy(*column) for column in COLUMNS))
        ]
        as_ddp = [all(re.search(kind.raises, text) for _, text in answer) for answer in answers]
        return ["refused, as under DDP" if same else "**not refused as under DDP**" for same in as_ddp[1:]]
    reference = pool.run(zoo.train, name, kind.reference, True, world_size=world_size, timeout_seconds=TIMEOUT_SECONDS)
    cells = []
    for engine, stage in COLUMNS:
        if engine == "deepspeed" and not kind.on_deepspeed:
            cells.append("not tried")
            continue
        strategy = _strategy(engine, stage)
        unsupported = kind.unsupported_units if engine == "fsdp2" else kind.unsupported_deepspeed
        refusal = kind.refusal(engine, stage) or (unsupported.get(stage) if world_size > 1 else None)
        try:
            if refusal:
                answer = pool.run(
                    outcome, zoo.train, name, strategy, True, world_size=world_size, timeout_seconds=TIMEOUT_SECONDS
                )
                errors = {error for error, text in answer if re.search(refusal, text)}
                said = len(errors) == 1 and all(re.search(refusal, text) for _, text in answer)
                note = "¹" if "some ranks only" in refusal else "²"
                cells.append(f"{errors.pop()} {note}" if said else "**not refused**")
                continue
            results = pool.run(zoo.train, name, strategy, True, world_size=world_size, timeout_seconds=TIMEOUT_SECONDS)
        except RankError as error:
            cells.append(f"**{error.failures[0].kind}**")
            continue
        found = zoo.difference(results, reference)
        cell = f"{_short(found.losses)} / {_short(found.weights)}"
        cells.append(cell if found.largest <= kind.tolerance else f"**{cell}**")
    return cells


def _strategy(engine: str, stage: int) -> dict[str, Any]:
    return {"stage": stage, "engine": engine, **(zoo.BLOCKS if engine == "fsdp2" else {})}


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def _print_page(rows: list[tuple[str, ...]], world_size: int) -> None:
    import lightning
    import torch

    import lightning_zero

    command = shlex.join(["python", "benchmarks/parity.py", *sys.argv[1:]])
    print(
        f"""# Parity with DDP

Largest relative difference of losses / weights against Lightning's `ddp`, step by step and on every rank, after two
epochs or more on {world_size} CPU processes with gloo in float32. Every rank starts from a different seed; every
repeated block is a shard unit of `fsdp2`. `0` is bit for bit. **Bold** is beyond the tolerance (there should be none).
Logged metrics are held to the same tolerance.

Made by `{command}` with lightning_zero {lightning_zero.__version__}, torch {torch.__version__},
deepspeed {version("deepspeed")}, lightning {lightning.__version__}, Python {platform.python_version()}.
The kinds are the classes of `tests/helpers/zoo.py`; `tests/distributed/test_parity.py` holds them to it, also on
other numbers of ranks.

| kind | fsdp2, stage 1 | 2 | 3 | deepspeed, stage 1 | 2 | 3 | tolerance |
|---|---|---|---|---|---|---|---|"""
    )
    for name, *cells, tolerance, _ in rows:
        print(f"| {name.replace('_', ' ')} | {' | '.join(cells)} | {tolerance} |")
    print(
        "\n¹ Stage 3 gathers a unit when it runs, so one that only some ranks run cannot be gathered; the error names"
        "\nthe units and what to set instead (`units=`, or stage 2). As one unit these kinds train as under DDP. The"
        "\nunits of `deepspeed` are the smallest modules."
        "\n\n² Refused by name: before the first step, or where user code does it (a transform of `torch.func`,"
        " gradients\nread in `LightningModule.backward`, writes that would be lost). The error says what to do"
        " instead.\n"
        "\n## Why the tolerances are not 0\n"
    )
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, *_, tolerance, reason in rows:
        reasons.setdefault((tolerance, reason), []).append(name)
    for (tolerance, reason), names in reasons.items():
        who = "all others" if len(names) > 20 else ", ".join(n.replace("_", " ") for n in names)
        print(f"- {tolerance}: {reason} ({who}).")
    print(f"\n{section_of(PAGE.read_text(encoding='utf-8'))}", end="")


if __name__ == "__main__":
    sys.exit(main())
