"""Errors that users may catch by class. Every other error is a ``ValueError`` that names the setting."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, the problem and the repair."""


class MovedError(RuntimeError):
    """A private name of another library has changed; the message names it, the version found and the tested
    versions."""
