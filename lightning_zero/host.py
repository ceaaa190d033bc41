"""Memory and installed packages of this host. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h
MAPPED_FROM_BYTES = 1 << 20
MAPPED_IN_STEPS_FROM_BYTES = 8 << 20
MAPPED_APART_FROM_BYTES = 256 << 10
_LARGE_PAGE = 2 << 20


def available_host_bytes() -> int:
    """Host memory that new processes could take together, in bytes: what the kernel has free, and what the control
    groups around this process (a container's, a batch job's) leave of their limits."""
    return min([_kernel_has(), *groups_leave()])


def own_room_bytes() -> int | None:
    """Bytes that this process alone may still take under its limit of address space (``ulimit -v``), if it has one."""
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
    """Bytes that each group from this process's up to the root leaves; version 2's and version 1's."""
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
    libc = _libc()
    if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt"):
        _mapped_from[:] = [MAPPED_FROM_BYTES]
        map_from(MAPPED_FROM_BYTES)


_mapped_from: list[int] = []
"""The threshold set last; empty if malloc is not ours to set."""


def map_from(nbytes: int) -> None:
    """From here on blocks of this size and more are mappings of their own. Each costs page faults, which an operator on
    activations feels: in a step only what stays, or comes and goes by the unit, is worth them."""
    if _mapped_from:
        _mapped_from[0] = nbytes
        _libc().mallopt(_MMAP_THRESHOLD, nbytes)
        _libc().mallopt(_TRIM_THRESHOLD, max(8 * MAPPED_FROM_BYTES, 2 * nbytes))


@contextlib.contextmanager
def mapped_apart() -> Iterator[None]:
    """Blocks allocated inside stay, so all but small ones are mappings of their own: in the heap they would pin what
    activations leave around them."""
    if not _mapped_from:
        yield
        return
    _libc().mallopt(_MMAP_THRESHOLD, MAPPED_APART_FROM_BYTES)
    try:
        yield
    finally:
        _libc().mallopt(_MMAP_THRESHOLD, _mapped_from[0])


def return_gaps() -> None:
    """The kernel gets what is free between blocks that are alive; milliseconds for a hundred megabytes."""
    if _mapped_from:
        _libc().malloc_trim(0)


def resident_bytes() -> int:
    """Of this process; 0 where that is not known."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def in_large_pages(address: int, nbytes: int) -> None:
    """Has the kernel lay fresh memory of this process, which is about to be written from end to end, in pages of 2 MiB
    as far as they fit into it: a page of 4 KiB costs about as much to come by as to fill."""
    if sys.platform == "linux" and nbytes >= 2 * _LARGE_PAGE:
        start, end = -(-address // _LARGE_PAGE) * _LARGE_PAGE, (address + nbytes) // _LARGE_PAGE * _LARGE_PAGE
        # without effect where the kernel knows no such pages, or has them for everything
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


def require_deepspeed() -> None:
    """Raises ``ModuleNotFoundError`` with what to install, unless deepspeed can be imported."""
    if find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            "engine='deepspeed' needs the package deepspeed, which is not installed: pip install deepspeed (on Linux it"
            " comes with lightning-zero), or use engine='fsdp2'."
        )


def files_of_a_run(world_size: int) -> int:
    """Open files that a rank should be allowed: up to three connections to each other one, and 960 for data loaders,
    logs and the user's own."""
    return 960 + 3 * world_size


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


def require_open_files(world_size: int, connected: bool, keeps_store: bool) -> None:
    """Raises before ranks meet where this process may not open what a run needs: gloo ends a process that finds no free
    file in the middle of a step, without a word about it.

    Args:
        world_size: Ranks of the run.
        connected: This rank has a connection to each other one, as processes on CPUs do.
        keeps_store: This rank keeps the store, with two connections to each rank.

    Raises:
        RuntimeError: Naming the limit and what to do.
    """
    import resource  # not on every system

    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        return
    targets = (os.path.join(folder, number) for number in os.listdir(folder))
    # sockets may be of this run already
    others = sum(os.path.exists(each) and not os.readlink(each).startswith("socket:") for each in targets)
    needed = others + sockets_of_a_run(world_size, connected, keeps_store)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise RuntimeError(
            f"{world_size} ranks take {needed} open files in this process, and its limit is {limit}, which could not be"
            f" raised: set a higher one before the start (ulimit -n {files_of_a_run(world_size)}; LimitNOFILE= of a"
            " systemd unit, --ulimit nofile= of a container)."
        )


def sockets_of_a_run(world_size: int, connected: bool, keeps_store: bool) -> int:
    """In mid-run, fitted to the measured table of docs/scaling.md: ``3 log2(N) + 2`` for the agreements' tree and what
    starts a run, and one to the store for reads that a rank makes alone."""
    levels = (world_size - 1).bit_length()
    return 3 * levels + 3 + (world_size if connected else 0) + (2 * world_size if keeps_store else 0)
