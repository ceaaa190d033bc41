"""Writes and reads the sharded directory, whose format ``layout`` describes. Each rank appends the bytes of its shards
to one file. JSON lists where each part of a tensor lies, so reading tensors unpickles nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.checkpoint import file, layout
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.comm.agree import Agreement
from lightning_zero.comm.shards import local, rows_of, to_host
from lightning_zero.errors import CheckpointError


class Part(NamedTuple):
    """Rows of a tensor that one rank wrote."""

    start: int
    """The first row, of dim 0."""
    rows: int
    file: str
    offset: int
    """Offset of the first byte in the file."""
    nbytes: int


# -- writing ---------------------------------------------------------------------------------------------------------


def write(checkpoint: dict[str, Any], path: str, agreement: Agreement) -> None:
    """Writes ``checkpoint`` to the local folder ``path``, each rank its own shards (collective).

    All ranks use rank 0's ``path``: others may have computed a different one, from a metric that was not synchronized.

    Each block of work ends with an agreement, so a rank begins the next block only after all have finished this one.
    The marker is written last, when every rank's data is on the disk.

    Raises:
        CheckpointError: On every rank, if ``path`` is remote or any rank cannot write; an earlier checkpoint at
            ``path`` stays intact.
    """
    data = layout.DATA_PREFIX + uuid.uuid4().hex[:12]
    path, data = agreement.gather((path, data))[0]
    target = local_path(path)
    folder = target / data
    try:
        with agreement.raise_if_any_failed(), file.naming(path):
            if agreement.rank == 0:
                prepare(target)
        with agreement.raise_if_any_failed(), file.naming(path):
            folder.mkdir(parents=True, exist_ok=True)
            tensors, rest = split(checkpoint)
            own = {key: t for key, t in tensors.items() if _is_written_by(key, t, agreement.rank)}
            written = _write_tensors(own, folder / f"shards-{agreement.rank}.bin")
        everyones = agreement.gather(written, "a checkpoint's index")
        with agreement.raise_if_any_failed(), file.naming(path):
            if agreement.rank == 0:
                index = {key: [rank[key] for rank in everyones if key in rank] for key in tensors}
                with file.writing(str(folder / layout.INDEX)) as stream:
                    stream.write(json.dumps(index).encode())
                file.write(rest, str(folder / layout.REST))
                _read_index(folder)  # raises if another host wrote its file to a disk that is not shared
    except BaseException:
        if agreement.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                target.rmdir()  # succeeds only if no other save is in it
        raise
    with agreement.raise_if_any_failed(), file.naming(path):
        if agreement.rank == 0:
            _commit(target, data)


def local_path(path: str) -> Path:
    """Returns the local ``path``, which may be an fsspec URL.

    Raises:
        CheckpointError: If it is remote.
    """
    fs, target = fsspec.core.url_to_fs(path)
    if not isinstance(fs, LocalFileSystem):
        raise CheckpointError(
            f"{path} is not local, and a sharded checkpoint is a local folder: use a path on storage that is mounted on"
            " every host, or checkpoint='file'."
        )
    return Path(target)


def prepare(target: Path) -> None:
    """Makes the folder ``target``; raises ``CheckpointError`` if a file has that name."""
    if target.is_symlink():
        target.unlink()  # deletes the link of an earlier save, not the checkpoint that it points to
    if target.is_file():
        raise CheckpointError(f"{target} is a file: choose another name for the folder, or delete the file.")
    target.mkdir(parents=True, exist_ok=True)


def split(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors that get an index entry, by key, and the checkpoint with placeholders in their place."""
    tensors: dict[str, Tensor] = {}
    placeholders: dict[int, Tensor] = {}  # by id, so that a tied parameter is stored and read once

    def take(path: layout.Path, tensor: Tensor) -> Tensor:
        small = not isinstance(tensor, DTensor) and tensor.nbytes < layout.SMALL_BYTES
        if small or path[0] == layout.EXTRA or not tensor.dim():
            return local(tensor)
        if id(tensor) not in placeholders:
            key = layout.tensor_key(path)
            if key in tensors:
                raise CheckpointError(f"two tensors of the checkpoint are called {key!r}: rename one of their keys.")
            tensors[key] = tensor.detach()
            placeholders[id(tensor)] = layout.placeholder(tensor)
        return placeholders[id(tensor)]

    return tensors, layout.map_tensors(take, checkpoint)


def _is_written_by(key: str, tensor: Tensor, rank: int) -> bool:
    """Whether ``rank`` writes its part of ``tensor``. Rank 0 writes plain tensors, of which all ranks hold the same
    values. Replicas of shards divide the tensors among them."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate, mesh = tensor.device_mesh.get_coordinate(), tensor.device_mesh
    assert coordinate is not None
    return all(
        coordinate[axis] == zlib.crc32(key.encode()) % mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> dict[str, Part]:
    """Writes this rank's part of ``tensors``, one at a time, and flushes the file to the disk."""
    written: dict[str, Part] = {}
    with file.writing(str(path)) as stream:
        for key, tensor in tensors.items():
            part = to_host(local(tensor)).contiguous()
            start = rows_of(tensor)[0] if isinstance(tensor, DTensor) else 0
            written[key] = Part(start, part.shape[0], path.name, stream.tell(), part.nbytes)
            stream.write(_bytes_of(part))
    return written


def _bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU, as an array of NumPy."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _commit(target: Path, data: str) -> None:
    """Declares the data folder ``data`` inside ``target`` complete, and deletes the others."""
    file.sync_folder(target)
    with file.writing(str(target / layout.MARKER)) as stream:
        stream.write(json.dumps({"format": layout.FORMAT, "data": data}).encode())
    file.sync_folder(target.parent)
    for other in target.glob(layout.DATA_PREFIX + "*"):
        if other.name != data:
            shutil.rmtree(other)


# -- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Returns the checkpoint in the local folder ``path``, its tensors lazy.

    Args:
        path: Local folder.
        weights_only: Unless ``False``, nothing beyond torch's allow-list is unpickled.

    Raises:
        CheckpointError: If the folder is incomplete, damaged or foreign; names what is missing.
    """
    folder = _complete_data(path)
    index = _read_index(folder)
    rest = file.read(str(folder / layout.REST), weights_only)

    lazy: dict[int, Tensor] = {}

    def fill(where: layout.Path, tensor: Tensor) -> Tensor:
        if tensor.is_meta and id(tensor) not in lazy:
            key = layout.tensor_key(where)
            found = _lazy(folder, key, index.get(key, []), tensor)
            # Weights and optimizer states may stay lazy: the run copies them at once. Callbacks may keep their tensors,
            # which therefore must not depend on the disk.
            lazy[id(tensor)] = found if where[0] in _COPIED_AT_ONCE else found.materialize()
        return lazy.get(id(tensor), tensor)

    return layout.map_tensors(fill, rest)


_COPIED_AT_ONCE = ("state_dict", "optimizer_states")


def _complete_data(path: Path) -> Path:
    """Returns the data folder that ``path``'s marker declares complete.

    Raises:
        CheckpointError: If there is none.
    """
    marker = path / layout.MARKER
    if not marker.is_file():
        raise CheckpointError(
            f"{path}: {layout.MARKER} is missing, so its saving was interrupted, or it is not a sharded checkpoint of"
            " lightning_zero: use another one. In DeepSpeed's own folders run zero_to_fp32.py, and read the result"
            " with lightning_zero.load_pretrained."
        )
    try:
        content = json.loads(marker.read_text(encoding="utf-8", errors="replace"))
        found, data = int(content["format"]), Path(content["data"]).name
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{marker} is damaged, or lightning_zero did not write it ({error!r}): use another checkpoint."
        ) from error
    if found != layout.FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, this version reads {layout.FORMAT}: convert it into one file with the version"
            " that wrote it (lightning-zero convert)."
        )
    return path / data


def _read_index(folder: Path) -> dict[str, list[Part]]:
    """Returns the parts of each tensor in the data folder ``folder``.

    Raises:
        CheckpointError: If the index is damaged, or a file that it lists is missing or truncated.
    """
    path = folder / layout.INDEX
    ends = {layout.REST: 0, layout.INDEX: 0}
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        index = {key: [Part(*part) for part in parts] for key, parts in found.items()}
        for part in (part for parts in index.values() for part in parts):
            ends[part.file] = max(ends.get(part.file, 0), part.offset + part.nbytes)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged, or lightning_zero did not write it ({error}): use another checkpoint."
        ) from error
    for name, end in ends.items():
        each = folder / name
        if os.path.basename(name) != name or not each.is_file():
            raise CheckpointError(f"{each} is missing: the checkpoint is damaged, use another one.")
        if each.stat().st_size < end:
            raise CheckpointError(f"{each} is truncated: the checkpoint is damaged, use another one.")
    return index


def _lazy(folder: Path, key: str, parts: list[Part], like: Tensor) -> LazyTensor:
    """Returns the tensor named ``key``, with the shape and dtype of ``like``.

    Raises:
        CheckpointError: If the index lacks rows of the tensor, or lists another size.
    """
    if sum(part.rows for part in parts) != like.shape[0] or sum(part.nbytes for part in parts) != like.nbytes:
        raise CheckpointError(
            f"{folder}: {key!r} has shape {tuple(like.shape)} in {layout.REST}, but {layout.INDEX} lacks it or a part"
            " of it: use another checkpoint."
        )
    return LazyTensor(like.shape, like.dtype, partial(_rows, folder, parts, like))


def _rows(folder: Path, parts: list[Part], like: Tensor, start: int, stop: int) -> Tensor:
    """Reads rows ``start`` to ``stop``, as :data:`~lightning_zero.checkpoint.lazy.Read` defines it."""
    rows = torch.empty((stop - start, *like.shape[1:]), dtype=like.dtype, device="cpu")
    row_bytes = like.nbytes // max(1, like.shape[0])
    for part in parts:
        first, last = max(start, part.start), min(stop, part.start + part.rows)
        if first < last:
            with open(folder / part.file, "rb") as stream:
                stream.seek(part.offset + (first - part.start) * row_bytes)
                stream.readinto(_bytes_of(rows[first - start : last - start]))
    return rows
