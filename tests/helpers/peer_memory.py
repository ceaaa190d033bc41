"""A mark for tests of ranks that read each other's memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from lightning_zero.comm import peer_memory

_READS = """
import ctypes, sys
found = ctypes.create_string_buffer(6)
here, there = (ctypes.c_size_t * 2)(ctypes.addressof(found), 6), (ctypes.c_size_t * 2)(int(sys.argv[2]), 6)
one = ctypes.c_ulong(1)
ctypes.CDLL(None).process_vm_readv(int(sys.argv[1]), here, one, there, one, ctypes.c_ulong(0))
sys.exit(found.raw != b"sample")
"""
"""Imports nothing that takes seconds: every rank of a test asks."""


def _allowed() -> bool:
    """Whether two processes started by one, as ranks are, may read each other's memory here."""
    if sys.platform != "linux":
        return False
    sample = ctypes.create_string_buffer(b"sample")
    peer_memory._libc().prctl(peer_memory._PR_SET_PTRACER, peer_memory._PR_SET_PTRACER_ANY, 0, 0, 0)
    command = [sys.executable, "-S", "-c", _READS, str(os.getpid()), str(ctypes.addressof(sample))]
    return subprocess.run(command, check=False).returncode == 0


MAY_READ = _allowed()
NEIGHBOURS = pytest.mark.skipif(
    not MAY_READ, reason="this kernel or container forbids reading another process's memory"
)
