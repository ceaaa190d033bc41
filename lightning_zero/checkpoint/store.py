"""Saving and loading for all ranks together, on local paths and fsspec URLs.

An error that only one rank may meet (a full disk, a damaged file) is raised on every rank with the same message, before
the next collective could wait for a rank that has failed.
"""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_zero.checkpoint import directory, file, layout
from lightning_zero.comm.agree import Agreement
from lightning_zero.errors import CheckpointError

Result = TypeVar("Result")


def together(agreement: Agreement, call: Callable[[], Result]) -> Result:
    """The result of ``call()`` on this rank; if it fails on any rank, its error is raised on all (collective)."""
    with agreement.raise_if_any_failed():
        return call()


def is_directory(path: str) -> bool:
    fs, target = fsspec.core.url_to_fs(path)
    return bool(fs.isdir(target))


class Loaded:
    """A checkpoint's content, and the local copy that must stay on the disk while it is read."""

    def __init__(self, content: dict[str, Any], fetched: Path | None = None) -> None:
        self.content = content
        self._fetched = fetched

    def close(self) -> None:
        """Deletes the local copy of a remote checkpoint, once no rank of this host reads it any more."""
        if self._fetched is not None:
            shutil.rmtree(self._fetched, ignore_errors=True)
            self._fetched = None


def load(path: str, weights_only: bool | None, agreement: Agreement) -> Loaded:
    """The checkpoint at ``path``, a file or a sharded directory (collective).

    A local one is memory-mapped, or read lazily, by every rank; a remote one is copied to each host once.

    Raises:
        FileNotFoundError: On every rank, if there is nothing at ``path``.
        CheckpointError: On every rank, if any finds it incomplete, damaged or foreign.
    """
    fs, target = together(agreement, lambda: fsspec.core.url_to_fs(path))
    if isinstance(fs, LocalFileSystem):
        share = agreement.rank, agreement.world_size
        return Loaded(together(agreement, lambda: _read(target, weights_only, *share)))
    fetched, *of_host = _fetch(path, agreement)
    try:
        return Loaded(together(agreement, lambda: _read(str(fetched / "checkpoint"), weights_only, *of_host)), fetched)
    except BaseException:
        shutil.rmtree(fetched, ignore_errors=True)
        raise


def load_checkpoint(path: str | os.PathLike[str], weights_only: bool = True) -> dict[str, Any]:
    """A checkpoint of either form, for use outside of a run, in this process alone.

    Its tensors stay on the disk until they are used; ``module.load_state_dict(load_checkpoint(path)["state_dict"])``
    holds one of them in memory at a time.

    Raises:
        FileNotFoundError: If there is nothing at ``path``.
        CheckpointError: If it is incomplete, damaged, foreign, or more than ``weights_only`` admits.
    """
    loaded = load(os.fspath(path), weights_only, Agreement(alone=True))
    atexit.register(loaded.close)
    return loaded.content


def _read(path: str, weights_only: bool | None, part: int, parts: int) -> dict[str, Any]:
    """The content of the local ``path``; this rank compares checksums of the ``part``-th of ``parts`` shares."""
    content: dict[str, Any] = (
        directory.read(Path(path), weights_only, part, parts)
        if os.path.isdir(path)
        else file.read(path, weights_only, part, parts)
    )
    if "state_dict" not in content or "pytorch-lightning_version" not in content:
        missing = "state_dict" if "state_dict" not in content else "pytorch-lightning_version"
        raise CheckpointError(
            f"{path} has no {missing!r}, so it is no Lightning checkpoint: load plain weights into the module with"
            " module.load_state_dict, or use another checkpoint."
        )
    return content


def _fetch(path: str, agreement: Agreement) -> tuple[Path, int, int]:
    """A folder on this host with a copy named ``checkpoint``, made by the first rank of each host; which of the host's
    ranks this is, and how many there are."""
    hosts = agreement.gather(socket.gethostname())
    of_host = [rank for rank, host in enumerate(hosts) if host == hosts[agreement.rank]]
    first = of_host[0]

    def fetch() -> str:
        if agreement.rank != first:
            return ""
        fs, target = fsspec.core.url_to_fs(path)
        if not fs.exists(target):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        folder = tempfile.mkdtemp(prefix="lightning_zero-")
        fs.get(target, os.path.join(folder, "checkpoint"), recursive=bool(fs.isdir(target)))
        return folder

    folder = Path(agreement.gather(together(agreement, fetch))[first])
    return folder, of_host.index(agreement.rank), len(of_host)


def remove(path: str) -> bool:
    """Deletes the sharded directory at ``path``; False if there is something else, which is left alone."""
    fs, target = fsspec.core.url_to_fs(path)
    if isinstance(fs, LocalFileSystem) and os.path.isdir(target) and not os.path.islink(target):
        directory.remove(Path(target))
        return True
    return False


class BackgroundSaver:
    """Writes sharded checkpoints from a copy while training goes on, one at a time and in order.

    ``save`` waits only for the copy, this rank's shards in host memory. The thread agrees with the other ranks' threads
    through an :class:`Agreement` of this object's own. The main thread uses it only after :meth:`wait`: two threads at
    once would mix their messages up. An error is raised by the next call.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Begins to write; waits first for the save before.

        Raises:
            CheckpointError: On every rank, if an earlier save has failed on any since the last call.
        """
        together(self._agreement, self.wait)
        # Not in the thread: Lightning may link to the folder, or check that it exists, as soon as this call returns.
        together(self._agreement, lambda: directory.prepare(path) if self._agreement.rank == 0 else None)
        staged = together(self._agreement, lambda: _copied(checkpoint))
        self._pending.append(self._thread.submit(directory.write, staged, path, self._agreement))

    def then(self, action: Callable[[], None]) -> None:
        """Runs ``action`` after all earlier saves are complete, and never if one failed: an old checkpoint is deleted
        only when the new one is there."""
        before = list(self._pending)

        def run() -> None:
            if all(future.exception() is None for future in before):
                action()

        self._pending.append(self._thread.submit(run))

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointError: If a save has failed since the last call.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _copied(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``checkpoint`` that shares nothing with the training; a tied tensor stays one."""
    copies: dict[int, Tensor] = {}

    def staged(path: layout.Path, tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to("cpu", copy=True)  # of a DTensor: its shard
        return copies[id(tensor)]

    on_cpu = layout.map_tensors(staged, checkpoint)
    return copy.deepcopy(on_cpu, {id(t): t for t in copies.values()})
