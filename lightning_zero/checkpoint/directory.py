"""Writes and reads the sharded directory by means of ``torch.distributed.checkpoint``.

``layout`` describes the format. That library unpickles its index and non-tensor entries without restriction. So pass
only tensors to it, and read through :class:`Index`, which uses our own JSON index.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import shutil
import uuid
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from lightning_zero.checkpoint import file, layout
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.comm.agree import Agreement
from lightning_zero.errors import CheckpointError

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
    folder = target / _UNFINISHED
    try:
        with agreement.raise_if_any_failed(), file.naming(path):
            if agreement.rank == 0:
                prepare(target)
                shutil.rmtree(folder, ignore_errors=True)  # what a killed save has left
        with agreement.raise_if_any_failed(), file.naming(path):
            folder.mkdir(parents=True, exist_ok=True)
            tensors, rest = split(checkpoint)
            own = {key: t for key, t in tensors.items() if _is_written_by(key, t, agreement.rank)}
            written = pickle.dumps(write_tensors(own, folder, agreement.rank))
        everyones = agreement.gather(written, "a checkpoint's index")
        with agreement.raise_if_any_failed(), file.naming(path):
            if agreement.rank == 0:
                write_index([pickle.loads(each) for each in everyones], folder)
                file.write(rest, str(folder / layout.REST))
    except BaseException:
        if agreement.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                target.rmdir()  # succeeds only if no other save is in it
        raise
    with agreement.raise_if_any_failed(), file.naming(path):
        if agreement.rank == 0:
            commit(target, data)


_UNFINISHED = layout.DATA_PREFIX + file.UNFINISHED
"""Name of a data folder that is being written."""


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
        if small or path[0] == layout.EXTRA:
            return tensor
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


def write_tensors(tensors: dict[str, Tensor], folder: Path, rank: int) -> tuple[SavePlan, list[WriteResult]]:
    """Writes this rank's part of ``tensors`` with the planner and the writer of ``torch.distributed.checkpoint``, and
    flushes it to the disk; returns what :func:`write_index` needs.

    The library's ``save`` agrees on a global plan first, in which no part has two writers. That is known here.
    """
    # No copy ahead: the writer would use the current stream, which in a background thread is the first device's.
    writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)  # file names begin with the rank
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    return plan, writer.write_data(planner.finish_plan(plan), planner).wait()


def write_index(everyones: Sequence[tuple[SavePlan, list[WriteResult]]], folder: Path) -> None:
    """Writes both indices of the tensors in ``folder`` from all ranks' results of :func:`write_tensors`."""
    plans, results = zip(*everyones, strict=True)
    _, metadata = DefaultSavePlanner().create_global_plan(list(plans))
    FileSystemWriter(folder, sync_files=True).finish(metadata, list(results))
    with file.writing(str(folder / layout.INDEX)) as stream:
        stream.write(json.dumps(_pieces(metadata)).encode())


def _pieces(metadata: Metadata) -> dict[str, list[Piece]]:
    """Returns where each tensor lies, from the metadata of a finished writer."""

    def piece(key: str, number: int, chunk: Any) -> Piece:
        stored = metadata.storage_data[MetadataIndex(key, chunk.offsets, number)]
        return Piece(list(chunk.offsets), list(chunk.sizes), stored.relative_path, stored.offset, stored.length)

    return {
        key: [piece(key, number, chunk) for number, chunk in enumerate(entry.chunks)]
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def commit(target: Path, data: str) -> None:
    """Renames the data folder inside ``target`` to ``data``, declares it complete, and deletes older ones."""
    (target / _UNFINISHED).rename(target / data)
    Index(target / data)  # raises if another host wrote its files to a disk that is not shared
    file.sync_folder(target / data)
    file.sync_folder(target)
    with file.writing(str(target / layout.MARKER)) as stream:
        stream.write(json.dumps({"format": layout.FORMAT, "data": data}).encode())
    file.sync_folder(target.parent)
    for other in target.glob(layout.DATA_PREFIX + "*"):
        if other.name != data:
            shutil.rmtree(other)


def remove(path: str) -> bool:
    """Deletes the sharded directory at ``path``, its marker first: after a kill half-way the rest does not count as a
    checkpoint. Returns ``False``, and deletes nothing, if ``path`` is anything else."""
    fs, target = fsspec.core.url_to_fs(path)
    if not isinstance(fs, LocalFileSystem) or not os.path.isdir(target) or os.path.islink(target):
        return False
    Path(target, layout.MARKER).unlink(missing_ok=True)
    file.sync_folder(Path(target))
    shutil.rmtree(target)
    return True


# -- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Returns the checkpoint in the local folder ``path``, its tensors lazy.

    Args:
        path: Local folder.
        weights_only: Unless ``False``, nothing beyond torch's allow-list is unpickled.

    Raises:
        CheckpointError: If the folder is incomplete, damaged or foreign; names what is missing.
    """
    folder = complete_data(path)
    index = Index(folder)
    rest = file.read(str(folder / layout.REST), weights_only)

    lazy: dict[int, Tensor] = {}

    def fill(where: layout.Path, tensor: Tensor) -> Tensor:
        if tensor.is_meta and id(tensor) not in lazy:
            found = index.lazy(layout.tensor_key(where), tensor)
            # Weights and optimizer states may stay lazy: the run copies them at once. Callbacks may keep their tensors,
            # which therefore must not depend on the disk.
            lazy[id(tensor)] = found if where[0] in _COPIED_AT_ONCE else found.materialize()
        return lazy.get(id(tensor), tensor)

    return layout.map_tensors(fill, rest)


_COPIED_AT_ONCE = ("state_dict", "optimizer_states")


def is_begun(path: Path) -> bool:
    """Whether a save of this package has put something into the folder ``path``."""
    return (path / layout.MARKER).exists() or any(path.glob(layout.DATA_PREFIX + "*"))


def complete_data(path: Path) -> Path:
    """Returns the data folder that ``path``'s marker declares complete.

    Raises:
        CheckpointError: If there is none.
    """
    marker = path / layout.MARKER
    if not marker.is_file():
        raise CheckpointError(f"{path}: {layout.MARKER} is missing, so {_without_marker(path)}.")
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
    for name in (layout.REST, layout.INDEX):
        if not (path / data / name).is_file():
            raise CheckpointError(f"{path / data / name} is missing: the checkpoint is damaged, use another one.")
    return path / data


def _without_marker(path: Path) -> str:
    if (path / "zero_to_fp32.py").is_file():
        return (
            "it is not a sharded checkpoint of lightning_zero but DeepSpeed's own: run the zero_to_fp32.py in it, and"
            " read the result with lightning_zero.load_pretrained"
        )
    if is_begun(path) or not any(path.iterdir()):  # killed before or after it had made its data folder
        return "its saving was interrupted: use another checkpoint"
    return "it is not a sharded checkpoint of lightning_zero: use another checkpoint"


class Piece(NamedTuple):
    """A part of a tensor that one rank wrote: an archive of ``torch.save`` inside a file."""

    offsets: list[int]
    """Offset in the tensor, by dim."""
    sizes: list[int]
    file: str
    start: int
    """Offset of its first byte in the file."""
    nbytes: int


class Index:
    """The tensors in a data folder; reads any rows of any tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / layout.INDEX
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self._pieces = {key: [Piece(*piece) for piece in pieces] for key, pieces in found.items()}
            self._require_files()
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged, or lightning_zero did not write it ({error}): use another checkpoint."
            ) from error

    def lazy(self, key: str, like: Tensor) -> LazyTensor:
        """Returns the tensor named ``key``, with the shape and dtype of ``like``.

        Raises:
            CheckpointError: If the index lacks the tensor or a part of it, or lists another shape.
        """
        pieces, shape = self._pieces.get(key, []), like.shape
        found = [math.prod(piece.sizes) for piece in pieces if len(piece.sizes) == len(shape)]
        if key not in self._pieces or sum(found) != like.numel():
            raise CheckpointError(
                f"{self.folder}: {key!r} has shape {tuple(shape)} in {layout.REST}, but {layout.INDEX} lacks it or a"
                " part of it: use another checkpoint."
            )
        return LazyTensor(shape, like.dtype, partial(self._rows, key, shape, like.dtype))

    def _rows(self, key: str, shape: Sequence[int], dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Reads rows ``start`` to ``stop``, as :data:`~lightning_zero.checkpoint.lazy.Read` defines it."""
        if not shape:
            return self._stored(key, self._pieces[key][0], dtype)
        rows = torch.empty((stop - start, *shape[1:]), dtype=dtype, device="cpu")
        for piece in self._pieces[key]:
            at = piece.offsets[0]
            first, last = max(start, at), min(stop, at + piece.sizes[0])
            if first < last:
                inner = [slice(o, o + size) for o, size in zip(piece.offsets[1:], piece.sizes[1:], strict=True)]
                target = rows[(slice(first - start, last - start), *inner)]
                target.copy_(self._stored(key, piece, dtype)[first - at : last - at])
        return rows

    def _stored(self, key: str, piece: Piece, dtype: torch.dtype) -> Tensor:
        with open(self.folder / piece.file, "rb") as stream:
            stream.seek(piece.start)
            content = io.BytesIO(stream.read(piece.nbytes))
        try:
            tensor = torch.load(content, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            tensor = error
        if not isinstance(tensor, Tensor) or (list(tensor.shape), tensor.dtype) != (piece.sizes, dtype):
            raise CheckpointError(
                f"{self.folder / piece.file}: {key!r} should be {dtype} {piece.sizes} but is {tensor!r:.200}: use"
                " another checkpoint."
            )
        return tensor

    def _require_files(self) -> None:
        ends: dict[str, int] = {}
        for piece in (piece for pieces in self._pieces.values() for piece in pieces):
            ends[piece.file] = max(ends.get(piece.file, 0), piece.start + piece.nbytes)
        for name, end in ends.items():
            path = self.folder / name
            if os.path.basename(name) != name or not path.is_file():
                raise CheckpointError(f"{path} is missing: the checkpoint is damaged, use another one.")
            if path.stat().st_size < end:
                raise CheckpointError(f"{path} is truncated: the checkpoint is damaged, use another one.")
