"""A run that fails says so once, in a few lines, and what ranks did alike they survive together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.commands import ROOT, SMALL, run

pytestmark = pytest.mark.rest

FULL = ("ddp", "deepspeed1")
FAILING = str(ROOT / "tests" / "helpers" / "failing.py")


def fail(folder: Path, *words: str, script: str = FAILING, **env: str) -> tuple[int, list[str]]:
    """Exit code and lines of a run of ``tests/helpers/failing.py``, without what Lightning says at every start."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_the_traceback_of_one_rank_is_shown_once(tmp_path):
    code, lines = fail(tmp_path, "1", "3")
    text = "\n".join(lines)
    assert code == 1, text
    assert len(lines) <= 40, text
    assert sum("LookupError: rank 1 is not well" in line for line in lines) == 2, text  # above the traceback, and below
    assert sum("Traceback (most recent call last)" in line for line in lines) == 1, text
    above = next(line for line in lines if "LookupError" in line)
    assert re.search(r"lightning_zero: rank 1 \(process \d+\) failed: LookupError", above)
    assert sum("in training_step" in line for line in lines) == 1, text
    assert "rank 0 has ended because of that" in text


@pytest.mark.parametrize("stage", ["3", "deepspeed3", *(pytest.param(s, marks=pytest.mark.full) for s in FULL)])
def test_an_error_of_all_ranks_is_shown_once_and_saved(stage, tmp_path):
    """Collective saves on exceptions: all ranks have raised at the same place."""
    code, lines = fail(tmp_path, "all", stage, "saves")
    text = "\n".join(lines)
    assert code == 1, text
    assert len(lines) <= 40, text
    assert sum("Traceback (most recent call last)" in line for line in lines) == 1, text
    assert "all ranks failed alike, rank 0 with" in text
    assert "rank 1 is not well" not in text
    for path in (tmp_path / "saved" / "on_exception.ckpt", *(tmp_path / "monitored").glob("*.ckpt")):
        assert torch.load(path, weights_only=False)["global_step"] == 2
    assert len(list((tmp_path / "monitored").glob("*.ckpt"))) == 1


def test_an_error_of_one_rank_is_not_hidden_by_a_save(tmp_path):
    code, lines = fail(tmp_path, "0", "2", "saves", "again")
    text = "\n".join(lines)
    assert code == 1, text
    assert sum("no checkpoint is saved after this error" in line for line in lines) == 1, text
    assert "CAUGHT rank 0: LookupError: rank 0 is not well" in text
    assert "another run in this script is not possible" in text
    assert "rank 1 did not raise it" in text
    assert "FITTED" not in text
    assert not list(tmp_path.glob("*/*.ckpt"))


@pytest.mark.parametrize(
    "words",
    [
        ("3",),
        ("3", "same"),
        ("deepspeed3", "same"),
        pytest.param(("1", "same"), marks=pytest.mark.full),
        pytest.param(("deepspeed2",), marks=pytest.mark.full),
        pytest.param(("ddp",), marks=pytest.mark.full),
    ],
)
def test_ranks_that_raised_alike_fit_again(words, tmp_path):
    """As after out-of-memory with a smaller batch: rank 1 goes on in the script, it does not begin it anew."""
    code, lines = fail(tmp_path, "all", words[0], "again", *words[1:])
    text = "\n".join(lines)
    assert code == 0, text
    assert "CAUGHT rank 0: LookupError: rank 0" in text
    assert "CAUGHT rank 1: LookupError: rank 1" in text
    results = {line.split("rank ")[1][2:] for line in lines if line.startswith("FITTED second")}
    assert len(results) == 1, text  # the same weights on both
    assert "FITTED first" not in text


def test_a_script_started_by_another_path_fits_again(tmp_path):
    """Rank 0 knows its script as ``<folder>/../failing.py``, the others by the path that they were started with."""
    shutil.copy(FAILING, tmp_path)
    (tmp_path / "folder").mkdir()
    code, lines = fail(tmp_path / "folder", "all", "3", "again", script="../failing.py")
    text = "\n".join(lines)
    assert code == 0, text
    assert sum(line.startswith("FITTED second") for line in lines) == 2, text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_told_with_its_memory(rank, tmp_path):
    code, lines = fail(tmp_path, f"kill{rank}", "3")
    text = "\n".join(lines)
    assert code == (1 if rank else -9), text
    told = next(line for line in lines if "SIGKILL" in line)
    assert re.search(rf"rank {rank} \(process \d+\) .*killed by SIGKILL, probably out of memory", told)
    assert re.search(r"it last held \d+\.\d\d GiB, [\d.]+ GiB of the host's [\d.]+ GiB are available now", told)
    assert "failed before this one" not in text
    assert len(lines) <= 40, text


def test_a_missing_checkpoint_is_missed_before_ranks_start(tmp_path):
    code, lines = fail(tmp_path, "none", "3", "from=nowhere/x.ckpt")
    text = "\n".join(lines)
    assert code == 1
    assert lines[-1] == "FileNotFoundError: Checkpoint file not found: nowhere/x.ckpt", text
    assert not (tmp_path / "script1").exists()
    assert len(lines) <= 25, text


def test_a_damaged_checkpoint_is_one_message(tmp_path):
    (tmp_path / "x.ckpt").write_bytes(b"no checkpoint")
    code, lines = fail(tmp_path, "none", "3", "from=x.ckpt")
    text = "\n".join(lines)
    assert code == 1
    assert sum("x.ckpt is truncated, damaged" in line for line in lines) == 1, text
    assert sum("Traceback" in line for line in lines) == 1, text
    assert len(lines) <= 40, text
    done = run("-m", "lightning_zero", "fit", "ckpt_path=x.ckpt", "strategy=zero3", "trainer.devices=2", *SMALL,
               "hydra.run.dir=job", cwd=tmp_path, PYTHONPATH=str(ROOT))  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout
    assert sum(line.startswith("lightning-zero: error: ") for line in done.stdout.splitlines()) == 1, done.stdout
    assert "Traceback" in (tmp_path / "job" / "ranks" / "rank0.log").read_text()


def test_ranks_that_do_not_come_are_named(tmp_path):
    env = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "RANK": "0", "LIGHTNING_ZERO_START_SECONDS": "8"}
    code, lines = fail(tmp_path, "none", "3", **env)
    text = "\n".join(lines)
    assert code == 1
    assert re.search(r"rank 0 has waited 5 s at .* for rank 1 of 2 ranks \(devices=2, num_nodes=1\)", text), text
    assert "start the missing ones" in lines[-1], text
    code, lines = fail(tmp_path, "none", "3", **{**env, "WORLD_SIZE": "4"})
    assert code == 1
    assert "WORLD_SIZE=4 in the environment, but devices=2" in lines[-1]


def test_a_rank_that_fails_before_the_ranks_meet_is_not_waited_for(tmp_path):
    code, lines = fail(tmp_path, "early", "3")
    text = "\n".join(lines)
    assert code == 1, text
    assert "rank 0 has ended because of that (RankLost: another rank ended before all had met" in lines[-1], text
    assert sum("LookupError: rank 1 is not well" in line for line in lines) == 2, text


def test_a_port_in_use_is_said(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, lines = fail(tmp_path, "none", "3", MASTER_PORT=str(port))
    assert code == 1
    assert f"port {port} of 127.0.0.1, where the ranks are to find each other, is in use" in lines[-1], lines
    assert len(lines) <= 25
