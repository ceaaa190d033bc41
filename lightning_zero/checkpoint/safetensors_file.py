"""Reads a safetensors file as lazy tensors, with the library of that name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.errors import CheckpointError


def read(path: str) -> dict[str, LazyTensor]:
    """Returns the tensors of the local file ``path`` by their names in it.

    Raises:
        CheckpointError: If the file is truncated, damaged or foreign, or the library is missing.
    """
    try:
        from safetensors import SafetensorError, safe_open  # comes with transformers, timm and others
    except ImportError as error:
        raise CheckpointError(f"reading {path} needs safetensors: pip install safetensors.") from error
    try:
        opened = safe_open(path, framework="pt")
        return {name: _lazy(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118  (not a dictionary)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated, damaged or not a safetensors file ({error}): use another."
        ) from error


def _lazy(mapped: Any) -> LazyTensor:
    def rows(start: int, stop: int) -> Tensor:
        """Reads rows as :data:`~lightning_zero.checkpoint.lazy.Read` defines; copies them to release the file."""
        found: Tensor = mapped[start:stop] if shape else mapped[...]
        return found.clone()

    shape = mapped.get_shape()
    return LazyTensor(shape, rows(0, 0).dtype, rows)
