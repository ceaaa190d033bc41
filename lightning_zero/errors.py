"""Errors of ours that users catch by name. Everything else is a ``ValueError`` that names the setting."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read: names the file, what is wrong or missing, and the repair."""
