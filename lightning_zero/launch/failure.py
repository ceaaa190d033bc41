"""Handles an exception of a run with several ranks.

After an exception the ranks may be at different places of the program, so no collective is safe. Therefore no
checkpoint is saved, the other ranks are ended, and this script begins no other run. Each rank writes its error and the
time into a file, from which the :mod:`~lightning_zero.launch.supervisor` learns which rank failed first.

The exit after a preemption is not an error: all ranks raise it between the same two steps, after a save.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from functools import cache, partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_zero.launch.supervisor import ERROR_FILE, PREEMPTED_EXIT_CODE
from lightning_zero.private.lightning import set_on_instance


def is_preempted(error: BaseException) -> bool:
    """Returns whether ``error`` is the exit after a preemption."""
    return isinstance(error, SystemExit) and error.code == PREEMPTED_EXIT_CODE


# -- for the supervisor ------------------------------------------------------------------------------------------------


def write(error: BaseException) -> None:
    """Writes ``error`` and the current time into this rank's file, which the supervisor reads, if there is one."""
    if (path := os.environ.get(ERROR_FILE)) is None:
        return
    said = {"at": time.time(), "summary": summary(error), "traceback": full(error)}
    with suppress(OSError):
        Path(f"{path}.new").write_text(json.dumps(said), encoding="utf-8")
        os.replace(f"{path}.new", path)  # atomic: the supervisor never reads a part of the file


def note_scratch() -> None:
    """Tells the supervisor where this rank's data loader workers have their sockets. It removes them after a kill."""
    if path := os.environ.get(ERROR_FILE):
        with suppress(OSError):
            os.symlink(get_temp_dir(), f"{path}.scratch")


# -- saves -------------------------------------------------------------------------------------------------------------


def saves_on_exception(trainer: Any) -> list[Any]:
    """The callbacks that save a checkpoint when the run raises. A save is collective."""
    callbacks = [c for c in trainer.callbacks if isinstance(c, (OnExceptionCheckpoint, ModelCheckpoint))]
    return [c for c in callbacks if getattr(c, "save_on_exception", True)]


def skip_saves(trainer: Any, why: str) -> ExitStack:
    """Replaces saves of ``trainer`` by a line that explains why there is none; the result undoes this.

    A save would wait for ranks that never come, and would hide the first error.
    """

    said = cache(partial(rank_zero_only(tell), f"no checkpoint is saved after this error: {why}."))  # once

    def skip(*args: Any, **kwargs: Any) -> None:
        said()

    undo = ExitStack()
    undo.callback(set_on_instance(trainer, "save_checkpoint", skip))
    for callback in saves_on_exception(trainer):  # its code after the save relies on the checkpoint
        undo.callback(set_on_instance(callback, "on_exception", skip))
    return undo


# -- the terminal ------------------------------------------------------------------------------------------------------


def tell(text: str) -> None:
    """Prints one line for the user, marked as this package's."""
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)


def full(error: BaseException) -> str:
    """Returns the traceback as Python prints it."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def summary(error: BaseException) -> str:
    """Returns type and message in one line."""
    first, *more = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    return f"{name}: {first}{' ...' if more else ''}" if first else name
