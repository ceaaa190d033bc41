"""Saves and loads for all ranks together, on local paths and fsspec URLs.

An error that may occur on one rank only (a full disk, a damaged file) is raised on every rank with the same message,
before the next collective, which would otherwise wait for the failed rank.
"""

from __future__ import annotations

import copy
import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.checkpoint import directory, file, layout
from lightning_zero.comm.agree import Agreement
from lightning_zero.comm.shards import as_shard, local, to_host
from lightning_zero.errors import CheckpointError

Result = TypeVar("Result")


def together(agreement: Agreement, call: Callable[[], Result]) -> Result:
    """Returns the result of ``call()`` on this rank; if the call fails on any rank, all ranks raise (collective)."""
    with agreement.raise_if_any_failed():
        return call()


def is_directory(path: str) -> bool:
    fs, target = fsspec.core.url_to_fs(path)
    return bool(fs.isdir(target))


def load(path: str, weights_only: bool | None, agreement: Agreement) -> dict[str, Any]:
    """Returns the content of the checkpoint at ``path``, a file or a local sharded directory (collective).

    Every rank memory-maps a file, or reads a directory lazily. A remote file is copied once to each host, and the copy
    is deleted when all ranks have mapped it: its content lasts as long as they use it.

    Raises:
        FileNotFoundError: On every rank, if there is nothing at ``path``.
        CheckpointError: On every rank, if any rank finds the checkpoint incomplete, damaged or foreign.
    """
    fs, target = together(agreement, lambda: fsspec.core.url_to_fs(path))
    if isinstance(fs, LocalFileSystem):
        return together(agreement, lambda: _read(target, weights_only))
    hosts = agreement.gather(socket.gethostname())
    first = hosts.index(hosts[agreement.rank])
    with tempfile.TemporaryDirectory(prefix="lightning_zero-") as folder:
        copy = os.path.join(agreement.gather(folder)[first], "checkpoint")
        with agreement.raise_if_any_failed():
            if agreement.rank == first:
                if fs.isdir(target):
                    directory.local_path(path)  # raises
                if not fs.exists(target):
                    raise FileNotFoundError(f"Checkpoint file not found: {path}")
                fs.get_file(target, copy)
        return together(agreement, lambda: _read(copy, weights_only))


def load_checkpoint(path: str | os.PathLike[str], weights_only: bool = True) -> dict[str, Any]:
    """Loads a checkpoint of either form in this process alone, for use outside of a run.

    The tensors stay on the disk until they are used; ``module.load_state_dict(load_checkpoint(path)["state_dict"])``
    holds one of them in memory at a time.

    Raises:
        FileNotFoundError: If there is nothing at ``path``.
        CheckpointError: If the checkpoint is incomplete, damaged, foreign, or more than ``weights_only`` admits.
    """
    return load(os.fspath(path), weights_only, Agreement(alone=True))


def _read(path: str, weights_only: bool | None) -> dict[str, Any]:
    """Returns the content of the local ``path``."""
    is_folder = os.path.isdir(path)
    content: dict[str, Any] = directory.read(Path(path), weights_only) if is_folder else file.read(path, weights_only)
    if "state_dict" not in content or "pytorch-lightning_version" not in content:
        missing = "state_dict" if "state_dict" not in content else "pytorch-lightning_version"
        raise CheckpointError(
            f"{path} has no {missing!r}, so it is not a Lightning checkpoint: load plain weights with"
            " module.load_state_dict, or use another checkpoint."
        )
    return content


class BackgroundSaver:
    """Writes sharded checkpoints from a copy while training continues, one at a time and in order.

    ``save`` waits only for the copy, which is this rank's shards in host memory. The thread agrees with the other
    ranks' threads through this object's own :class:`Agreement`. The main thread may use that agreement only after
    :meth:`wait`: two threads at once would mix up their messages. The next call raises an error of the thread.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Waits for the previous save, then begins to write.

        Raises:
            CheckpointError: On every rank, if a save has failed on any rank since the last call.
        """
        together(self._agreement, self.wait)
        with self._agreement.raise_if_any_failed():
            # Not in the thread: when this call returns, Lightning may link to the folder or check that it exists.
            if self._agreement.rank == 0:
                directory.prepare(directory.local_path(path))
            staged = _copied(checkpoint)
        self._pending.append(self._thread.submit(directory.write, staged, path, self._agreement))

    def then(self, action: Callable[[], None]) -> None:
        """Runs ``action`` after all earlier saves, but not if one of them failed: an old checkpoint must not be deleted
        before the new one is complete."""
        before = list(self._pending)

        def run() -> None:
            if all(future.exception() is None for future in before):
                action()

        self._pending.append(self._thread.submit(run))

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
            CheckpointError: If a save has failed since the last call.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """Waits for pending saves and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _copied(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``checkpoint`` that shares no memory with training. A tied tensor stays one tensor."""
    copies: dict[int, Tensor] = {}

    def staged(path: layout.Path, tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            part = local(tensor.detach())
            mine = to_host(part, torch.empty_like(part, device="cpu"))
            copies[id(tensor)] = as_shard(mine, tensor) if isinstance(tensor, DTensor) else mine
        return copies[id(tensor)]

    on_cpu = layout.map_tensors(staged, checkpoint)
    return copy.deepcopy(on_cpu, {id(t): t for t in copies.values()})
