"""What this host has: memory, installed packages. Standard library only."""

from __future__ import annotations

import os
from importlib.util import find_spec


def available_host_bytes() -> int:
    """Host memory that a new process could take, in bytes."""
    try:
        with open("/proc/meminfo") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return kib * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def require_deepspeed() -> None:
    """Raises ``ModuleNotFoundError`` with what to install, unless deepspeed can be imported."""
    if find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            "engine='deepspeed' needs the package deepspeed, which is not installed: pip install deepspeed (on Linux it"
            " comes with lightning-zero), or use engine='fsdp2'."
        )
