"""Memory for the whole tensors that rank 0 collects for one file.

A run whose shards fill a host's memory has no room for all of them whole. What goes beyond half of the free memory lies
in the pages of files without a name, beside the checkpoint's: ordinary tensors for callbacks and for ``torch.save``,
while the kernel writes them out for whoever needs the room.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.errors import CheckpointError
from lightning_zero.host import available_host_bytes, own_room_bytes

GIB = 1 << 30


class Collected:
    """See the module's text. One object lasts for one checkpoint.

    Args:
        folders: Where the files may be made: the first that is a folder is taken, else the system's for such files.
    """

    def __init__(self, folders: Sequence[str | None]) -> None:
        self._folder = next((f for f in folders if f is not None and Path(f).is_dir()), tempfile.gettempdir())
        self._left: int | None = None  # of plain memory, in bytes; asked for on rank 0 alone

    def why_not(self, nbytes: int) -> CheckpointError | None:
        """Why this process cannot collect as much: pages of files count, too, under a limit of its address space."""
        room = own_room_bytes()
        if room is None or nbytes <= room:
            return None
        return CheckpointError(
            f"checkpoint='file' collects {nbytes / GIB:.2f} GiB on rank 0, whose address space may grow by"
            f" {room / GIB:.2f} GiB only (ulimit -v): raise the limit, or use checkpoint='sharded', which does not"
            " collect."
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As ``torch.empty``."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._left is None:
            self._left = available_host_bytes() // 2
        if nbytes > self._left:
            try:
                return paged(shape, dtype, self._folder)
            except OSError as error:  # on this rank alone, in the middle of a collective
                warnings.warn(
                    f"Half of the free memory holds the first part of a checkpoint, and {self._folder} takes no more"
                    f" ({error.strerror}): the rest goes into memory, too. checkpoint='sharded' collects nothing.",
                    stacklevel=2,
                )
                self._left = sys.maxsize
        self._left -= nbytes
        return torch.empty(shape, dtype=dtype, device="cpu")


def paged(shape: Sequence[int], dtype: torch.dtype, folder: str) -> Tensor:
    """As ``torch.empty``, in the pages of a file in ``folder`` without a name: whatever ends the process, nothing is
    left behind.

    Raises:
        OSError: If the disk is full, which would be a SIGBUS in the first write.
    """
    numel = math.prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=numel, dtype=dtype, device="cpu").view(shape)
