"""One safetensors file as tensors that are read when they are used, by the library of that name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.errors import CheckpointError


def read(path: str) -> dict[str, LazyTensor]:
    """The tensors of the local file ``path``, by their names in it.

    Raises:
        CheckpointError: For a truncated, damaged or foreign file, and where the library is missing.
    """
    try:
        from safetensors import SafetensorError, safe_open  # comes with transformers, timm and others
    except ImportError as error:
        raise CheckpointError(f"{path} is read by safetensors: pip install safetensors.") from error
    try:
        opened = safe_open(path, framework="pt")
        return {name: _lazy(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118  (no dictionary)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated, damaged or no safetensors file ({error}): use another.") from error


def _lazy(mapped: Any) -> LazyTensor:
    def rows(start: int, stop: int) -> Tensor:
        """As :data:`~lightning_zero.checkpoint.lazy.Read` has it; copied, so that the file is let go of."""
        found: Tensor = mapped[start:stop] if shape else mapped[...]
        return found.clone()

    shape = mapped.get_shape()
    return LazyTensor(shape, rows(0, 0).dtype, rows)
