"""Makes the second table of docs/parity.md: public models and optimizers compared with DDP, by package and version.

    python benchmarks/models.py                    # every row, 2 ranks, and writes its section of docs/parity.md
    python benchmarks/models.py timm peft/LoRA     # rows whose names begin so; prints them
    python benchmarks/models.py --keep timm        # writes them, and keeps all other rows

``tests/helpers/models.py`` declares the rows. Each is a separate job in ranks that stay alive: a few steps under
``ddp`` and under each stage, from the same initial values and on the same data. A row that fails is repeated stage by
stage, so that the other cells are known. Progress goes to stderr. The exit status is 1 if any cell differs.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers import models
from tests.helpers.models import ROWS, STAGES, Row, version_of
from tests.helpers.ranks import RankError, RankPool

PAGE = Path(__file__).resolve().parents[1] / "docs" / "parity.md"
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
"""Marks of the section that this program writes and benchmarks/parity.py keeps."""
TIMEOUT_SECONDS = 60.0
WORLD_SIZE = 2
EQUAL = "equal"


@dataclass(frozen=True)
class Line:
    """One row as measured."""

    row: Row
    version: str
    cells: list[str]

    @property
    def kind(self) -> str:
        if not self.version:
            return "not installed"
        if any(cell.startswith("DDP:") for cell in self.cells):
            return "fails under DDP, too"
        if all(cell == EQUAL for cell in self.cells):
            return EQUAL
        refused = all(cell == EQUAL or cell.startswith("refused") for cell in self.cells)
        return "refused" if refused else "different"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows whose names begin so (default: all, and write)")
    parser.add_argument("--keep", action="store_true", help="write the rows named, and keep the page's other rows")
    parser.add_argument("--requirements", choices=("models", "needed"), help="print what an extra asks for, and end")
    options = parser.parse_args()
    if options.requirements:
        print(" ".join(requirements("models" if options.requirements == "models" else "models-needed")))
        return 0
    chosen = [r for key, r in ROWS.items() if not options.names or key.startswith(tuple(options.names))]
    if not chosen:
        parser.error(f"no row begins with {' or '.join(options.names)}; known packages: {', '.join(_packages())}")
    began = time.monotonic()
    lines = []
    with RankPool() as pool:
        for number, row in enumerate(chosen, 1):
            version = version_of(row.package)
            line = Line(row, version, _cells(pool, row) if version else ["not installed"] * len(STAGES))
            lines.append(line)
            print(f"{number}/{len(chosen)} {row.key} {version}: {', '.join(line.cells)}", file=sys.stderr, flush=True)
    minutes = f"in {(time.monotonic() - began) / 60:.0f} minutes"
    if options.keep:
        made = {line.row.key: line for line in lines}
        lines = [made.get(line.row.key, line) for line in kept_lines(PAGE.read_text(encoding="utf-8"), made)]
        minutes = "some rows later than others, with `--keep`"
    section = _section(lines, minutes)
    if options.names and not options.keep:
        print(section)
    else:
        write_section(section)
    return int(any(line.kind in ("different", "fails under DDP, too") for line in lines))


def requirements(extra: str) -> list[str]:
    """Requirements of the package's ``extra``, without spaces, because a shell splits ``$(...)`` at spaces."""
    return [
        each.partition(";")[0].replace(" ", "")
        for each in requires("lightning-zero") or ()
        if f'extra == "{extra}"' in each.replace("'", '"')
    ]


def _packages() -> list[str]:
    return list(dict.fromkeys(row.package for row in ROWS.values()))


def _cells(pool: RankPool, row: Row) -> list[str]:
    try:
        return _compared(pool, row, STAGES)
    except RankError:
        pass
    cells = []
    for stage in STAGES:
        try:
            cells += _compared(pool, row, (stage,))
        except RankError as error:
            said = error.failures[0].text.strip().splitlines()
            text = said[-1] if said else ""
            if " under ddp: " in error.failures[0].text:
                return [f"DDP: {error.failures[0].kind}"] * len(STAGES)
            known = error.failures[0].kind == "ValueError"
            cells.append(f"refused: {_short(text)}" if known else f"**{error.failures[0].kind}** {_short(text)}")
    return cells


def _compared(pool: RankPool, row: Row, stages: tuple[int, ...]) -> list[str]:
    by_rank = pool.run(models.compare, row.key, stages, world_size=WORLD_SIZE, timeout_seconds=TIMEOUT_SECONDS)
    largest = [max(each) for each in zip(*by_rank, strict=True)]
    return [EQUAL if value <= row.tolerance else f"**{value:.0e}**" for value in largest]


def _short(text: str) -> str:
    text = text.partition(": ")[2] or text
    text = text.replace("|", "/").replace("`", "'")
    return text if len(text) <= 90 else text[:87] + "..."


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def kept_lines(page: str, made: Collection[str]) -> list[Line]:
    """All rows in their order, as ``page`` has them; of those just ``made`` nothing is looked for."""
    found = {}
    for text in section_of(page).splitlines():
        package, _, rest = text.removeprefix("| ").partition(" | ")
        version, _, rest = rest.partition(" | ")
        name, *cells = rest.removesuffix(" |").rsplit(" | ", len(STAGES))
        found[f"{package}/{name}"] = (version.replace("–", ""), cells)
    nothing = ("", ["not installed"] * len(STAGES))
    return [Line(row, *found.get(key, nothing)) for key, row in ROWS.items() if key in found or key in made]


def _section(lines: list[Line], made: str) -> str:
    import lightning
    import torch

    import lightning_zero

    counts: dict[str, int] = {}
    for line in lines:
        counts[line.kind] = counts.get(line.kind, 0) + 1
    packages = {line.row.package for line in lines if line.version}
    text = f"""## Public models and optimizers

{len(lines)} rows over {len(packages)} packages: {", ".join(f"{n} {kind}" for kind, n in counts.items())}. Each model is
built from a tiny configuration and trained for {models.NUM_STEPS} steps on {WORLD_SIZE} CPU processes under `ddp` and
under each stage of `fsdp2`, from the same initial values and on the same data; every repeated block is a shard unit.
`equal` means that losses and weights agree within {models.TOLERANCE:.0e} of the largest element (of most rows bit for
bit); **bold** is the largest relative difference, or the error. Optimizers train one small network.

Made by `make models` with lightning_zero {lightning_zero.__version__}, torch {torch.__version__}, lightning
{lightning.__version__}, Python {platform.python_version()}, {made}.
The rows are declared in `tests/helpers/models.py`.

| package | version | what | stage 1 | 2 | 3 |
|---|---|---|---|---|---|
"""
    text += "".join(
        f"| {line.row.package} | {line.version or '–'} | {line.row.name} | {' | '.join(line.cells)} |\n"
        for line in lines
    )
    reasons = [
        f"- {line.row.package}, {line.row.name}, {line.row.tolerance:.0e}: {line.row.reason}.\n"
        for line in lines
        if line.row.reason
    ]
    return text + (f"\nRows that are compared otherwise:\n\n{''.join(reasons)}" if reasons else "")


def section_of(page: str) -> str:
    """The section that :func:`write_section` wrote into ``page``, with its marks; ``""`` if there is none."""
    begin, end = page.find(BEGIN), page.find(END)
    return page[begin : end + len(END)] + "\n" if 0 <= begin < end else ""


def write_section(section: str) -> None:
    """Replaces the second table at the end of the page."""
    page = PAGE.read_text(encoding="utf-8")
    page = page.replace(section_of(page), "").rstrip()
    PAGE.write_text(f"{page}\n\n{BEGIN}\n\n{section}\n{END}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
