"""A run that fails shows its error once, and no other run follows it."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.system.commands import ROOT, SMALL, run

FAULTS = str(ROOT / "tests" / "helpers" / "faults.py")


def fail(folder: Path, *words: str, script: str = FAULTS) -> tuple[int, list[str]]:
    """Exit code and lines of a run of ``tests/helpers/faults.py``."""
    env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    done = run(script, *words, fork="first", cwd=folder, **env)
    return done.returncode, done.stdout.splitlines()


def test_an_error_of_all_ranks_is_shown_once_by_rank_0(tmp_path):
    """Rank 0 knows its script as ``<folder>/../faults.py``, rank 1 by the path that it was started with."""
    shutil.copy(FAULTS, tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    code, lines = fail(folder, "exception-all", "logs", script="../faults.py")
    text = "\n".join(lines)
    assert code == 1
    assert text.count("Traceback (most recent call last)") == 1
    assert "rank 0 failed with" in text
    assert "rank 1 is not well" not in text
    logs = [(folder / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert [log.count(f"LookupError: rank {rank} is not well") for rank, log in enumerate(logs)] == [1, 1]


def test_an_error_of_one_rank_is_not_hidden_by_a_save(tmp_path):
    code, lines = fail(tmp_path, "exception-0", "saves", "again")
    text = "\n".join(lines)
    assert code == 1
    assert text.count("no checkpoint is saved after this error") == 1
    assert "CAUGHT rank 0: LookupError: rank 0 is not well" in text
    assert "this script cannot start another run" in text
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
