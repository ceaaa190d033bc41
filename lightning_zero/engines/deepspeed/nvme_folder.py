"""The folder for the files of NVMe offload: of one run on one host, which ends with it.

A run's folder carries a mark of its owner (host, boot, process and when that began), which the owner holds locked as
long as it lives: processes of another container with this host's name cannot be seen, but their locks can. A run that
was killed leaves its folder behind; the next run that is given the same path removes it, and nothing else: neither the
folder of a run that lives, nor one of another host, nor anything without a mark.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from lightning_zero.checkpoint import owner
from lightning_zero.comm.agree import Agreement
from lightning_zero.engines.offload_path import require_room, said_of, usable_folder

PREFIX = "lightning_zero-"


class SwapFolder:
    """A run's own folder; :meth:`close` removes it, on the process that made it."""

    def __init__(self, path: str, lock: int | None) -> None:
        """``lock``: the descriptor that holds the mark locked, where the folder was made."""
        self.path = path
        self._lock = lock
        self._made_by = os.getpid() if lock is not None else None
        if lock is not None:
            atexit.register(self.close)

    def close(self) -> None:
        """Removes the folder and its content; harmless to call again and in a forked child."""
        if self._made_by == os.getpid():
            self._made_by = None
            atexit.unregister(self.close)
            shutil.rmtree(self.path, ignore_errors=True)
            assert self._lock is not None
            os.close(self._lock)


def open_folder(
    given: str | None,
    default: str,
    need_bytes: float,
    agreement: Agreement,
    local_rank: int,
    node_rank: int,
    say: Callable[[str], None],
) -> SwapFolder:
    """This run's folder under ``given``, or under ``default``, which is then made and announced (collective).

    Args:
        given: ``offload.path``; has to exist on every host.
        default: Used if ``given`` is ``None``.
        need_bytes: Written by the ranks of one host.
        agreement: Of all ranks.
        local_rank: 0 makes and owns the folder of its host.
        node_rank: Number of the host.
        say: Shows one line to the user.

    Raises:
        ValueError: On every rank: the path is missing, cannot be written to, or has too little space on some host.
    """
    error: BaseException | None = None
    made = None
    if local_rank == 0:
        try:
            made = _make(given, default, need_bytes, say)
        except (ValueError, OSError) as found:
            error = found if isinstance(found, ValueError) else ValueError(str(found))
    try:
        agreement.agree(error)
        paths = dict(agreement.gather((node_rank, made[0]) if made else (-1, None), "choosing the folder for offload"))
    except BaseException:
        if made:
            shutil.rmtree(made[0], ignore_errors=True)
            os.close(made[1])
        raise
    return SwapFolder(paths[node_rank], made[1] if made else None)


def swap_bytes(
    numel: int, param_bytes: int, ranks: int, ranks_per_host: int, optimizer: bool, parameters: bool
) -> float:
    """Bytes that the ranks of one host write: per element of their shares fp32 master weight, two Adam states and
    gradient, 16 bytes (ZeRO-Infinity, arXiv:2104.07857, section 3), and the parameter itself."""
    each = (16 if optimizer else 0) + (param_bytes if parameters else 0)
    return numel * each * ranks_per_host / ranks


def remove_leftovers(base: Path, say: Callable[[str], None]) -> None:
    """Deletes the folders of this host's runs that are no more."""
    for mark in sorted(base.glob(f"{PREFIX}*/{owner.MARK}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not ours, or already going
            if not owner.lives(mark):
                say(f"offload: {mark.parent}, which a run left behind that was killed, is removed.")
                shutil.rmtree(mark.parent, ignore_errors=True)


def _make(given: str | None, default: str, need_bytes: float, say: Callable[[str], None]) -> tuple[str, int]:
    base, name = usable_folder(given, default)
    remove_leftovers(base, say)
    with said_of(name):
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{socket.gethostname()}-{os.getpid()}-", dir=base))
        lock = owner.mark(folder)
    try:
        require_room(base, name, need_bytes)
    except ValueError:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        raise
    say(f"offload: files go to {folder} and are removed at the end.")
    return str(folder), lock
