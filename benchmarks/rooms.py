"""Prints the lines of each file and folder of the package (see docs/architecture.md), and of the tests.

python benchmarks/rooms.py            # this tree
python benchmarks/rooms.py FOLDER     # a checkout of another version
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path


def main(root: Path) -> None:
    lines_of: Counter[str] = Counter()
    for path in (root / "lightning_zero").rglob("*.py"):
        parts = path.relative_to(root / "lightning_zero").parts
        place = "/".join(parts[:-1][:2]) or parts[0]
        lines_of[place] += _lines(path)
    for place, lines in sorted(lines_of.items()):
        print(f"{lines:7,}  {place}")
    print(f"{sum(lines for place, lines in lines_of.items() if place.startswith('engines')):7,}  engines, all")
    print(f"{lines_of.total():7,}  the package")
    print(f"{sum(map(_lines, (root / 'tests').rglob('*.py'))):7,}  tests")


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
