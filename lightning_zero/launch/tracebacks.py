"""Formats errors for a screen: the user's frames in full, and frames of libraries folded into one line."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

FULL = "LIGHTNING_ZERO_FULL_TRACEBACK"
"""Environment variable: 1 shows tracebacks in full."""
_OURS = str(Path(__file__).resolve().parents[1])
_STDLIB = tuple({os.path.realpath(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")})
_MAX_OWN_FRAMES = 8
_MAX_MESSAGE_LINES = 12


def whole(error: BaseException) -> str:
    """Returns the traceback as Python prints it."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def folded(error: BaseException) -> str:
    """Returns the traceback of ``error`` in at most about 30 lines.

    It has the user's frames and the innermost one, the number of omitted frames, the message, and a line for the cause.
    """
    if os.environ.get(FULL) == "1":
        return whole(error)
    lines = ["Traceback (most recent call last):", *_frames(error), *_message(error)]
    if (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        lines.append(f"caused by {summary(cause)}{where}")
    return "\n".join(lines) + "\n"


def summary(error: BaseException) -> str:
    """Returns type and message in one line."""
    first, *more = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    return f"{name}: {first}{' ...' if more else ''}" if first else name


def place(error: BaseException) -> list[str]:
    """Returns file and line of each frame, which ranks compare.

    Paths are resolved: rank 0's script may be called by a path with ``..``, but other ranks start the one without.
    """
    frames = traceback.walk_tb(error.__traceback__)
    return [f"{os.path.realpath(frame.f_code.co_filename)}:{lineno}" for frame, lineno in frames]


def is_told_by_its_message(error: BaseException) -> bool:
    """Returns whether the message alone explains ``error``: a check of this package has raised it about its input.

    There is then no user frame between the launcher and the check, so a traceback would add nothing.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not isinstance(error, (ValueError, OSError, RuntimeError, ModuleNotFoundError)):
        return False
    started = max((i for i, frame in enumerate(frames) if frame.filename == _LAUNCHER), default=-1)
    ours = frames[-1].filename.startswith(_OURS + os.sep)
    return ours and started >= 0 and not any(is_users(frame.filename) for frame in frames[started:])


_LAUNCHER = str(Path(__file__).resolve().with_name("launcher.py"))


def is_users(filename: str) -> bool:
    """Returns whether a file belongs to neither a library, nor Python, nor this package."""
    path = os.path.realpath(filename)
    if filename.startswith("<") or path.startswith(_OURS + os.sep):
        return False
    return "site-packages" not in path and "dist-packages" not in path and not is_python(filename)


def is_python(filename: str) -> bool:
    """Returns whether a file belongs to Python's standard library."""
    path = os.path.realpath(filename)
    return path.startswith(_STDLIB) and "site-packages" not in path


def _frames(error: BaseException) -> Iterator[str]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [i for i, frame in enumerate(frames) if is_users(frame.filename)][-_MAX_OWN_FRAMES:]
    shown = sorted({*own, len(frames) - 1} - {-1})
    for before, i in zip([-1, *shown], shown, strict=False):
        if left_out := i - before - 1:
            yield f"  [{left_out} frames of libraries]"
        yield f'  File "{frames[i].filename}", line {frames[i].lineno}, in {frames[i].name}'
        if frames[i].line:
            yield f"    {frames[i].line}"


def _message(error: BaseException) -> list[str]:
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    more = len(lines) - _MAX_MESSAGE_LINES
    return lines if more <= 1 else [*lines[:_MAX_MESSAGE_LINES], f"[{more} more lines]"]
