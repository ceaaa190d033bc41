"""A file whose pages are memory: mapped, read ahead, and written behind.

What is written to a mapped tensor goes to the file by way of the kernel's page cache, which gives memory back to
whoever needs it. The file has no name: whatever ends the process, nothing is left behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from typing import Any, NamedTuple

import torch
from torch import Tensor

SEGMENT_BYTES = 1 << 30
"""Mapped at a time, without room on the disk: each mapping takes a file descriptor."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, from Linux 5.14 on; the module mmap does not have it
_START_WRITING, _WRITE_AND_WAIT = 2, 7  # SYNC_FILE_RANGE_WRITE, and with WAIT_BEFORE and WAIT_AFTER; linux/fs.h


class Region(NamedTuple):
    """A part of a :class:`PagedFile`, from a page's beginning to a page's end."""

    address: int
    """In memory."""
    offset: int
    """In the file."""
    nbytes: int

    def joined(self, after: Region) -> Region | None:
        """Both as one; ``None`` if ``after`` does not lie right behind, in memory and in the file."""
        if (self.address + self.nbytes, self.offset + self.nbytes) != (after.address, after.offset):
            return None
        return Region(self.address, self.offset, self.nbytes + after.nbytes)


class PagedFile:
    """See the module's text.

    Args:
        folder: On the disk.
    """

    def __init__(self, folder: str) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (open as long as it is used)
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._segment = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._end = 0  # of the file

    def take(self, nbytes: int) -> tuple[Region, Tensor]:
        """Room for so many bytes, and its memory, 1D.

        Raises:
            OSError: If the disk is full, which would be a SIGBUS in a step.
        """
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._segment.numel() < nbytes:
            size = max(nbytes, SEGMENT_BYTES)
            os.ftruncate(self._file.fileno(), self._end + size)
            mapped = mmap.mmap(self._file.fileno(), size, offset=self._end)
            self._segment = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping as long as it is used
            self._end += size
        memory, offset = self._segment[:nbytes], self._end - self._segment.numel()
        os.posix_fallocate(self._file.fileno(), offset, nbytes)
        self._segment = self._segment[nbytes:]
        return Region(memory.data_ptr(), offset, nbytes), memory

    def close(self) -> None:
        """No more room is taken; what is in use stays as long as it is."""
        self._file.close()
        self._segment = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read_ahead(self, region: Region) -> None:
        """Begins to read; returns before all is there."""
        self._advise(region, mmap.MADV_WILLNEED)

    def read_to_write(self, region: Region) -> None:
        """Reads, and makes the pages ready to be written to. Other threads go on meanwhile."""
        if self._advise(region, _POPULATE_WRITE):
            self.read_ahead(region)

    def write_behind(self, region: Region) -> None:
        """Begins to write, and gives the pages up: the kernel keeps them as long as nobody else needs memory."""
        self._sync(region, _START_WRITING)
        self._advise(region, mmap.MADV_DONTNEED)

    def let_go(self, region: Region) -> None:
        """The process has these pages no more, until it touches them again."""
        self._advise(region, mmap.MADV_DONTNEED)

    def forget(self, region: Region) -> None:
        """As :meth:`write_behind` where memory is short: the region is on the disk at once, and nowhere else."""
        self._sync(region, _WRITE_AND_WAIT)
        self._advise(region, mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.fileno(), region.offset, region.nbytes, os.POSIX_FADV_DONTNEED)

    def _sync(self, region: Region, how: int) -> None:
        where = ctypes.c_int64(region.offset), ctypes.c_int64(region.nbytes)
        self._libc.sync_file_range(self._file.fileno(), *where, ctypes.c_uint(how))

    def _advise(self, region: Region, advice: int) -> int:
        return int(self._libc.madvise(ctypes.c_void_p(region.address), ctypes.c_size_t(region.nbytes), advice))
