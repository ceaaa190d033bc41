"""``offload.path``: checks of the folder on the fast disk, before anything is sharded."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_zero.comm.agree import Agreement


def usable_folder(given: str | None, default: str) -> tuple[Path, str]:
    """``given``, or ``default``, which is then made; beside it how errors name it.

    Raises:
        ValueError: If it is missing.
    """
    base, host = Path(given if given is not None else default), socket.gethostname()
    name = f"offload.path={str(base)!r}" + ("" if given is not None else " (the default)")
    if given is None:
        try:
            base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{name} cannot be made on {host} ({error.strerror}): set offload.path to a folder on a fast disk."
            ) from error
    if not base.is_dir():
        raise ValueError(f"{name} is no folder on {host}: make it, mount the disk, or set another one.")
    return base, name


@contextmanager
def said_of(name: str) -> Iterator[None]:
    """An ``OSError`` of a first write becomes a ``ValueError`` that says what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{name} cannot be written to on {socket.gethostname()} ({error.strerror}): change its permissions or set"
            " another one."
        ) from error


def require_room(base: Path, name: str, need_bytes: float) -> None:
    """Raises ``ValueError`` where the disk has less than ``need_bytes`` free."""
    free = shutil.disk_usage(base).free
    if free < need_bytes:
        raise ValueError(
            f"{name} has {free / 2**30:.3g} GiB free on {socket.gethostname()}, but this run writes about"
            f" {need_bytes / 2**30:.3g} GiB there: make room, set another path, or use offload='cpu'."
        )


def folder_for_files(given: str | None, default: str, need_bytes: float, agreement: Agreement, is_first: bool) -> str:
    """The folder in which the ranks of this host may make files that have no name (collective).

    Args:
        given: ``offload.path``; has to exist on every host.
        default: Used if ``given`` is ``None``.
        need_bytes: Written by the ranks of one host.
        agreement: Of all ranks.
        is_first: Of the ranks of this host: it looks.

    Raises:
        ValueError: On every rank: the path is missing, cannot be written to, or has too little room on some host.
    """
    with agreement.raise_if_any_failed():
        if is_first:
            base, name = usable_folder(given, default)
            with said_of(name), tempfile.TemporaryFile(dir=base) as probe:
                probe.write(b"0")
            require_room(base, name, need_bytes)
    return given if given is not None else default
