"""DeepSpeed's compiled parts and its files on disk: what can go wrong goes wrong on every rank, and nothing stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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
pytestmark = pytest.mark.sampled


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


def test_on_a_network_file_system_a_lock_lives_while_its_folder_changes(extensions: Path, monkeypatch: Any) -> None:
    """The builder may be on another host, whose processes nobody here can see."""
    monkeypatch.setattr(ops, "_is_on_network", lambda path: True)
    lock = extensions / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert ops.is_held(lock)
    old = time.time() - 24 * 3600
    os.utime(lock, (old, old))
    assert not ops.is_held(lock)


def test_a_lock_that_nobody_has_open_is_not_held(extensions: Path) -> None:
    lock = extensions / "lock"
    lock.touch()
    assert not ops.is_held(lock)  # however new it is: this is no network file system
    assert ops.build_folder("op").name == "op"


def test_what_is_missing_is_said(extensions: Path, monkeypatch: Any) -> None:
    compiler = extensions / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")  # as where the headers are missing
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "apt-get install libaio-dev" in str(ops.why_not(ops.ASYNC_IO))
    assert ops.why_not(ops.CPU_ADAM) is None
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "apt-get install g++" in str(ops.why_not(ops.CPU_ADAM))


@pytest.mark.rest  # waits until the limit is over
def test_a_build_that_takes_too_long_is_ended_with_its_compilers(extensions: Path, monkeypatch: Any) -> None:
    pids = extensions / "pids"
    compiler = extensions / "slow-c++"
    compiler.write_text(f"#!/bin/sh\necho $$ >> {pids}\nexec sleep 600\n")
    compiler.chmod(0o755)
    folder, said = ops.build_folder(ops.CPU_ADAM), []
    folder.mkdir()
    builds = f"open({str(folder / 'lock')!r}, 'w'); subprocess.run([{str(compiler)!r}], preexec_fn=os.setpgrp)"
    monkeypatch.setattr(ops, "_BUILD", f"import os, subprocess; {builds}")
    monkeypatch.setenv("CXX", str(compiler))
    why = ops.build(ops.CPU_ADAM, said.append, timeout_seconds=20)
    assert "longer than 20 s" in str(why)
    assert len(said) == 1
    assert not (folder / "lock").exists()
    for pid in pids.read_text().split():
        assert _gone(int(pid))


def test_a_build_that_waited_too_long_leaves_the_lock_to_its_holder(extensions: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "_BUILD", "import time; time.sleep(600)")
    folder = ops.build_folder(ops.CPU_ADAM)
    holder = _hold(folder / "lock")
    try:
        assert "longer than 1 s" in str(ops._build_in_child(ops.CPU_ADAM, [folder], timeout_seconds=1))
        assert (folder / "lock").exists()
    finally:
        holder.kill()
        holder.wait()


def test_a_lock_that_is_just_given_back_is_not_called_left_behind(extensions: Path, monkeypatch: Any) -> None:
    """``FileBaton`` closes it, then removes it, and another process may have made it again."""
    lock, said = ops.build_folder(ops.CPU_ADAM) / "lock", []
    _pretend_built(lock.parent)
    lock.touch()
    monkeypatch.setattr(ops.time, "sleep", lambda seconds: lock.unlink(missing_ok=True))
    assert ops.build(ops.CPU_ADAM, said.append, timeout_seconds=10) is None
    assert said == []


def _gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_build_that_fails_says_the_compilers_error(extensions: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "_BUILD", "print('x.cpp:1: fatal error: no such header'); raise SystemExit(1)")
    monkeypatch.setenv("CXX", sys.executable)  # there is one
    why = ops.build(ops.CPU_ADAM, str, timeout_seconds=100)
    assert why == "compiling it failed: x.cpp:1: fatal error: no such header"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_ops_are_built_for_the_device_of_the_run(extensions: Path, monkeypatch: Any, kind: str) -> None:
    """On a machine with GPUs DeepSpeed would build its CUDA form of them for a run on the CPU, under the same name."""
    monkeypatch.setattr(ops, "_BUILD", "import os; raise SystemExit('error: ' + os.environ['DS_ACCELERATOR'])")
    monkeypatch.setenv("CXX", sys.executable)  # there is one
    why = ops.build(ops.CPU_ADAM, str, 100, kind)
    assert why == f"compiling it failed: error: {kind}"


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


def _build_and_load() -> tuple[str | None, list[str], list[tuple[str, int]]]:
    dist.init_process_group("gloo")
    said: list[str] = []
    agreement = Agreement(1200)
    why = ops.prepare_op(ops.CPU_ADAM, agreement, said.append, dist.get_rank())
    if why is None:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)
    agreement.gather(None)
    libraries = ops.build_folder(ops.CPU_ADAM).glob("*.so")
    return why, said, [(path.name, path.stat().st_mtime_ns) for path in libraries]


@pytest.mark.rest  # compiles
@pytest.mark.timeout(1200)
def test_one_rank_builds_and_every_rank_loads(ranks2: Any) -> None:
    """In the user's own cache, so that it is compiled once for all tests of a machine."""
    (why, said, built), (other_why, other_said, _) = ranks2(_build_and_load, timeout_seconds=1100)
    assert (why, other_why) == (None, None)
    assert other_said == []
    assert len(said) <= 1
    assert len(built) == 1
    assert ranks2(_build_and_load, timeout_seconds=1100) == [(None, [], built)] * 2  # the same file


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


_OWNER = """
import sys, time
from pathlib import Path
from lightning_zero.checkpoint import owner
from lightning_zero.engines.deepspeed import nvme_folder as folders
owner.numbers = lambda: "pid:[1]"
owner.began = lambda pid: "2"  # so that nobody else finds a process of this number that began then
path, lock = folders._make(sys.argv[1], "", 0.0, lambda line: None)
print(path, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("locks", [True, pytest.param(False, marks=pytest.mark.rest)])
def test_a_run_in_another_container_of_the_same_name_lives(tmp_path: Path, monkeypatch: Any, locks: bool) -> None:
    """Its process number means nothing here."""
    process = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        if not locks:
            monkeypatch.setattr(owner, "is_locked", lambda mark: None)
        said: list[str] = []
        folders.remove_leftovers(tmp_path, said.append)
        assert folder.is_dir()
        assert said == []
    finally:
        process.kill()
        process.wait()
    if locks:
        folders.remove_leftovers(tmp_path, said.append)
        assert not folder.exists()
        assert len(said) == 1


def test_bytes_on_disk() -> None:
    assert folders.swap_bytes(1000, 4, 4, 2, optimizer=True, parameters=True) == 1000 * 20 / 2
    assert folders.swap_bytes(1000, 2, 1, 1, optimizer=False, parameters=True) == 2000


def test_what_another_environment_has_built_is_built_again(extensions: Path, monkeypatch: Any) -> None:
    """PyTorch would compile it when it is loaded, in every rank and without a word."""
    monkeypatch.setenv("CXX", "/nowhere/c++")

    def refused() -> bool:
        return "apt-get install g++" in str(ops.build(ops.CPU_ADAM, str, 1))

    folder = ops.build_folder(ops.CPU_ADAM)
    library, recipe = folder / f"{folder.name}.so", folder / "build.ninja"
    _pretend_built(folder)
    assert not refused()
    mine = recipe.read_text()
    recipe.write_text("cflags = -I/elsewhere/torch/include -I/elsewhere/deepspeed/ops")
    library.touch()
    assert refused()
    recipe.write_text(mine)  # by a build that was killed before it came to the library
    os.utime(recipe, (time.time() + 1, time.time() + 1))
    assert refused()
