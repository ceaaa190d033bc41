"""Runs pytest, then each test that failed once more, in a fresh process.

    python tests/gate.py [PYTEST ARGUMENTS]

A test that passes the second time does not make the run red: the last lines name it under ``flaky``, and its first
traceback stays in ``.pytest_cache/gate/``. Whoever sees a test there twice mends or deletes it. No test is repeated in
the process that it failed in, whose state may be the reason for either outcome.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".pytest_cache" / "gate"
PYTEST = (sys.executable, "-m", "pytest", "-o", f"cache_dir={KEPT / 'cache'}")
LIMIT_SECONDS = 2700.0
"""For the whole first run: each test has a limit of its own, so this one is for pytest itself."""
MOST_REPEATED = 8
"""More failures than these are no accident."""
FAILED = 1
"""pytest's exit status where tests failed; all others (no test, wrong arguments, interrupted) end the run."""


def main(arguments: list[str]) -> int:
    KEPT.mkdir(parents=True, exist_ok=True)
    log = KEPT / "first.log"
    (KEPT / "cache" / "v" / "cache" / "lastfailed").unlink(missing_ok=True)
    status = _run([*PYTEST, "-n", "2", "--dist", "loadfile", *arguments], log)
    if status != FAILED:
        return status
    failed = _failed()
    if not failed or len(failed) > MOST_REPEATED:
        return status
    flaky = [name for name in failed if _run([*PYTEST, name], KEPT / "second.log") == 0]
    for name in failed:
        print(f"{'flaky' if name in flaky else 'failed twice'}: {name} (first traceback: {log})")
    return 0 if flaky == failed else FAILED


def _failed() -> list[str]:
    """IDs of the tests, or files that could not be imported, that the last run has left as failed."""
    file = KEPT / "cache" / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


def _run(command: list[str], log: Path) -> int:
    """Exit status of ``command``, whose output goes to ``log`` and, as it comes, to this process's."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert process.stdout is not None
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
        try:
            while part := process.stdout.read1():
                file.write(part)
                sys.stdout.buffer.write(part)
                sys.stdout.flush()
            return process.wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            if process.poll() is None:  # Ctrl-C
                os.killpg(process.pid, signal.SIGINT)
                process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
