"""A file mapped into memory, whose pages are read ahead and written behind.

Writes to a mapped tensor reach the file through the kernel's page cache, which gives memory back when others need it.
The file has no name, so nothing is left behind however the process ends.
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
"""Size of one mapping, which reserves no disk space: large, because each mapping takes a file descriptor."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, from Linux 5.14 on; the module mmap does not have it
_START_WRITING, _WRITE_AND_WAIT = 2, 7  # SYNC_FILE_RANGE_WRITE, and with WAIT_BEFORE and WAIT_AFTER; linux/fs.h


class Region(NamedTuple):
    """A page-aligned part of a :class:`PagedFile`."""

    address: int
    """Address in memory."""
    offset: int
    """Offset in the file, in bytes."""
    nbytes: int

    def joined(self, after: Region) -> Region | None:
        """Return both as one region; ``None`` unless ``after`` follows directly, in memory and in the file."""
        if (self.address + self.nbytes, self.offset + self.nbytes) != (after.address, after.offset):
            return None
        return Region(self.address, self.offset, self.nbytes + after.nbytes)


class PagedFile:
    """Allocates regions of one unnamed file; see the module docstring.

    Args:
        folder: A folder on the disk, in which the file is created.
    """

    def __init__(self, folder: str) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (stays open until close)
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._segment = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._end = 0  # size of the file in bytes

    def take(self, nbytes: int) -> tuple[Region, Tensor]:
        """Allocate ``nbytes``, rounded up to pages; return the region and its memory (1D, uint8).

        Raises:
            OSError: If the disk is full. Without the allocation here, a full disk would be a SIGBUS in a step.
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
        """End allocation; regions in use stay valid until their tensors are freed."""
        self._file.close()
        self._segment = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read_ahead(self, region: Region) -> None:
        """Start reading; returns before the region is in memory."""
        self._advise(region, mmap.MADV_WILLNEED)

    def read_to_write(self, region: Region) -> None:
        """Read, and make the pages ready for writes. Other threads continue meanwhile."""
        if self._advise(region, _POPULATE_WRITE):
            self.read_ahead(region)

    def write_behind(self, region: Region) -> None:
        """Start writing and release the pages; the kernel caches them as long as nobody else needs memory."""
        self._sync(region, _START_WRITING)
        self._advise(region, mmap.MADV_DONTNEED)

    def let_go(self, region: Region) -> None:
        """Release the process's pages of the region, until the process touches them again."""
        self._advise(region, mmap.MADV_DONTNEED)

    def forget(self, region: Region) -> None:
        """Write the region and evict it from memory, as :meth:`write_behind` does when memory is short."""
        self._sync(region, _WRITE_AND_WAIT)
        self._advise(region, mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.fileno(), region.offset, region.nbytes, os.POSIX_FADV_DONTNEED)

    def _sync(self, region: Region, how: int) -> None:
        where = ctypes.c_int64(region.offset), ctypes.c_int64(region.nbytes)
        self._libc.sync_file_range(self._file.fileno(), *where, ctypes.c_uint(how))

    def _advise(self, region: Region, advice: int) -> int:
        return int(self._libc.madvise(ctypes.c_void_p(region.address), ctypes.c_size_t(region.nbytes), advice))
