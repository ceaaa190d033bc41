"""DeepSpeed's compiled parts: built once, by one rank of each host, in a process that has a time limit.

DeepSpeed compiles an op where it is first used, on every rank at once: all but one wait for a lock file, which a build
that was killed leaves behind for ever. Here a child process of one rank builds it before training, every rank learns
how that went, and a lock that nobody holds is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning_zero.comm.agree import Agreement
from lightning_zero.host import require_deepspeed

CPU_ADAM = "cpu_adam"
ASYNC_IO = "async_io"
_BUILDERS = {CPU_ADAM: "CPUAdamBuilder", ASYNC_IO: "AsyncIOBuilder"}
"""Op -> the builder in ``deepspeed.ops.op_builder``."""
_NEEDS = {ASYNC_IO: ("pin_memory",)}
"""Op -> those that its builder builds first."""
_SECONDS = {CPU_ADAM: 60, ASYNC_IO: 180}
"""Rough time of a build on two cores."""
BUILD_TIMEOUT_SECONDS = 900.0
_BUILD = "import sys, deepspeed.ops.op_builder as b; getattr(b, sys.argv[1])().load(verbose=False)"
_QUIET_SECONDS = 300.0
"""On a network file system, where the holder may be on another host: a lock whose folder did not change for so long
belongs to nobody."""
_POLL_SECONDS = 0.5
_GIVEN_BACK_SECONDS = 0.2
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse.sshfs", "9p", "afs", "glusterfs")


def prepare_op(
    name: str,
    agreement: Agreement,
    say: Callable[[str], None],
    local_rank: int,
    device_type: str = "cpu",
    timeout_seconds: float = BUILD_TIMEOUT_SECONDS,
) -> str | None:
    """Builds ``name`` where it isn't yet, once per host; why it can't be used, the same on all ranks (collective).

    Args:
        name: :data:`CPU_ADAM` or :data:`ASYNC_IO`.
        agreement: Of all ranks; a build gets at most 80 % of its timeout.
        say: Shows one line to the user.
        local_rank: 0 builds for its host.
        device_type: Of the run's device; DeepSpeed builds for the device that it finds itself, unless told.
        timeout_seconds: For the build, or for somebody else's that is under way.
    """
    limit = min(timeout_seconds, 0.8 * agreement.timeout_seconds)
    why = None
    if local_rank == 0:
        try:
            why = build(name, say, limit, device_type)
        except Exception as error:  # the other ranks wait in the next line
            why = f"{type(error).__name__}: {error}"
    found = [other for other in agreement.gather(why, f"building DeepSpeed's {name}") if other is not None]
    return found[0] if found else None


def build(name: str, say: Callable[[str], None], timeout_seconds: float, device_type: str = "cpu") -> str | None:
    """Builds ``name`` on this host unless it is there; why that failed, or ``None``."""
    folders = [build_folder(part) for part in (*_NEEDS.get(name, ()), name)]
    if all(_is_built(folder) for folder in folders):
        return _clear_locks(folders, say, timeout_seconds)
    if why := why_not(name):
        return why
    if problem := _clear_locks(folders, say, timeout_seconds):
        return problem
    say(
        f"DeepSpeed's {name} is compiled now, once for this machine: about {_SECONDS[name]} s, at most"
        f" {timeout_seconds:.0f} s, into {folders[-1]}."
    )
    return _build_in_child(name, folders, timeout_seconds, device_type)


def why_not(name: str) -> str | None:
    """The missing requirement of building ``name``, and how to get it; ``None`` if none is known."""
    require_deepspeed()
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}): apt-get install g++, or set CXX"
    if shutil.which("ninja", path=search_path()) is None and not _has_ninja():
        return "there is no ninja: pip install ninja"
    if name == ASYNC_IO and not _links_libaio(compiler):
        return "libaio and its headers are missing: apt-get install libaio-dev (yum install libaio-devel)"
    return None


def search_path() -> str:
    """``PATH`` for building and for loading: this environment's ninja comes first, because each of two versions would
    compile again what the other has compiled, also where it is only to be loaded."""
    home, others = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    return os.pathsep.join([home, others]) if shutil.which("ninja", path=home) else others


def build_folder(name: str) -> Path:
    """PyTorch's folder for the op of that name and its lock."""
    return Path(build_root()) / name


def build_root() -> str:
    """``TORCH_EXTENSIONS_DIR``, or a folder of this environment's own below PyTorch's: in one that all environments of
    a user share, each would compile again what another has compiled, in every rank."""
    from torch.utils import cpp_extension

    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return given
    homes = [spec.origin for spec in map(find_spec, ("torch", "deepspeed")) if spec and spec.origin]
    tools = [shutil.which("ninja", path=search_path()) or "", os.environ.get("CXX", "")]
    digest = hashlib.sha256("\n".join([sys.executable, *homes, *tools]).encode()).hexdigest()[:12]
    return os.path.join(cpp_extension.get_default_build_root(), f"lightning_zero_{digest}")


# -- building --------------------------------------------------------------------------------------------------------


def _build_in_child(name: str, folders: Sequence[Path], timeout_seconds: float, device_type: str = "cpu") -> str | None:
    code = [sys.executable, "-c", _BUILD, _BUILDERS[name]]
    child = subprocess.Popen(
        code,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "DS_ACCELERATOR": device_type,
            "PATH": search_path(),
            "TORCH_EXTENSIONS_DIR": build_root(),
        },
        start_new_session=True,  # so that the compilers can be found
    )
    try:
        output, _ = child.communicate(timeout=timeout_seconds)
    except BaseException as error:
        _end_session(child)
        for folder in folders:  # the child's, unless it has waited for somebody else's
            if _is_left_behind(folder / "lock"):
                (folder / "lock").unlink(missing_ok=True)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"compiling it took longer than {timeout_seconds:.0f} s"
    if child.returncode:
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        return f"compiling it failed: {' | '.join(errors[:3])[:600]}"
    return None


def _end_session(child: subprocess.Popen[str]) -> None:
    """Ends ``child`` and all that it has started: ninja gives each compiler a process group of its own."""
    child.kill()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[3]) == child.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
    child.communicate()


def _is_built(folder: Path) -> bool:
    """Whether the library there is newer than what it was built from, its recipe included, and that is this
    environment's (all of a user's share the folder); PyTorch then only loads it."""
    library, recipe = folder / f"{folder.name}.so", folder / "build.ninja"
    sources = [find_spec("torch"), find_spec("deepspeed")]
    try:
        made, flags = library.stat().st_mtime, recipe.read_text()
        return recipe.stat().st_mtime <= made and all(
            spec and spec.origin and os.stat(spec.origin).st_mtime <= made and str(Path(spec.origin).parent) in flags
            for spec in sources
        )
    except OSError:
        return False


def _has_ninja() -> bool:
    from torch.utils.cpp_extension import is_ninja_available

    return is_ninja_available()


def _links_libaio(compiler: str) -> bool:
    """Whether a program that uses libaio can be compiled and linked, with the user's own flags."""
    flags = [*os.environ.get("CFLAGS", "").split(), *os.environ.get("LDFLAGS", "").split()]
    program = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
    command = [compiler, "-x", "c++", "-", "-o", os.devnull, *flags, "-laio"]
    try:
        run = subprocess.run(command, input=program, text=True, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


# -- locks -----------------------------------------------------------------------------------------------------------


def _clear_locks(folders: Sequence[Path], say: Callable[[str], None], timeout_seconds: float) -> str | None:
    """Waits while somebody builds there, and removes a lock that nobody holds; the reason if that takes too long."""
    deadline, waiting = time.monotonic() + timeout_seconds, False
    for folder in folders:
        lock = folder / "lock"
        while lock.exists():
            if _is_left_behind(lock):
                say(f"{lock} was left behind by a build that was killed: it is removed.")
                lock.unlink(missing_ok=True)
                break
            if not is_held(lock):  # it was given back meanwhile
                continue
            if time.monotonic() > deadline:
                return f"another process has been building it for {timeout_seconds:.0f} s and holds {lock}"
            if not waiting:
                say(f"DeepSpeed's {folder.name} is being compiled by another process, which holds {lock}: waiting.")
                waiting = True
            time.sleep(_POLL_SECONDS)
    return None


def _is_left_behind(lock: Path) -> bool:
    """Whether nobody holds it, nor is about to remove it: PyTorch's ``FileBaton`` closes it a moment before."""
    if is_held(lock):
        return False
    time.sleep(_GIVEN_BACK_SECONDS)
    return lock.exists() and not is_held(lock)


def is_held(lock: Path) -> bool:
    """Whether a living process holds PyTorch's lock file, as far as this host can tell."""
    try:
        mine = lock.stat()
    except FileNotFoundError:
        return False
    if _is_open_somewhere(mine):
        return True
    if not _is_on_network(lock):
        # Made and opened in one call: what is not open belongs to nobody, unless another user's process has it.
        return mine.st_uid != os.geteuid() and os.geteuid() != 0 and _was_busy(lock)
    return _was_busy(lock)


def _is_open_somewhere(wanted: os.stat_result) -> bool:
    for process in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for entry in os.scandir(process):
                with contextlib.suppress(OSError):
                    found = os.stat(entry.path)
                    if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                        return True
    return False


def _was_busy(lock: Path) -> bool:
    latest = max((path.stat().st_mtime for path in (lock, *lock.parent.iterdir())), default=0.0)
    return time.time() - latest < _QUIET_SECONDS


def _is_on_network(path: Path) -> bool:
    """Whether ``path`` lies on a file system that other hosts may use too."""
    best, kind = "", ""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return True
    real = os.path.realpath(path)
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, found
    return kind.startswith(_NETWORK)


# -- what there is ---------------------------------------------------------------------------------------------------


def every_op() -> dict[str, str]:
    """DeepSpeed's ops by name: ``"built"``, ``"can be built"``, or why not; empty where deepspeed is not installed."""
    if find_spec("deepspeed") is None:
        return {}
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    said = {}
    for name, builder in sorted(ALL_OPS.items()):
        if installed_ops.get(name) or _is_built(build_folder(name)):
            said[name] = "built"
        elif why := why_not(name) or _why_incompatible(builder):
            said[name] = f"no: {why}"
        else:
            said[name] = "can be built"
    return said


def _why_incompatible(builder: object) -> str | None:
    """The requirement that DeepSpeed itself finds missing; its checks raise, or leave a line in ``error_log``."""
    try:
        if builder.is_compatible(verbose=False):  # type: ignore[attr-defined]
            return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return str(getattr(builder, "error_log", None) or "it does not go with this hardware or software")
