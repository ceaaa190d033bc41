"""Ranks that take themselves for ranks on several hosts; a mark for tests of those that read each other's memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_zero import neighbours


@contextmanager
def on_hosts_of(ranks_per_host: int) -> Iterator[None]:
    """``Neighbours`` made inside see so many ranks to a host; with 0 every rank is alone."""

    def host() -> str:
        return f"host {dist.get_rank() // ranks_per_host}" if ranks_per_host else os.urandom(16).hex()

    with mock.patch.object(neighbours, "_host", host):
        yield


def _allowed() -> bool:
    """Whether two processes started by one, as ranks are, may read each other's memory here."""
    if sys.platform != "linux":
        return False
    sample = ctypes.create_string_buffer(b"sample")
    reads = (
        "import ctypes, sys; from lightning_zero import neighbours as n; found = ctypes.create_string_buffer(6);"
        "size = n._read_memory(int(sys.argv[1]), [(ctypes.addressof(found), int(sys.argv[2]), 6)]);"
        "sys.exit(found.raw != b'sample')"
    )
    neighbours._libc().prctl(neighbours._PR_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0)
    address = str(ctypes.addressof(sample))
    return subprocess.run([sys.executable, "-c", reads, str(os.getpid()), address], check=False).returncode == 0


MAY_READ = _allowed()
NEIGHBOURS = pytest.mark.skipif(
    not MAY_READ, reason="this kernel or container forbids reading another process's memory"
)
