"""What the command line refuses before anything heavy is imported, and what it lets pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_zero.app.arguments import GROUPS, mistake
from lightning_zero.app.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices=2"], "write trainer.devices=2"),
        (["--max-epochs", "3"], "write trainer.max_epochs=3"),
        (["--strategy", "zero2"], "write strategy=zero2"),
        (["--stage=2"], "write strategy.stage=2"),
        (["--offload=cpu"], "write strategy/offload=cpu"),
        (["--model.width=3"], "write model.width=3"),
        (["--config", "conf/x.yaml"], "--config-dir conf --config-name x"),
        (["--config=conf/x.yaml"], "--config-dir conf --config-name x"),
        (["--hlep"], "did you mean --help?"),
        (["--devices", "trainer.max_steps=3"], "write trainer.devices=VALUE"),
        (["strategy=zer3"], "did you mean strategy=zero3?"),
        (["callbacks=[default,early_stoping]"], "did you mean callbacks=early_stopping?"),
        (["strategy/offload=cpus"], "did you mean strategy/offload=cpu?"),
        (["strategi=zero3"], "did you mean strategy=zero3?"),
        (["devices=2"], "write trainer.devices=2."),
        (["stage=2"], "write strategy.stage=2."),
        (["resume=last.ckpt"], "write ckpt_path=last.ckpt."),
        (["models.width=3"], "did you mean model.width=3?"),
        (["+nothing_like_it=3"], "write trainer.nothing_like_it=3."),
        (["strategy.stagee=3"], "did you mean strategy.stage?"),
        (["strategy.offload=cpu"], "use strategy/offload=cpu."),
        (["strategy.activation_checkpointing=[A,B]"], "by name, strategy.activation_checkpointing.NAME=VALUE."),
        (["trainer.strategy=zero3"], "use strategy=zero3."),
        (["plan.headrom=3"], "did you mean plan.headroom?"),
    ],
)
def test_mistakes_are_said_in_hydras_form(arguments, said):
    message = mistake(arguments)
    assert message is not None
    assert said in message


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trainer.devices=2", "strategy=zero3", "+model.config.n_layer=2", "~callbacks.progress"],
        ["-m", "strategy=ddp,zero1", "hydra/sweeper=optuna", "debug=null"],
        ["--config-dir", "conf", "model=mine"],
        ["--cfg", "job", "--resolve"],
        ["--info", "defaults-tree"],
        ["--experimental-rerun", "job.pickle"],
        ["hydra.searchpath=[file:///x]", "model=mine"],
        ["trainer.limit_train_batches=-1", "model._target_=a.B", "strategy=zero3_offload"],
        ["callbacks=[default,zero_monitor]", "logger=csv"],
        ["strategy.compile={target:units,backend:eager}", "strategy.offload.target=cpu"],
        ["-cd", "--odd-folder"],
    ],
)
def test_what_may_be_right_passes(arguments):
    assert mistake(arguments) is None


def test_a_flag_of_the_commands_own_passes():
    assert mistake(["--dry-run"], own_flags=["--dry-run"]) is None
    assert "--dry-run" in str(mistake(["--dry-run"]))


def test_every_flag_of_hydras_is_known():
    from hydra._internal.utils import get_args_parser

    for action in get_args_parser()._actions:
        for flag in action.option_strings:
            assert mistake([flag, "job"]) is None, flag


def test_every_choice_is_found():
    for file in GROUPS.rglob("*.yaml"):
        group = str(file.parent.relative_to(GROUPS))
        assert mistake([f"{group}={file.stem}"] if group != "." else []) is None


COMMANDS = [
    ["--help"],
    ["--version"],
    ["fti"],
    ["convert", "--help"],
    ["fit", "--help"],
    ["fit", "--devices=2"],
    ["fit", "strategy=zer3"],
    ["fit", "--config", "x.yaml"],
]


@pytest.mark.parametrize(("number", "arguments"), enumerate(COMMANDS), ids=str)
def test_answers_without_torch_and_lightning(number, arguments):
    """Half a second against three: these imports are what it would wait for."""
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
