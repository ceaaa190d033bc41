"""Runs commands as a user would, each with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "data.block_size=32",
    "data.max_characters=20000",
    "data.vocab_size=300",
    "model.width=32",
    "model.num_layers=2",
    "trainer.max_steps=3",
)
"""Makes the main job a matter of seconds."""


def run(*command: str, cwd: Path, timeout_seconds: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Python with ``command`` as its arguments, in ``cwd``; output and errors come back joined."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def console_script() -> str:
    return str(Path(sys.executable).parent / "lightning-zero")
