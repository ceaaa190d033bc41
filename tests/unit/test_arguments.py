"""What the command line answers before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [["--version"], ["fti"], ["convert", "--help"]], ids=str)
def test_answers_without_torch_and_lightning(arguments):
    """These imports take seconds."""
    code = f"""
import atexit, runpy, sys
sys.argv = ["lightning-zero", *{arguments!r}]
heavy = ("torch", "lightning", "hydra", "omegaconf", "numpy", "deepspeed")
atexit.register(lambda: print("heavy:", [name for name in heavy if name in sys.modules]))
runpy.run_module('lightning_zero', run_name='__main__', alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if {"--help", "--version"} & set(arguments) else 2)
    assert done.stdout.splitlines()[-1] == "heavy: []"
