"""Formats errors."""

from __future__ import annotations

import os
import traceback


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
