"""Writes and reads one file, Lightning's own form: written under another name and renamed, read memory-mapped."""

from __future__ import annotations

import contextlib
import os
import pickle
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
"""Suffix of files and folders that are being written. A killed save leaves them, and the next save of the same name
replaces them."""


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
        aside = folder / f".{Path(target).name}{UNFINISHED}"
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
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"{path} could not be written on {socket.gethostname()} ({cause}). Its earlier content is untouched: free"
            " space, change permissions, or choose another dirpath or Trainer(default_root_dir=...)."
        ) from error


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
    mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and cannot be memory-mapped
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only is not False, mmap=mapped)
    except Exception as error:  # reading a damaged pickle may raise any exception
        if mapped and isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path} holds more than torch's weights_only allow-list ({_line(error)}). If you trust its origin,"
                " pass weights_only=False."
            ) from error
        raise CheckpointError(
            f"{path} is truncated, damaged or not a torch checkpoint ({type(error).__name__}: {_line(error)}):"
            " use another checkpoint."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__} instead of a Lightning checkpoint's dictionary."
        )
    return content


def _line(error: BaseException) -> str:
    text = str(error)
    found = text.find("GLOBAL ")  # torch names the refused class in the middle of a long message
    return text[found:].split(" was not", 1)[0] if found >= 0 else text.split("\n", 1)[0][:200]
