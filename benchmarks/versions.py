"""Runs the tests that a new release of a library may break, and writes the row of docs/versions.md.

    python benchmarks/versions.py docs/versions.md    # `make test-latest` and `make test-lowest` do it, 5 minutes

The exit status is that of the tests, then that of `lightning-zero check`.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from lightning_zero.engines.fsdp2.private import FULLY_SHARD
from lightning_zero.private.torch import TORCH

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "lightning", "torchmetrics", "deepspeed", "hydra-core")
HEAD = "| torch | lightning | torchmetrics | deepspeed | hydra-core | Python | private parts of torch | tests |"
TESTS = [
    *("tests/distributed/test_parity.py", "tests/distributed/test_parity_of_uses.py"),
    *("tests/distributed/test_precision.py", "tests/unit/test_private.py", "tests/unit/test_private_check.py"),
]
"""Each kind of module trains through the private parts that it needs, and its results are compared with DDP's."""


def main() -> int:
    page = Path(sys.argv[1])
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *TESTS]
    result = subprocess.run(tests, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(result.stdout)
    *_, outcome = re.findall(r"^=* ?(\d+ .*?)(?:, \d+ warnings?)? in [\d.]+s", result.stdout, re.MULTILINE)
    parts = len(TORCH.needed) + len(FULLY_SHARD.needed)
    row = f"| {' | '.join(map(version, LIBRARIES))} | {platform.python_version()} | {parts} | {outcome} |"
    torch, _, _ = version("torch").partition("+")
    lines = [each for each in page.read_text(encoding="utf-8").splitlines() if not each.startswith(f"| {torch}")]
    lines.insert(lines.index(HEAD) + 2, row)
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        check = [sys.executable, "-m", "lightning_zero", "check", "--out", folder]
        return result.returncode or subprocess.run(check, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
