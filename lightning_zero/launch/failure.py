"""Handles an exception of a run with several ranks.

After an exception the ranks may be at different places of the program, so no collective is safe. Therefore no
checkpoint is saved, the other ranks are ended, and this script begins no other run. Each rank writes its error and the
time into a file, from which the :mod:`~lightning_zero.launch.supervisor` learns which rank failed first.

Two exceptions are raised by all ranks between the same two steps: :class:`AgreedInterrupt`, after which callbacks may
save a checkpoint, and the exit after a preemption, before which one was saved.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_zero.launch.supervisor import ERROR_FILE, PREEMPTED_EXIT_CODE, RANK_LOG
from lightning_zero.private.lightning import set_on_instance

ALONE_SECONDS = 5.0
"""Seconds from an error to the exit of a rank that has a supervisor. A script that has caught the error would otherwise
continue, and the other ranks would wait for this one in their next collective."""


class AgreedInterrupt(KeyboardInterrupt):
    """Raised on all ranks between the same two steps, after Ctrl-C on one of them."""


def is_agreed(error: BaseException) -> bool:
    """Returns whether all ranks raise ``error`` between the same two steps."""
    preempted = isinstance(error, SystemExit) and error.code == PREEMPTED_EXIT_CODE
    return preempted or isinstance(error, AgreedInterrupt)


# -- for the supervisor ------------------------------------------------------------------------------------------------


def write(error: BaseException, path: str) -> None:
    """Writes ``error`` and the current time into the file ``path``, which the supervisor reads."""
    frames = traceback.walk_tb(error.__traceback__)
    # Resolved paths: rank 0's script may be called by a path with "..", but other ranks start the one without.
    place = [f"{os.path.realpath(frame.f_code.co_filename)}:{line}" for frame, line in frames]
    said: dict[str, Any] = {"at": time.time(), "agreed": is_agreed(error)}
    said |= {"summary": summary(error), "traceback": full(error), "place": [type(error).__qualname__, *place]}
    with suppress(OSError):
        Path(f"{path}.new").write_text(json.dumps(said), encoding="utf-8")
        os.replace(f"{path}.new", path)  # atomic: the supervisor never reads a part of the file


def note_scratch(error_file: str) -> None:
    """Tells the supervisor where this rank's data loader workers have their sockets. It removes them after a kill."""
    with suppress(OSError):
        os.symlink(get_temp_dir(), f"{error_file}.scratch")


def end_soon() -> None:
    """Exits this rank, which cannot continue, after :data:`ALONE_SECONDS`."""
    if ERROR_FILE in os.environ:
        timer = threading.Timer(ALONE_SECONDS, os._exit, (1,))
        timer.daemon = True
        with suppress(RuntimeError):  # no memory for a thread: running out of memory may be the error itself
            timer.start()


# -- saves -------------------------------------------------------------------------------------------------------------


def saves_on_exception(trainer: Any) -> list[Any]:
    """The callbacks that save a checkpoint when the run raises. A save is collective."""
    callbacks = [c for c in trainer.callbacks if isinstance(c, (OnExceptionCheckpoint, ModelCheckpoint))]
    return [c for c in callbacks if getattr(c, "save_on_exception", True)]


def skip_saves(trainer: Any, why: str, tells: bool = True) -> list[Callable[[], None]]:
    """Replaces saves of ``trainer`` by a line that explains why there is none; returns functions that undo this.

    A save would wait for ranks that never come, and would hide the first error. Only a rank that ``tells`` prints.
    """
    told = [] if tells else [why]

    def skip(*args: Any, **kwargs: Any) -> None:
        if not told:
            told.append(why)
            tell(f"no checkpoint is saved after this error: {why}.")

    # The callbacks too, because their code after the save relies on the checkpoint
    places = (trainer, "save_checkpoint"), *((c, "on_exception") for c in saves_on_exception(trainer))
    return [set_on_instance(owner, name, skip) for owner, name in places]


# -- the terminal ------------------------------------------------------------------------------------------------------


def report_errors() -> None:
    """Replaces ``sys.excepthook`` for uncaught errors of a run that :func:`note` has marked.

    Rank 0 shows its traceback, or one line if another rank's error, which the supervisor has shown, caused it. Other
    ranks write their traceback into their log, and nothing on the terminal.
    """
    if getattr(sys.excepthook, "func", None) is not _show:
        sys.excepthook = partial(_show, sys.excepthook)


def note(error: BaseException, headline: str, is_effect: bool = False) -> None:
    """Marks ``error``, which a run has raised. A list of errors would keep the tensors of their frames in memory.

    Args:
        error: The exception of this rank.
        headline: Names the rank, and says why it failed.
        is_effect: Whether an error of another rank, which has been shown, caused this one.
    """
    vars(error)["lightning_zero"] = headline, is_effect


def _show(otherwise: Callable[..., Any], kind: type[BaseException], error: BaseException, tb: Any) -> None:
    marked, log = vars(error).get("lightning_zero"), os.environ.get(RANK_LOG)
    if marked is None or isinstance(error, KeyboardInterrupt):
        otherwise(kind, error, tb)
    elif log is not None:  # another rank than 0
        sys.stderr.write(full(error) if log else "")
    else:
        headline, is_effect = marked
        text = f" ({summary(error)[:200]})\n" if is_effect else f"\n{full(error)}"
        sys.stderr.write(f"lightning_zero: {headline}{text}")
    sys.stderr.flush()


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
