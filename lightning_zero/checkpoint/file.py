"""One file, Lightning's own form: written aside and renamed, read memory-mapped."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import socket
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from lightning_zero.errors import CheckpointError

UNFINISHED = ".partial"
"""Ends the names of files and folders that are being written."""


def write(checkpoint: dict[str, Any], path: str) -> None:
    """Writes ``checkpoint`` to the file or fsspec URL ``path``, which then holds all of it, or after a failure its
    earlier content.

    Raises:
        CheckpointError: If it cannot be written, naming ``path``; nothing is left beside it.
    """
    with writing(path) as stream:
        torch.save(checkpoint, stream)


@contextlib.contextmanager
def writing(path: str) -> Iterator[IO[bytes]]:
    """A stream whose content appears under ``path`` all at once, when the block ends without an error.

    Raises:
        CheckpointError: As :func:`write`.
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
                os.fsync(stream.fileno())  # before the rename, or a power failure could leave the name without content
            os.replace(aside, target)
            sync_folder(folder)
        finally:
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Turns errors of the system or torch's writer into a :class:`CheckpointError` of ``path``, with a repair."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # torch's stream writer has RuntimeError for a full disk
        within = error.__context__ if isinstance(error, RuntimeError) else None
        cause = within if isinstance(within, OSError) else error
        if isinstance(cause, RuntimeError) and "inline_container" not in str(cause):
            raise
        raise CheckpointError(
            f"{path} could not be written ({cause}). What was there before is untouched. {repair(path, cause)}"
        ) from error


def repair(path: str, cause: BaseException | None) -> str:
    """Advice about a ``cause`` for which ``path`` could not be written."""
    fs, target = fsspec.core.url_to_fs(path)
    if not isinstance(fs, LocalFileSystem):
        return "The storage did not take it: look at its room and its permissions, or choose another dirpath."
    try:
        folder = Path(target).parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            return f"{folder} is no folder: {_ELSEWHERE}."
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return (
                f"On {socket.gethostname()} the folder {folder} ({stat.filemode(folder.stat().st_mode)}) is read-only"
                f" for user {os.geteuid()}: change its permissions, or {_ELSEWHERE}."
            )
        free = shutil.disk_usage(folder).free
        return f"{free / 2**20:.0f} MiB are free at {folder}: free space or choose another dirpath."
    except OSError as error:  # a message must not fail on one rank alone
        return f"How much is free there is unknown ({error}): choose another dirpath."


_ELSEWHERE = "choose another dirpath or Trainer(default_root_dir=...)"


def unfinished(name: str) -> str:
    """The name of ``name`` while this process writes it."""
    return f"{name}.{socket.gethostname()}-{os.getpid()}{UNFINISHED}"


def remove_stale(folder: Path, prefix: str) -> None:
    """Deletes what begins with ``prefix`` in ``folder`` and processes of this host had not finished when they ended;
    and the folders in which nothing else is."""
    for leftover in folder.glob(f"{prefix}*.{socket.gethostname()}-*{UNFINISHED}"):
        pid = leftover.name.removesuffix(UNFINISHED).rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            with contextlib.suppress(OSError):  # others may be doing the same
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


def read(path: str, weights_only: bool | None, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """The dictionary in the local file ``path``, its tensors memory-mapped.

    Args:
        path: Local file.
        weights_only: Unless ``False``, nothing beyond torch's allow-list is unpickled.
        part, parts: The share of the records to compare with their checksums (ranks share the work).

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: For a truncated, damaged or foreign file, or one that ``weights_only`` refuses.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    try:
        mapped = zipfile.is_zipfile(path)
        if mapped:
            _verify(path, part, parts)
        # files of torch before 1.6 are no archives and cannot be mapped
        content = torch.load(path, map_location="cpu", weights_only=weights_only is not False, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refused(path, error)) from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{path} is truncated, damaged or no checkpoint of torch ({type(error).__name__}: {_line(error)}):"
            " use another checkpoint."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__} instead of a Lightning checkpoint's dictionary."
        )
    return content


def _verify(path: str, part: int, parts: int) -> None:
    """torch.load compares no checksums, so a flipped bit would become a weight."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist()[part::parts]:
            with archive.open(record) as stream:
                while stream.read(2**20):
                    pass  # raises BadZipFile, naming the record, at its end


def _refused(path: str, error: pickle.UnpicklingError) -> str:
    if not zipfile.is_zipfile(path):
        return f"{path} is truncated, damaged or no checkpoint of torch ({_line(error)}): use another checkpoint."
    return (
        f"{path} holds more than torch's weights_only allow-list ({_line(error)}). If you trust its origin, pass"
        " weights_only=False."
    )


def _line(error: BaseException) -> str:
    text = str(error)
    found = text.find("GLOBAL ")  # torch names the refused class in the middle of a page of advice
    return text[found:].split(" was not", 1)[0] if found >= 0 else text.split("\n", 1)[0][:200]
