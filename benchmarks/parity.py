"""Makes the table of docs/parity.md: the difference from DDP of each kind of module, on both engines at stages 1 to 3.

    python benchmarks/parity.py > new.md                    # every kind, 2 ranks, about 10 minutes: docs/parity.md
    python benchmarks/parity.py --keep adam gan > new.md    # some kinds; all other rows are those of docs/parity.md
    python benchmarks/parity.py --ranks 3 adam gan          # some kinds, other ranks
    python benchmarks/parity.py --ranks 4 --shard-size 2 > docs/hsdp.md     # shards in groups; --keep as above

Every rank starts from a different seed, because rank 0's values must reach all ranks. Every repeated block is a unit.
Kinds from a package that is not installed (``make models``) are skipped with a message and keep their rows. Progress
goes to stderr. The exit status is 1 if any cell exceeds its tolerance.
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

from benchmarks.models import BEGIN, PAGE, section_of  # which writes the second table
from tests.helpers import held_packages, zoo
from tests.helpers.held_packages import PACKAGE_KINDS, PACKAGED, missing
from tests.helpers.models import version_of
from tests.helpers.ranks import RankError, RankPool, outcome
from tests.helpers.zoo import KINDS

ALL = {**KINDS, **PACKAGE_KINDS}
STAGES = (1, 2, 3)
ENGINES = ("fsdp2", "deepspeed")
TIMEOUT_SECONDS = 120.0
GROUPS_PAGE = PAGE.with_name("hsdp.md")
SHAPES = {PAGE: [2, None], GROUPS_PAGE: [4, 2]}
"""Page -> processes, and the size of groups."""
Column = tuple[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kinds", nargs="*", choices=[[], *KINDS, *PACKAGED], metavar="KIND", help="kinds to compare (default: all)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the page's rows of all other kinds")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--shard-size", type=int, help="of groups that are replicas of each other (HSDP); fsdp2 alone")
    options = parser.parse_args()
    names = options.kinds or [*KINDS, *(() if options.shard_size else PACKAGED)]
    page = GROUPS_PAGE if options.shard_size else PAGE
    if options.keep and [options.ranks, options.shard_size] != SHAPES[page]:
        parser.error(f"--keep: the rows of {page.name} are of other ranks or another shard_size")
    engines, groups = (ENGINES[:1], {"shard_size": options.shard_size}) if options.shard_size else (ENGINES, {})
    strategies = {(engine, stage): _strategy(engine, stage) | groups for engine in engines for stage in STAGES}

    failed: list[str] = []
    rows = kept_rows(page.read_text(encoding="utf-8")) if page.exists() else {}
    rows = {name: row for name, row in rows.items() if options.keep or (name in names and name in PACKAGED)}
    with RankPool() as pool:
        for number, name in enumerate(names, 1):
            if name in PACKAGED and (package := missing(name)):
                print(f"{number}/{len(names)} {name}: skipped, {package} is not installed", file=sys.stderr, flush=True)
                continue
            cells = _row(pool, name, options.ranks, strategies)
            columns = zip(strategies, cells, strict=True)
            failed += [f"{name} at stage {s}, {e}" for (e, s), cell in columns if "**" in cell]
            versions = "".join(f" ({each} {version_of(each)})" for each in PACKAGED.get(name, ())[:1])
            rows[name] = (f"{name.replace('_', ' ')}{versions}", *cells)
            print(f"{number}/{len(names)} {name}: {', '.join(cells)}", file=sys.stderr, flush=True)
    _print_page({name: rows[name] for name in ALL if name in rows}, options.ranks, options.shard_size, options.keep)
    for failure in failed:
        print(f"beyond its tolerance: {failure}", file=sys.stderr)
    return int(bool(failed))


def _row(pool: RankPool, name: str, world_size: int, strategies: dict[Column, dict[str, Any]]) -> list[str]:
    """One cell per engine and stage: ``losses / weights``, or what is refused instead."""
    kind = ALL[name]
    train = held_packages.train if name in PACKAGED else zoo.train
    reference = pool.run(train, name, kind.reference, True, world_size=world_size, timeout_seconds=TIMEOUT_SECONDS)
    cells = []
    for (engine, stage), strategy in strategies.items():
        unsupported = kind.unsupported_units if engine == "fsdp2" else kind.unsupported_deepspeed
        refusal = kind.refusal(engine, stage) or (unsupported.get(stage) if world_size > 1 else None)
        try:
            if refusal:
                answer = pool.run(
                    outcome, train, name, strategy, True, world_size=world_size, timeout_seconds=TIMEOUT_SECONDS
                )
                errors = {error for error, text in answer if re.search(refusal, text)}
                said = len(errors) == 1 and all(re.search(refusal, text) for _, text in answer)
                note = "¹" if "some ranks only" in refusal else "²"
                cells.append(f"{errors.pop()} {note}" if said else "**not refused**")
                continue
            results = pool.run(train, name, strategy, True, world_size=world_size, timeout_seconds=TIMEOUT_SECONDS)
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


def kept_rows(page: str) -> dict[str, tuple[str, ...]]:
    """Kind -> title and cells of its row in the first table of ``page``, for kinds that are still there."""
    lines = [line.strip("| ").split(" | ") for line in page.partition(BEGIN)[0].splitlines() if line.startswith("| ")]
    found = {title.partition(" (")[0].replace(" ", "_"): (title, *cells) for title, *cells, _ in lines}
    return {name: row for name, row in found.items() if name in ALL}


def _print_page(rows: dict[str, tuple[str, ...]], world_size: int, shard_size: int | None, kept: bool) -> None:
    import lightning
    import torch

    import lightning_zero

    groups = ["--ranks", str(world_size), "--shard-size", str(shard_size)] if shard_size else []
    command = shlex.join(["python", "benchmarks/parity.py", *(groups if kept else sys.argv[1:])])
    made = f"Made by `{command}`{' (some rows later, with `--keep`)' if kept else ''}"
    tests = "`make test` trains each at stage 3\nand at one other stage or engine"
    if any(name in PACKAGED for name in rows):
        tests += "; those with a package and its version are\n`tests/helpers/held_packages.py`'s"
    title, groups_text, header = "Parity with DDP", "", "fsdp2, stage 1 | 2 | 3 | deepspeed, stage 1 | 2 | 3"
    if shard_size:
        tests = "`tests/distributed/test_hsdp.py` trains some of them"
        title, header = "Shards in groups (HSDP): parity with DDP", "stage 1 | 2 | 3"
        groups_text = (
            f"\n`shard_size={shard_size}`: each group of {shard_size} ranks shards the module; the groups are replicas"
            " of each other.\n"
        )
    print(
        f"""# {title}
{groups_text}
Each cell is the largest relative difference of losses / weights from Lightning's `ddp`, compared step by step on every
rank for at least two epochs, on {world_size} CPU processes with gloo in float32. Every rank starts from a different
seed; every repeated block is a shard unit of `fsdp2`. `0` is equal bit for bit. **Bold** exceeds the tolerance (there
should be none). Logged metrics must agree within the same tolerance.

{made} with lightning_zero {lightning_zero.__version__}, torch {torch.__version__},
deepspeed {version("deepspeed")}, lightning {lightning.__version__}, Python {platform.python_version()}.
The kinds are the classes of `tests/helpers/zoo.py`; {tests}.

| kind | {header} | tolerance |
|---{"|---" * (header.count("|") + 2)}|"""
    )
    for name, cells in rows.items():
        print(f"| {' | '.join(cells)} | {ALL[name].tolerance:.0e} |")
    print(
        "\n¹ A unit is gathered when it runs, so a unit that only some ranks run cannot be gathered. The error"
        " names\nthe units and the setting to use instead (`units=`). As a single unit these kinds train as under DDP."
        "\nOn `deepspeed`, at stage 3 alone, the units are the smallest modules; the error names stage 2."
        "\n\n² Refused by name before the first step, or at the call in user code (a transform of `torch.func`, a read"
        " of\ngradients in `LightningModule.backward`, a write that would be lost). The error says what to do instead."
        "\n"
        "\n## Why the tolerances are not 0\n"
    )
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in rows:
        reasons.setdefault((f"{ALL[name].tolerance:.0e}", ALL[name].reason), []).append(name)
    for (tolerance, reason), names in reasons.items():
        who = "all others" if len(names) > 20 else ", ".join(n.replace("_", " ") for n in names)
        print(f"- {tolerance}: {reason} ({who}).")
    if not shard_size:
        print(f"\n{section_of(PAGE.read_text(encoding='utf-8'))}", end="")


if __name__ == "__main__":
    sys.exit(main())
