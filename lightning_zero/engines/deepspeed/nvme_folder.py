"""Where NVMe offload puts its files: a folder of one run on one host, which ends with it.

A run's folder carries a mark of its owner (host, boot, process and when that began), which the owner holds locked as
long as it lives: processes of another container with this host's name cannot be seen, but their locks can. A run that
was killed leaves its folder behind; the next run that is given the same path removes it, and nothing else: neither the
folder of a run that lives, nor one of another host, nor anything without a mark.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from lightning_zero.comm.agree import Agreement

PREFIX = "lightning_zero-"
MARK = "owner.json"


class SwapFolder:
    """A run's own folder; :meth:`close` removes it, on the process that made it."""

    def __init__(self, path: str, lock: int | None) -> None:
        """``lock``: the descriptor that holds the mark locked, where the folder was made."""
        self.path = path
        self._lock = lock
        self._made_by = os.getpid() if lock is not None else None
        if lock is not None:
            atexit.register(self.close)

    def close(self) -> None:
        """Removes the folder and what is in it; harmless to call again and in a forked child."""
        if self._made_by == os.getpid():
            self._made_by = None
            atexit.unregister(self.close)
            shutil.rmtree(self.path, ignore_errors=True)
            assert self._lock is not None
            os.close(self._lock)


def open_folder(
    given: str | None,
    default: str,
    need_bytes: float,
    agreement: Agreement,
    local_rank: int,
    node_rank: int,
    say: Callable[[str], None],
) -> SwapFolder:
    """This run's folder under ``given``, or under ``default``, which is then made and announced (collective).

    Args:
        given: ``offload.path``; has to exist on every host.
        default: Used where ``given`` is ``None``.
        need_bytes: What the ranks of one host will write.
        meeting: All ranks.
        local_rank: 0 makes and owns the folder of its host.
        node_rank: Number of the host.
        say: Shows one line to the user.

    Raises:
        ValueError: On every rank: the path is missing, cannot be written to, or has too little space on some host.
    """
    error: BaseException | None = None
    made = None
    if local_rank == 0:
        try:
            made = _make(given, default, need_bytes, say)
        except (ValueError, OSError) as found:
            error = found if isinstance(found, ValueError) else ValueError(str(found))
    try:
        agreement.agree(error)
        paths = dict(agreement.gather((node_rank, made[0]) if made else (-1, None), "choosing the folder for offload"))
    except BaseException:
        if made:
            shutil.rmtree(made[0], ignore_errors=True)
            os.close(made[1])
        raise
    return SwapFolder(paths[node_rank], made[1] if made else None)


def swap_bytes(
    numel: int, param_bytes: int, ranks: int, ranks_per_host: int, optimizer: bool, parameters: bool
) -> float:
    """What the ranks of one host write: per element of their shares fp32 master weight, two Adam states and gradient,
    16 bytes (ZeRO-Infinity, arXiv:2104.07857, section 3), and the parameter itself."""
    each = (16 if optimizer else 0) + (param_bytes if parameters else 0)
    return numel * each * ranks_per_host / ranks


def remove_leftovers(base: Path, say: Callable[[str], None]) -> None:
    """Deletes the folders of this host's runs that are no more."""
    for mark in sorted(base.glob(f"{PREFIX}*/{MARK}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not ours, or already going
            if not _lives(json.loads(mark.read_text(encoding="utf-8")), _is_locked(mark)):
                say(f"offload: {mark.parent}, which a run left behind that was killed, is removed.")
                shutil.rmtree(mark.parent, ignore_errors=True)


def _make(given: str | None, default: str, need_bytes: float, say: Callable[[str], None]) -> tuple[str, int]:
    base, host = Path(given if given is not None else default), socket.gethostname()
    name = f"offload.path={str(base)!r}" + ("" if given is not None else " (the default)")
    if given is None:
        try:
            base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{name} cannot be made on {host} ({error.strerror}): set offload.path to a folder on a fast disk."
            ) from error
    if not base.is_dir():
        raise ValueError(f"{name} is no folder on {host}: make it, mount the disk, or set another one.")
    remove_leftovers(base, say)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{host}-{os.getpid()}-", dir=base))
        lock = _mark(folder)
    except OSError as error:
        raise ValueError(
            f"{name} cannot be written to on {host} ({error.strerror}): change its permissions or set another one."
        ) from error
    free = shutil.disk_usage(base).free
    if free < need_bytes:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        raise ValueError(
            f"{name} has {free / 2**30:.3g} GiB free on {host}, but this run writes about {need_bytes / 2**30:.3g} GiB"
            " there: make room, set another path, or use offload='cpu'."
        )
    say(f"offload: files go to {folder} and are removed at the end.")
    return str(folder), lock


def _mark(folder: Path) -> int:
    """Writes the mark of this process; the descriptor that holds it locked. Nobody ever sees it unlocked."""
    new = folder / f"{MARK}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o644)
    os.write(lock, json.dumps(_identity(os.getpid())).encode())
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(folder / MARK)
    return lock


def _identity(pid: int) -> dict[str, str | int]:
    """What tells one process from all others, also after its number is used again."""
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "began": _began(pid), "numbers": _numbers()}


def _lives(mark: dict[str, str | int], locked: bool | None) -> bool:
    """Whether the owner may still be there; one on another host always may, and one whose number says nothing here
    (another container) where locks don't work (``None``)."""
    if locked or mark["host"] != socket.gethostname():
        return True
    if locked is None and mark["boot"] == _boot() and mark.get("numbers") != _numbers():
        return True
    there = _identity(int(mark["pid"]))
    return all(mark[name] == there[name] for name in ("boot", "pid", "began"))


def _is_locked(mark: Path) -> bool | None:
    """Whether a living process holds ``mark``, in whatever container; ``None`` where that cannot be told."""
    with mark.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back when the file is closed
        except BlockingIOError:
            return True
        except OSError:
            return None
    return False


def _numbers() -> str:
    """The namespace in which process numbers mean something."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When the process began, in the kernel's ticks; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
