"""Shards in files: ``offload="nvme"``.

[Tensors] Host shards (see ``engine``) in the memory of mapped files: the master weights, and those optimizer states
that have the shape of their parameter. Gradients stay in host memory. All other code sees ordinary tensors.

The kernel's page cache does the rest. It reads pages that are accessed, writes changed ones, and gives their memory
back when others need it. So a run that fits into memory rarely waits for the disk.

Files have no names, so nothing is left behind however the process ends. A file's space is free when its tensors are.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_zero.engines.fsdp2 import private
from lightning_zero.private.torch import EnableTorchFunction

_OPEN_FILES = "/proc/self/fd/"
_ALIGNED_BYTES = 64
"""Alignment of each tensor of a unit."""


class FileShards:
    """This rank's shards and states in files; see the module docstring.

    Args:
        folder: On the disk; the files are created there.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def take(self, group: private.Group) -> None:
        """Move the shards of ``group`` into one file."""

        def move(shards: Sequence[Tensor]) -> list[Tensor]:
            sizes = [-(-shard.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for shard in shards]
            rooms = self._map(sum(sizes)).split(sizes)
            places = [room[: shard.nbytes].view(shard.dtype) for room, shard in zip(rooms, shards, strict=True)]
            return [place.copy_(shard) for place, shard in zip(places, shards, strict=True)]

        with torch.no_grad():
            private.move_shards(group, move)

    def keep(self, state: Tensor) -> Tensor:
        """Return ``state``, or its copy in a file if it is in memory."""
        if self.holds(state) or not state.numel():
            return state
        return self.empty_like(state).copy_(state.detach())

    def empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a contiguous tensor of zeros in a file."""
        dtype = tensor.dtype if dtype is None else dtype
        return self._map(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)

    @contextmanager
    def creating_states(self) -> Iterator[None]:
        """Create in files the states that an optimizer makes by ``torch.zeros_like`` of a shard, as Adam does: all of
        them together may not fit into memory."""
        with EnableTorchFunction(), _NewStates(self):
            yield

    def holds(self, tensor: Tensor) -> bool:
        """Whether the local ``tensor`` is in a file."""
        return (tensor.untyped_storage().filename or "").startswith(_OPEN_FILES)

    def _map(self, nbytes: int) -> Tensor:
        """Map a new file of ``nbytes`` zeros (1D, uint8).

        Raises:
            OSError: If the disk is full. Without the allocation here, a full disk would be a SIGBUS in a step.
        """
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return torch.from_file(f"{_OPEN_FILES}{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)


class _NewStates(TorchFunctionMode):
    def __init__(self, files: FileShards) -> None:
        super().__init__()
        self._files = files

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.zeros_like and args[0].numel() and self._files.holds(args[0]):
            return self._files.empty_like(args[0], (kwargs or {}).get("dtype"))
        return func(*args, **(kwargs or {}))
