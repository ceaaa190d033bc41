"""What this host has: memory, installed packages. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h
MAPPED_FROM_BYTES = 1 << 20
TRIMMED_FROM_BYTES = 8 << 20


def available_host_bytes() -> int:
    """Host memory that new processes could take together, in bytes: what the kernel has free, and what the control
    groups around this process (a container's, a batch job's) leave of their limits."""
    return min([_kernel_has(), *groups_leave()])


def own_room_bytes() -> int | None:
    """What this process alone may still take under its limit of address space (``ulimit -v``); ``None`` without."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))
    except (ImportError, OSError, ValueError, IndexError):
        return None


def _kernel_has() -> int:
    try:
        with open("/proc/meminfo") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return kib * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


_CGROUP_FILES = {
    # hierarchy -> limit, use, and the line of memory.stat with what the kernel drops when it needs room
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def groups_leave(mounts: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> Iterator[int]:
    """What each group from this process's up to the root leaves; version 2's and version 1's."""
    with contextlib.suppress(OSError):
        for line in Path(own).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            kind = "memory" if "memory" in controllers.split(",") else controllers
            if kind not in _CGROUP_FILES:
                continue
            root = Path(mounts, kind)
            # inside a container the path may be the host's, and the container's own group is the root
            for group in {root, *(root / path.strip("/") / ("../" * up) for up in range(path.count("/") + 1))}:
                if root.resolve() in (group.resolve(), *group.resolve().parents):
                    yield from _group_leaves(group, *_CGROUP_FILES[kind])


def _group_leaves(group: Path, limit: str, use: str, droppable: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # "max" is no limit
        total, used = (int((group / name).read_text()) for name in (limit, use))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield max(0, total - used + int(stat.get(droppable, 0)))


def return_freed_memory() -> None:
    """Has this process give memory back as it frees it, so that what is resident is what is alive.

    glibc's malloc raises the size from which blocks are mappings of their own up to 32 MiB, as such blocks are freed;
    smaller ones, gathered parameters among them, then leave gaps in the heap that nothing else fits into. Left alone
    where the environment has its say (``MALLOC_MMAP_THRESHOLD_`` and others), and without effect on other allocators.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, TRIMMED_FROM_BYTES)


def require_deepspeed() -> None:
    """Raises ``ModuleNotFoundError`` with what to install, unless deepspeed can be imported."""
    if find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            "engine='deepspeed' needs the package deepspeed, which is not installed: pip install deepspeed (on Linux it"
            " comes with lightning-zero), or use engine='fsdp2'."
        )


def files_of_a_run(world_size: int) -> int:
    """Open files that a rank should be allowed: two connections to each other one, and 960 for data loaders, logs and
    the user's own."""
    return 960 + 2 * world_size


def allow_open_files(count: int) -> None:
    """Raises this process' limit of open files to ``count``, as far as the system lets it; never lowers it.

    Many systems start programs with 1,024 and allow far more to those that ask.
    """
    import resource  # not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(ValueError, OSError):  # a system's own maximum below its hard limit (macOS)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))
