"""Errors that users may catch by class. All others are a ``ValueError`` that names the setting."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read: names the file, what is wrong or missing, and the repair."""


class MovedError(RuntimeError):
    """A private part of another library is not where it was tested: names it, the version found and those to use."""
