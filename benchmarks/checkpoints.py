"""Measures the tables of docs/checkpoints.md: `make checkpoints`.

python benchmarks/checkpoints.py moves     every strategy, world size and form to every other (half an hour)
python benchmarks/checkpoints.py groups    the same from and to shards in groups, HSDP (five minutes)
python benchmarks/checkpoints.py memory    peak memory of each rank while 1 GB of parameters is saved and resumed

python benchmarks/checkpoints.py moves zero3 ddp    only moves between those named; prints and writes no table

Differences beyond their tolerance are listed on stderr at the end. Then no table is written, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers import moves, saving  # noqa: E402
from tests.helpers.ranks import RankPool  # noqa: E402

DOC = ROOT / "docs" / "checkpoints.md"


# -- moves -----------------------------------------------------------------------------------------------------------


def table_of_moves() -> str:
    """Largest difference from the uninterrupted run, per strategy that saved (rows) and that resumed (columns)."""
    number, worst = _worst(moves.all_moves())
    lines = [
        "| saved by \\ resumed by | " + " | ".join(moves.STRATEGIES) + " |",
        "|---" * (len(moves.STRATEGIES) + 1) + "|",
        *(
            f"| {source} | " + " | ".join(f"{worst[source, target]:.0%}" for target in moves.STRATEGIES) + " |"
            for source in moves.STRATEGIES
        ),
    ]
    tolerances = ", ".join(f"{kind} {value:.0e}" for kind, value in moves.TOLERANCES.items())
    return "\n".join(lines) + (
        f"\n\n{number} moves: each cell covers world sizes 1 to 4 and both forms on either side, with the moments"
        f" ({', '.join(moves.STOPS)}) and the modules in turn. The figure is the largest difference of the next"
        f" {moves.STEPS_AFTER} losses and of the final weights from the uninterrupted one-process DDP run, as a part of"
        f" the tolerance (relative: {tolerances})."
    )


def table_of_groups() -> str:
    """Same as :func:`table_of_moves`, from and to shards in groups (HSDP)."""
    number, worst = _worst(moves.moves_of_groups())
    first, *_ = names = list(moves.GROUPS)

    def row(name: str, cells: Iterable[tuple[str, str]]) -> str:
        return f"| {name} | " + " | ".join(f"{worst[cell]:.0%}" for cell in cells) + " |"

    lines = [
        f"| saved by \\ resumed by | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
        *(row(source, ((source, target) for target in names)) for source in names),
        "",
        f"| | {' | '.join(moves.STRATEGIES)} |",
        "|---" * (len(moves.STRATEGIES) + 1) + "|",
        row(f"saved by {first}, resumed by", ((first, other) for other in moves.STRATEGIES)),
        row(f"resumed by {first}, saved by", ((other, first) for other in moves.STRATEGIES)),
    ]
    return "\n".join(lines) + f"\n\n{number} moves, as above."


def _worst(walked: Iterable[moves.Move]) -> tuple[int, dict[tuple[str, str], float]]:
    """Number of moves, and the largest difference per source and target, as a fraction of its tolerance."""
    worst: dict[tuple[str, str], float] = defaultdict(float)
    beyond: list[str] = []
    number = 0
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        travel = moves.Travel(pool.run, Path(folder))
        for move in walked:
            number += 1
            try:
                difference = travel.difference(move)
            except Exception as error:  # of a rank, or of the comparison
                said, scaled = f"failed: {error}", float("inf")
            else:
                said, scaled = f"{difference:.1e}", difference / moves.TOLERANCES[move.kind]
            if scaled > 1:
                beyond.append(f"{move}: {said}")
            worst[move.source, move.target] = max(worst[move.source, move.target], scaled)
            print(f"{number} {move}: {said}{' is too much' * (scaled > 1)}", file=sys.stderr, flush=True)
    if beyond:
        raise SystemExit("\n".join([f"{len(beyond)} of {number} moves are beyond their tolerance:", *beyond]))
    return number, worst


# -- memory ----------------------------------------------------------------------------------------------------------


def table_of_memory() -> str:
    rows, beyond = [], []
    for form in moves.FORMS:
        with RankPool() as pool:  # fresh processes: allocators keep what earlier runs needed
            m = saving.measure(form, pool.run, width=4096, num_units=16)
        beyond += [f"{form}, rank {i}: {m.saving[i]:.0f} MiB, bound {m.bounds[i]:.0f}" for i in m.beyond]
        rows += [f"| {form} | {i} | {m.saving[i]:.0f} | {m.bounds[i]:.0f} | {m.resuming[i]:.0f} |" for i in (0, 1)]
    if beyond:
        raise SystemExit("\n".join(beyond))
    lines = [
        "| `checkpoint=` | rank | MiB more while saving | bound | MiB more while resuming |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + (
        f"\n\nTwo ranks, stage 3, {m.parameters:.0f} MiB of parameters and as much momentum ({m.size:.0f} MiB of"
        f" checkpoint), units of {m.unit:.0f} MiB; anonymous host memory above what training holds, or above the whole"
        " module that `__init__` has made. Bounds: one file on rank 0 its own size and one unit, on"
        " other ranks one unit; shards one unit, and in the background a copy of the rank's own."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"moves": table_of_moves, "groups": table_of_groups, "memory": table_of_memory}
    parser.add_argument("table", choices=tables)
    parser.add_argument("strategies", nargs="*", choices=[*moves.STRATEGIES, []], help="only moves between these")
    options = parser.parse_args()
    name, chosen = options.table, options.strategies
    if chosen:
        if name != "moves":
            parser.error("strategies are chosen of moves only")
        _worst(move for move in moves.all_moves() if move.source in chosen and move.target in chosen)
        return
    table = tables[name]()
    text = DOC.read_text(encoding="utf-8")
    block = f"<!-- {name} -->\n{table}\n<!-- end of {name} -->"
    new, count = re.subn(f"<!-- {name} -->.*?<!-- end of {name} -->", lambda _: block, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{DOC} has no place for the table {name!r}")
    DOC.write_text(new, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
