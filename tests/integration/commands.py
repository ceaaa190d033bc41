"""Runs commands as a user would, each with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
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


def run_imported(*arguments: str, cwd: Path, timeout_seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """``lightning-zero`` with ``arguments`` as :func:`run` would do it, in a fork of a process that has its imports
    behind it, which take longer than all that such commands do: for those that start no other process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["hydra", "lightning.pytorch", "lightning_zero.app.cli", "lightning_zero.app.hydra_config"]
    )
    with tempfile.NamedTemporaryFile("r") as output:
        fork = context.Process(target=_main, args=(arguments, str(cwd), dict(os.environ), output.name))
        fork.start()
        fork.join(timeout_seconds)
        if fork.is_alive():
            fork.kill()
            fork.join()
            raise subprocess.TimeoutExpired(arguments, timeout_seconds, output.read())
        assert fork.exitcode is not None
        return subprocess.CompletedProcess(arguments, fork.exitcode, output.read())


def _main(arguments: tuple[str, ...], cwd: str, environment: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["lightning-zero", *arguments]
    from lightning_zero.app.cli import main

    main()


def console_script() -> str:
    return str(Path(sys.executable).parent / "lightning-zero")
