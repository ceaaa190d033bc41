"""Memory for the full tensors that rank 0 collects for one file.

If shards fill a host's memory, it has no room for the full tensors. Tensors beyond half of the free memory therefore
lie in pages of unnamed files next to the checkpoint. Callbacks and ``torch.save`` see ordinary tensors, and the kernel
writes the pages out when memory is needed.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.host import available_host_bytes


class Collected:
    """Allocates the memory for one checkpoint; see the module's docstring.

    Args:
        folders: Candidates for the folder of the files. The first that exists is used, else the system's temporary one.
    """

    def __init__(self, folders: Sequence[str | None]) -> None:
        self._folder = next((f for f in folders if f is not None and Path(f).is_dir()), tempfile.gettempdir())
        self._left: int | None = None  # bytes of plain memory; found on first use, which only rank 0 has

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocates as ``torch.empty`` does, on the CPU or in pages of a file."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._left is None:
            self._left = available_host_bytes() // 2
        if nbytes > self._left:
            with contextlib.suppress(OSError):  # no room there: an error of this rank alone would leave a collective
                return paged(shape, dtype, self._folder)
        self._left -= nbytes
        return torch.empty(shape, dtype=dtype, device="cpu")


def paged(shape: Sequence[int], dtype: torch.dtype, folder: str) -> Tensor:
    """Allocates as ``torch.empty`` does, in the pages of an unnamed file in ``folder``. The file disappears with the
    process, however that ends.

    Raises:
        OSError: If the disk is full. Without this check the first write would raise SIGBUS.
    """
    numel = math.prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype, device="cpu")
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=numel, dtype=dtype, device="cpu").view(shape)
