"""``offload.path``: checks the folder on the fast disk before anything is sharded."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_zero.comm.agree import Agreement


def usable_folder(given: str | None, default: str) -> tuple[Path, str]:
    """Returns the folder and its name in errors. The folder is ``given``, or else ``default``, which is then created.

    Raises:
        ValueError: If the folder is missing or cannot be created.
    """
    base, host = Path(given if given is not None else default), socket.gethostname()
    name = f"offload.path={str(base)!r}" + ("" if given is not None else " (the default)")
    if given is None:
        try:
            base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{name} cannot be created on {host} ({error.strerror}): set offload.path to a folder on a fast disk."
            ) from error
    if not base.is_dir():
        raise ValueError(f"{name} is not a folder on {host}: create it, mount the disk, or set another path.")
    return base, name


@contextmanager
def said_of(name: str) -> Iterator[None]:
    """Converts an ``OSError`` of a first write into a ``ValueError`` that names the repair."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{name} cannot be written to on {socket.gethostname()} ({error.strerror}): change its permissions or set"
            " another path."
        ) from error


def require_room(base: Path, name: str, need_bytes: float) -> None:
    """Raises ``ValueError`` if the disk has less than ``need_bytes`` free."""
    free = shutil.disk_usage(base).free
    if free < need_bytes:
        raise ValueError(
            f"{name} has {free / 2**30:.3g} GiB free on {socket.gethostname()}, but this run writes about"
            f" {need_bytes / 2**30:.3g} GiB there: free some space, set another path, or use offload='cpu'."
        )


def folder_for_files(given: str | None, default: str, need_bytes: float, agreement: Agreement, is_first: bool) -> str:
    """Returns the folder in which the ranks of this host may create unnamed temporary files (collective).

    Args:
        given: ``offload.path``; must exist on every host.
        default: Used if ``given`` is ``None``.
        need_bytes: Bytes that the ranks of one host write.
        agreement: Of all ranks.
        is_first: Whether this rank is the first one of its host, which does the checks.

    Raises:
        ValueError: On every rank, if on any host the path is missing, is not writable or has too little free space.
    """
    with agreement.raise_if_any_failed():
        if is_first:
            base, name = usable_folder(given, default)
            with said_of(name), tempfile.TemporaryFile(dir=base) as probe:
                probe.write(b"0")
            require_room(base, name, need_bytes)
    return given if given is not None else default
