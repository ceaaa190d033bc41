"""Makes the table of docs/reliability.md: how runs with injected faults or diverged ranks end.

    python benchmarks/faults.py docs/reliability.md    # replaces the table in that page, about 4 minutes

It uses two CPU ranks. ``tests/helpers/faults.py`` defines the faults. The exit status is 1 if a run left something
behind or took too long.
"""

from __future__ import annotations

import platform
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.faults import FAULTS, HANG_SECONDS, break_run

BEGIN, END = "<!-- table: python benchmarks/faults.py docs/reliability.md -->", "<!-- end of table -->"


def main() -> int:
    page = Path(sys.argv[1])
    rows = ["| what happens | exit code | seconds to the end of the last process | last checkpoint | left behind |"]
    rows.append("|---|---|---|---|---|")
    failed = False
    for name, fault in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            outcome = break_run(name, Path(folder))
        wrong = outcome.seconds > 30 + (HANG_SECONDS if fault.hangs else 0) or outcome.left_behind
        failed |= bool(wrong) or fault.breaks == (outcome.exit_code == 0)
        waited = f" (of these `timeout_seconds` = {HANG_SECONDS:.0f})" if fault.hangs else ""
        left = ", ".join(outcome.left_behind) or "nothing"
        step = f"complete, step {outcome.checkpoint_step}"
        rows.append(f"| {fault.text} | {outcome.exit_code} | {outcome.seconds:.1f}{waited} | {step} | {left} |")
        print(rows[-1], file=sys.stderr, flush=True)
    made = f"{BEGIN}\n{chr(10).join(rows)}\n\n{platform.system()}, Python {platform.python_version()}, 2 ranks.\n{END}"
    text = page.read_text(encoding="utf-8")
    page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: made, text, flags=re.DOTALL), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
