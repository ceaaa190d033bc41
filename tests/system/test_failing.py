"""A run that fails shows its error once, and continues on all ranks if all have raised it alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tests.system.commands import ROOT, SMALL, run

FAULTS = str(ROOT / "tests" / "helpers" / "faults.py")


def fail(folder: Path, *words: str, script: str = FAULTS) -> tuple[int, list[str]]:
    """Exit code and lines of a run of ``tests/helpers/faults.py``."""
    env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    done = run(script, *words, fork="first", cwd=folder, **env)
    return done.returncode, done.stdout.splitlines()


def test_an_error_of_all_ranks_is_shown_once_and_saved(tmp_path):
    """Collective saves on exceptions: all ranks have raised at the same place."""
    code, lines = fail(tmp_path, "exception-all", "saves")
    text = "\n".join(lines)
    assert code == 1
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count('raise LookupError(f"rank {rank} is not well")') == 1
    assert "all ranks failed alike, rank 0 with" in text
    assert "rank 1 is not well" not in text
    (monitored,) = (tmp_path / "monitored").glob("*.ckpt")
    for path in (tmp_path / "saved" / "on_exception.ckpt", monitored):
        assert torch.load(path, weights_only=False)["global_step"] == 2


def test_deepspeeds_ranks_that_raised_alike_save_and_fit_again(tmp_path):
    code, lines = fail(tmp_path, "exception-all", "deepspeed", "saves", "again", "same")
    assert code == 0
    assert [path.name for path in (tmp_path / "monitored").glob("*=2.ckpt")] == ["epoch=0-step=2.ckpt"]
    assert any("Resuming in mid-epoch" in line for line in lines)  # from the other one, which goes when the run is done
    _assert_fitted_again(lines)


def test_a_script_started_by_another_path_fits_again(tmp_path):
    """Rank 0 knows its script as ``<folder>/../faults.py``, rank 1, which does not begin it anew, by the path that it
    was started with. The log of rank 1 has the output of both runs, that of rank 0 the error in full."""
    shutil.copy(FAULTS, tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    code, lines = fail(folder, "exception-all", "again", "logs", script="../faults.py")
    assert code == 0
    logs = [(folder / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    _assert_fitted_again([*lines, *logs[1].splitlines()])
    assert logs[0].count("LookupError: rank 0 is not well") == 1
    assert logs[1].count("trains in rank") == 2


def _assert_fitted_again(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert "CAUGHT rank 0: LookupError: rank 0" in text
    assert "CAUGHT rank 1: LookupError: rank 1" in text
    results = [line for line in lines if line.startswith("FITTED")]
    assert len(results) == 2
    assert len(set(results)) == 1  # the same weights on both


def test_an_error_of_one_rank_is_not_hidden_by_a_save(tmp_path):
    code, lines = fail(tmp_path, "exception-0", "saves", "again")
    text = "\n".join(lines)
    assert code == 1
    assert text.count("no checkpoint is saved after this error") == 1
    assert "CAUGHT rank 0: LookupError: rank 0 is not well" in text
    assert "this script cannot start another run" in text
    assert "1 of 2 ranks raised an error" in text
    assert "FITTED" not in text
    assert not list(tmp_path.glob("*/*.ckpt"))


def test_a_damaged_checkpoint_is_one_message_and_the_rest_in_a_log(tmp_path):
    (tmp_path / "x.ckpt").write_bytes(b"no checkpoint")
    words = "ckpt_path=x.ckpt", "strategy=zero3", "trainer.devices=2", *SMALL, "hydra.run.dir=job"
    done = run("fit", *words, fork="first", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    assert "x.ckpt is truncated, damaged" in done.stdout
    assert "Traceback" not in done.stdout
    assert sum(line.startswith("lightning-zero: error: ") for line in done.stdout.splitlines()) == 1
    assert "Traceback" in (tmp_path / "job" / "ranks" / "rank0.log").read_text()
