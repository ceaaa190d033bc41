"""The first word of the command line, and what is answered before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_zero.app.cli import main

COMMANDS = [
    ["--help"],
    ["--version"],
    ["fti"],
    ["convert", "--help"],
]


@pytest.mark.parametrize(("number", "arguments"), enumerate(COMMANDS), ids=str)
def test_answers_without_torch_and_lightning(number, arguments):
    """These imports take seconds."""
    how = "runpy.run_module('lightning_zero', run_name='__main__', alter_sys=True)"
    if number % 2:
        how = "importlib.import_module('lightning_zero.app.cli').main()"
    code = f"""
import atexit, importlib, runpy, sys
sys.argv = ["lightning-zero", *{arguments!r}]
heavy = ("torch", "lightning", "hydra", "omegaconf", "numpy", "deepspeed")
atexit.register(lambda: print("heavy:", [name for name in heavy if name in sys.modules]))
{how}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if {"--help", "--version"} & set(arguments) else 2)
    assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("fti", "fti: did you mean fit?"),
        ("docter", "docter: did you mean doctor?"),
        ("strategy=zero2", "the command comes first: lightning-zero fit strategy=zero2"),
        ("zzz", "invalid choice: 'zzz'"),
    ],
)
def test_a_first_word_that_is_no_command(word, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-zero", word])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err
