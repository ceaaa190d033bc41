"""Marks that say whose an unfinished folder is, so that the next run removes those of dead runs and no other.

A mark names its owner (host, boot, process and when that began) and is held locked as long as the owner lives:
processes of another container with this host's name cannot be seen, but their locks can. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path

MARK = "owner.json"


def mark(folder: Path) -> int:
    """Writes the mark of this process; the descriptor that holds it locked. Nobody ever sees it unlocked."""
    new = folder / f"{MARK}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o644)
    os.write(lock, json.dumps(identity(os.getpid())).encode())
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(folder / MARK)
    return lock


def lives(path: Path) -> bool:
    """Whether the owner that the mark at ``path`` names may still be there; one on another host always may, and one
    whose number says nothing here (another container) where locks don't work.

    Raises:
        OSError, ValueError, KeyError, TypeError: It is no mark of ours, or already going.
    """
    said: dict[str, str | int] = json.loads(path.read_text(encoding="utf-8"))
    locked = is_locked(path)
    if locked or said["host"] != socket.gethostname():
        return True
    if locked is None and said["boot"] == _boot() and said.get("numbers") != numbers():
        return True
    there = identity(int(said["pid"]))
    return all(said[name] == there[name] for name in ("boot", "pid", "began"))


def identity(pid: int) -> dict[str, str | int]:
    """Identity of a process among all others, also after its number is used again."""
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "began": began(pid), "numbers": numbers()}


def is_locked(path: Path) -> bool | None:
    """Whether a living process holds ``path``, in whatever container; ``None`` where that cannot be told."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back when the file is closed
        except BlockingIOError:
            return True
        except OSError:
            return None
    return False


def numbers() -> str:
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


def began(pid: int) -> str:
    """Start time of the process, in the kernel's ticks; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
