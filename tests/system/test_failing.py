"""A run that fails shows its error once, and no other run follows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.commands import ROOT, SMALL, run

FAULTS = str(ROOT / "tests" / "helpers" / "faults.py")


def fail(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Exit code and lines of a run of ``tests/helpers/faults.py``."""
    env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    done = run(FAULTS, *words, fork="first", cwd=folder, **env)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("words", [(), ("logs",)])
def test_an_error_of_all_ranks_is_shown_once(words, tmp_path):
    code, lines = fail(tmp_path, "exception-all", *words)
    text = "\n".join(lines)
    assert code == 1
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count("LookupError: no rank is well") == 1
    logs = [path.read_text() for path in tmp_path.glob("logs/rank*.log")]
    assert [log.count("LookupError: no rank is well") for log in logs] == [1 for word in words for rank in (0, 1)]


def test_an_error_of_one_rank_is_not_hidden_by_a_save(tmp_path):
    code, lines = fail(tmp_path, "exception-0", "saves", "again")
    text = "\n".join(lines)
    assert code == 1
    assert "no checkpoint is saved after this error" in text
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
