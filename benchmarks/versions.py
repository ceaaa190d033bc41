"""Runs the tests that a new release of a library may break, and writes the row of docs/versions.md.

    python benchmarks/versions.py docs/versions.md    # `make test-latest` and `make test-lowest` do it, 5 minutes

The exit status is that of the tests.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "lightning", "torchmetrics", "deepspeed", "hydra-core")
TESTS = [*sorted(map(str, ROOT.glob("tests/unit/test_*private*.py"))), "tests/distributed/test_precision.py"]
SAMPLE = ["tests/distributed/test_parity.py", "-k", "not test_parity or accumulation or gan or adafactor or transports"]
"""Each stage on each engine, both transports, reductions that wait, come late and follow one another."""


def main() -> int:
    page = Path(sys.argv[1])
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *TESTS, *SAMPLE]
    result = subprocess.run(tests, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(result.stdout)
    *_, outcome = re.findall(r"^=* ?(\d+ .*?)(?:, \d+ warnings?)? in [\d.]+s", result.stdout, re.MULTILINE)
    row = f"| {' | '.join(map(version, LIBRARIES))} | {platform.python_version()} | {outcome} |"
    lines = page.read_text(encoding="utf-8").splitlines()
    torch, _, _ = version("torch").partition("+")
    page.write_text("\n".join([*(line for line in lines if f"| {torch}" not in line), row, ""]), encoding="utf-8")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
