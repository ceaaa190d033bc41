"""Formats errors, and tells the user's frames from those of libraries."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_OURS = str(Path(__file__).resolve().parents[1])
_STDLIB = tuple({os.path.realpath(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")})


def full(error: BaseException) -> str:
    """Returns the traceback as Python prints it."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


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
    if filename.startswith("<") or path.startswith((_OURS + os.sep, *_STDLIB)):
        return False
    return "site-packages" not in path and "dist-packages" not in path
