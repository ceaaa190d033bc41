"""Memory, network interfaces and installed packages of this host. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h
_LARGE_PAGE = 2 << 20
MAPPED_FROM_BYTES = 1 << 20
"""Blocks of this size and more are separate mappings while a module is sharded or made full on CPUs: full and sharded
tensors take turns, so that a heap would keep a gap for each full one."""
MAPPED_IN_STEPS_FROM_BYTES = 8 << 20
"""The same in steps. Each new mapping costs page faults: with 1 MiB, steps on activations of some MiB took half as long
again."""


def available_host_bytes() -> int:
    """Host memory in bytes that new processes together could still allocate: the kernel's available memory, or less if
    a control group around this process (a container, a batch job) has less left of its limit."""
    return min([_kernel_available_bytes(), *cgroup_bytes_left()])


def _kernel_available_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return kib * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


_CGROUP_FILES = {
    # hierarchy -> files with the limit and the use, and the line of memory.stat that counts reclaimable cache
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def cgroup_bytes_left(mounts: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> Iterator[int]:
    """Yields the bytes left under the limit of each control group from this process's up to the root (cgroup v1 and
    v2)."""
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
                    yield from _bytes_left(group, *_CGROUP_FILES[kind])


def _bytes_left(group: Path, limit: str, use: str, droppable: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # "max" is no limit
        total, used = (int((group / name).read_text()) for name in (limit, use))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield max(0, total - used + int(stat.get(droppable, 0)))


def return_freed_memory(from_bytes: int = MAPPED_FROM_BYTES) -> None:
    """Makes malloc return freed blocks of ``from_bytes`` and more to the kernel, from the next one that it allocates.

    glibc's malloc allocates large blocks as separate mappings. As such blocks are freed, it raises the size from which
    it does so up to 32 MiB. Smaller blocks, gathered parameters among them, then leave gaps in the heap that nothing
    else fits into. The environment (``MALLOC_MMAP_THRESHOLD_`` and others) takes precedence. Other allocators are not
    affected.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, from_bytes)
        libc.mallopt(_TRIM_THRESHOLD, 2 * MAPPED_IN_STEPS_FROM_BYTES)


def in_large_pages(address: int, nbytes: int) -> None:
    """Asks the kernel for 2 MiB pages for new memory that is about to be written completely: to fault in a page of 4
    KiB takes about as long as to fill it."""
    if sys.platform == "linux" and nbytes >= MAPPED_IN_STEPS_FROM_BYTES:
        start, end = -(-address // _LARGE_PAGE) * _LARGE_PAGE, (address + nbytes) // _LARGE_PAGE * _LARGE_PAGE
        # No effect if the kernel lacks large pages or uses them for all memory.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


def interface_to(address: str, port: int) -> str | None:
    """Returns the network interface of the route to ``address``; ``None`` if it is not known."""
    try:
        import fcntl  # not on every system

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # chooses the route, and sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # no IPv4 address
                    found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                    if found[20:24] == own:
                        return name
    except (ImportError, OSError):
        pass
    return None


_SIOCGIFADDR = 0x8915
"""Defined in ``<linux/sockios.h>``: the IPv4 address of an interface."""


def require_deepspeed() -> None:
    """Raises ``ModuleNotFoundError`` with the command that installs deepspeed, unless it can be imported."""
    if find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            "engine='deepspeed' needs the package deepspeed, which is not installed: pip install deepspeed (on Linux it"
            " comes with lightning-zero), or use engine='fsdp2'."
        )


def files_of_a_run(world_size: int) -> int:
    """Number of open files that a rank should be allowed: up to three connections to each other rank, and 960 for data
    loaders, logs and user code."""
    return 960 + 3 * world_size


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files to ``count``, as far as the system permits; never lowers it.

    Many systems start programs with a limit of 1,024 and permit far more on request.
    """
    import resource  # not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has a maximum below its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))
