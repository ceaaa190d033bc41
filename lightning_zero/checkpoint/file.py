"""Writes and reads one file, Lightning's own form: written under another name and renamed, read memory-mapped."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from lightning_zero.errors import CheckpointError

UNFINISHED = ".partial"
"""Suffix of files and folders that are being written."""


def write(checkpoint: dict[str, Any], path: str) -> None:
    """Writes ``checkpoint`` to the file or fsspec URL ``path``. After a failure ``path`` has its earlier content.

    Raises:
        CheckpointError: If the checkpoint cannot be written, naming ``path``; no other file is left behind.
    """
    with writing(path) as stream:
        torch.save(checkpoint, stream)


@contextlib.contextmanager
def writing(path: str) -> Iterator[IO[bytes]]:
    """Yields a stream whose content appears under ``path`` all at once, when the block ends without an error.

    Raises:
        CheckpointError: As :func:`write` does.
    """
    fs, target = fsspec.core.url_to_fs(path)
    with naming(path):
        if not isinstance(fs, LocalFileSystem):
            fs.makedirs(os.path.dirname(target), exist_ok=True)
            with fs.transaction, fs.open(target, "wb") as stream:
                yield stream
            return
        folder = Path(target).parent
        folder.mkdir(parents=True, exist_ok=True)
        if Path(target).is_dir():
            raise CheckpointError(f"{path} is a folder: choose another name for the file, or delete the folder.")
        remove_stale(folder, ".")
        aside = folder / unfinished(f".{Path(target).name}")
        try:
            with open(aside, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())  # before the rename: a power failure must not leave the name without content
            os.replace(aside, target)
            sync_folder(folder)
        finally:
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Turns errors of the system or torch's writer into a :class:`CheckpointError` that names ``path`` and a repair."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # torch's stream writer raises RuntimeError if the disk is full
        within = error.__context__ if isinstance(error, RuntimeError) else None
        cause = within if isinstance(within, OSError) else error
        if isinstance(cause, RuntimeError) and "inline_container" not in str(cause):
            raise
        raise CheckpointError(
            f"{path} could not be written on {socket.gethostname()} ({cause}). Its earlier content is untouched: free"
            " space, change permissions, or choose another dirpath or Trainer(default_root_dir=...)."
        ) from error


def unfinished(name: str) -> str:
    """Returns the temporary name of ``name`` while this process writes it."""
    return f"{name}.{socket.gethostname()}-{os.getpid()}{UNFINISHED}"


def remove_stale(folder: Path, prefix: str) -> None:
    """Deletes files and folders that begin with ``prefix`` in ``folder`` and that an ended process of this host left
    unfinished, and their parent folders if these are then empty."""
    for leftover in folder.glob(f"{prefix}*.{socket.gethostname()}-*{UNFINISHED}"):
        pid = leftover.name.removesuffix(UNFINISHED).rpartition("-")[2]
        # Without /proc (not Linux) nothing shows whether the process is alive, so its files must stay.
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            with contextlib.suppress(OSError):  # other processes may delete it at the same time
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                    leftover.parent.rmdir()
                else:
                    leftover.unlink()


def sync_folder(folder: Path) -> None:
    """Makes a rename inside ``folder`` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str, weights_only: bool | None) -> dict[str, Any]:
    """Returns the dictionary in the local file ``path``, its tensors memory-mapped.

    Args:
        path: Local file.
        weights_only: Unless ``False``, nothing beyond torch's allow-list is unpickled.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is truncated, damaged or foreign, or ``weights_only`` refuses it.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    try:
        mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and cannot be memory-mapped
        content = torch.load(path, map_location="cpu", weights_only=weights_only is not False, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refused(path, error)) from error
    except Exception as error:  # reading a damaged pickle may raise any exception
        raise CheckpointError(
            f"{path} is truncated, damaged or not a torch checkpoint ({type(error).__name__}: {_line(error)}):"
            " use another checkpoint."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__} instead of a Lightning checkpoint's dictionary."
        )
    return content


def _refused(path: str, error: pickle.UnpicklingError) -> str:
    if not zipfile.is_zipfile(path):
        return f"{path} is truncated, damaged or not a torch checkpoint ({_line(error)}): use another checkpoint."
    return (
        f"{path} holds more than torch's weights_only allow-list ({_line(error)}). If you trust its origin, pass"
        " weights_only=False."
    )


def _line(error: BaseException) -> str:
    text = str(error)
    found = text.find("GLOBAL ")  # torch names the refused class in the middle of a long message
    return text[found:].split(" was not", 1)[0] if found >= 0 else text.split("\n", 1)[0][:200]
