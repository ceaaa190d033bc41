"""DeepSpeed's compiled parts and its files on disk: what can go wrong goes wrong on every rank, and nothing stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero.checkpoint import owner
from lightning_zero.comm.agree import Agreement
from lightning_zero.engines.deepspeed import nvme_folder as folders
from lightning_zero.engines.deepspeed import ops

pytest.importorskip("deepspeed")


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty extension cache of this test's own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def _hold(lock: Path) -> subprocess.Popen[bytes]:
    """A process that holds ``lock`` as PyTorch's ``FileBaton`` does."""
    code = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(600)"
    lock.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _pretend_built(folder: Path) -> None:
    """Leaves there what a finished build leaves, so that there is nothing to compile."""
    folder.mkdir(parents=True, exist_ok=True)
    homes = [
        str(Path(spec.origin).parent) for name in ("torch", "deepspeed") if (spec := find_spec(name)) and spec.origin
    ]
    (folder / "build.ninja").write_text("cflags = " + " ".join(f"-I{home}/include" for home in homes))
    (folder / f"{folder.name}.so").touch()


def test_a_lock_that_a_killed_build_left_is_removed(extensions: Path) -> None:
    lock, said = ops.build_folder(ops.CPU_ADAM) / "lock", []
    _pretend_built(lock.parent)
    process = _hold(lock)
    try:
        assert ops.is_held(lock)
        assert "holds" in str(ops.build(ops.CPU_ADAM, said.append, timeout_seconds=0.1))
        assert "waiting" in said[0]
    finally:
        process.kill()
        process.wait()
    assert lock.exists()
    assert not ops.is_held(lock)
    assert ops.build(ops.CPU_ADAM, said.append, timeout_seconds=0.1) is None
    assert not lock.exists()
    assert "left behind" in said[-1]


def test_what_is_missing_is_said(extensions: Path, monkeypatch: Any) -> None:
    compiler = extensions / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")  # as where the headers are missing
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "apt-get install libaio-dev" in str(ops.why_not(ops.ASYNC_IO))
    assert ops.why_not(ops.CPU_ADAM) is None
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "apt-get install g++" in str(ops.why_not(ops.CPU_ADAM))


def test_a_build_that_fails_says_the_compilers_error(extensions: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "_BUILD", "print('x.cpp:1: fatal error: no such header'); raise SystemExit(1)")
    monkeypatch.setenv("CXX", sys.executable)  # there is one
    why = ops.build(ops.CPU_ADAM, str, timeout_seconds=100)
    assert why == "compiling it failed: x.cpp:1: fatal error: no such header"


def _prepare(environment: dict[str, str]) -> tuple[str | None, list[str]]:
    os.environ.update(environment)
    dist.init_process_group("gloo")
    said: list[str] = []
    why = ops.prepare_op(ops.CPU_ADAM, Agreement(120), said.append, dist.get_rank())
    return why, said


def test_every_rank_learns_why_it_cannot_be_built(ranks2: Any, tmp_path: Path) -> None:
    (why0, _), (why1, _) = ranks2(_prepare, {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "/nowhere/c++"})
    assert why0 == why1
    assert "apt-get install g++" in str(why0)


# -- the folder ------------------------------------------------------------------------------------------------------


def _open(given: str | None, default: str, need_bytes: float = 0.0) -> Any:
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), []
    agreement = Agreement(60)
    try:
        folder = folders.open_folder(given, default, need_bytes, agreement, rank, 0, said.append)
    except ValueError as error:
        return "error", str(error)
    there = Path(folder.path).is_dir()
    agreement.gather(None)
    folder.close()
    folder.close()
    agreement.gather(None)
    return folder.path, there, Path(folder.path).exists(), said


def test_all_ranks_of_a_host_share_a_folder_that_ends_with_them(ranks2: Any, tmp_path: Path) -> None:
    default = tmp_path / "run" / "offload"
    (path, *first, said), (other, *second, quiet) = ranks2(_open, None, str(default))
    assert path == other
    assert Path(path).parent == default
    assert first == second == [True, False]
    assert (str(default) in said[0], quiet) == (True, [])
    given = tmp_path / "fast"
    given.mkdir()
    assert Path(ranks2(_open, str(given), str(default))[0][0]).parent == given


def test_bad_paths_are_errors_on_every_rank(ranks2: Any, tmp_path: Path) -> None:
    for given, need, parts in [
        (tmp_path / "missing", 0.0, ["offload.path=", "missing", "no folder"]),
        (Path("/proc"), 0.0, ["offload.path='/proc'", "cannot be written"]),
        (tmp_path, 2.0**80, ["GiB free", "make room", "offload='cpu'"]),
    ]:
        answers = ranks2(_open, str(given), "/unused", need)
        for kind, message in answers:
            assert kind == "error"
            for part in parts:
                assert part in message
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    assert "(the default) cannot be made" in ranks2(_open, None, str(file / "offload"))[1][1]


def test_only_what_dead_runs_of_this_host_left_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    identity = owner.identity(dead.pid)
    dead.wait()
    alive = owner.identity(os.getpid())
    marks = {
        "dead": identity,
        "other_boot": {**alive, "boot": "before"},
        "number_used_again": {**alive, "began": "1"},
        "alive": alive,
        "elsewhere": {**identity, "host": "another"},
        "unreadable": None,
    }
    for name, mark in marks.items():
        folder = tmp_path / f"{folders.PREFIX}{name}"
        folder.mkdir()
        (folder / owner.MARK).write_text("{" if mark is None else json.dumps(mark))
    (tmp_path / f"{folders.PREFIX}unmarked").mkdir()
    (tmp_path / "mine").mkdir()
    said: list[str] = []
    folders.remove_leftovers(tmp_path, said.append)
    left = {path.name.removeprefix(folders.PREFIX) for path in tmp_path.iterdir()}
    assert left == {"alive", "elsewhere", "unreadable", "unmarked", "mine"}
    assert len(said) == 3
