"""One safetensors file as tensors that are read when they are used.

The format is public (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the
header, and the tensors' bytes, row after row. Reading it directly takes memory for the wanted rows alone, where a
mapping of the file would count its pages as this process's.
"""

from __future__ import annotations

import json
import math
import os
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "C64": torch.complex64,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_LENGTH_BYTES = 8


class _Place(NamedTuple):
    """Of one tensor in its file."""

    path: str
    start: int
    """First byte, from the file's beginning."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def read(path: str) -> dict[str, LazyTensor]:
    """The tensors of the local file ``path``, by their names in it.

    Raises:
        CheckpointError: For a truncated, damaged or foreign file.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise CheckpointError(f"{path} is truncated or no safetensors file: use another one.")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            begin = _LENGTH_BYTES + length
            places = {name: _place(path, begin, entry) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path}: its header is damaged ({error!r}): use another file.") from error
    for name, place in places.items():
        if place.start + _nbytes(place) > size:
            raise CheckpointError(f"{path} is truncated: {name!r} ends behind its last byte; use another file.")
    return {name: LazyTensor(place.shape, place.dtype, partial(_rows, place)) for name, place in places.items()}


def _place(path: str, begin: int, entry: Any) -> _Place:
    first, end = entry["data_offsets"]
    place = _Place(path, begin + first, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    if first < 0 or end - first != _nbytes(place):
        raise ValueError(f"{entry} does not fit together")
    return place


def _nbytes(place: _Place) -> int:
    return math.prod(place.shape) * place.dtype.itemsize


def _rows(place: _Place, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop``, as :data:`~lightning_zero.checkpoint.lazy.Read` has it."""
    shape = (stop - start, *place.shape[1:]) if place.shape else ()
    each = math.prod(place.shape[1:]) * place.dtype.itemsize
    nbytes = math.prod(shape) * place.dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=place.dtype, device="cpu")
    rows = bytearray(nbytes)
    with open(place.path, "rb", buffering=0) as stream:
        stream.seek(place.start + start * each)
        rest = memoryview(rows)
        while rest:
            got = stream.readinto(rest)  # at most 2 GiB at a time
            if not got:
                raise CheckpointError(f"{place.path} ended before it did when it was opened: it was changed meanwhile.")
            rest = rest[got:]
    return torch.frombuffer(rows, dtype=place.dtype).view(shape)
