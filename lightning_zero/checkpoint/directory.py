"""The sharded directory, on ``torch.distributed.checkpoint``.

Its format is described in ``layout``. That library unpickles its index and non-tensor entries freely, so only tensors
are given to it, and its index is read by :class:`Index` through a list of the few classes it consists of.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import pickle
import shutil
import tempfile
import time
import uuid
import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from lightning_zero.checkpoint import file, layout, owner
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.comm.agree import Agreement
from lightning_zero.errors import CheckpointError
from lightning_zero.private.torch import PICKLED, MemoryFormats, StorageInfo

# -- writing ---------------------------------------------------------------------------------------------------------


def write(checkpoint: dict[str, Any], path: str, agreement: Agreement) -> None:
    """Writes ``checkpoint`` to the folder or fsspec URL ``path``, each rank its own shards (collective).

    Rank 0's ``path`` counts for all: others may have computed another one, from a metric that was not synchronised.

    Each block of work ends with an agreement, so a rank begins the next one only after all have finished this one: the
    marker is written last, when every rank's data is on the disk.

    Raises:
        CheckpointError: On every rank, if any cannot write; an earlier checkpoint at ``path`` stays whole.
    """
    path, data = agreement.gather((path, layout.DATA_PREFIX + uuid.uuid4().hex[:12]))[0]
    fs, target = fsspec.core.url_to_fs(path)
    is_local = isinstance(fs, LocalFileSystem)
    with contextlib.ExitStack() as stack:
        temporary = "" if is_local else stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning_zero-"))
        folder = Path(target) / data if is_local else Path(temporary)
        try:
            with agreement.raise_if_any_failed(), file.naming(path):
                if agreement.rank == 0:
                    prepare(path)
                    remove_leftovers(path)
            with agreement.raise_if_any_failed(), file.naming(path):
                folder.mkdir(parents=True, exist_ok=True)
                if agreement.rank == 0 and is_local:
                    stack.callback(os.close, owner.mark(folder))
            with agreement.raise_if_any_failed(), file.naming(path):
                tensors, rest = split(checkpoint)
                if agreement.rank:  # plain tensors (buffers) are equal on all ranks: rank 0 writes them, as in one file
                    tensors = {key: t for key, t in tensors.items() if isinstance(t, DTensor)}
                write_tensors(tensors, folder, agreement)
                if agreement.rank == 0:
                    file.write(rest, str(folder / layout.REST))
                if not is_local:
                    for each in folder.iterdir():
                        fs.put_file(str(each), f"{target}/{data}/{each.name}")
        except BaseException:
            if agreement.rank == 0:
                with contextlib.suppress(OSError):
                    fs.rm(f"{target}/{data}", recursive=True)
                with contextlib.suppress(OSError):
                    fs.rmdir(target)  # if the save would have been its first
            raise
        with agreement.raise_if_any_failed(), file.naming(path):
            if agreement.rank == 0:
                commit(path, data)


def prepare(path: str) -> None:
    """Makes the folder; raises if a file has its name."""
    fs, target = fsspec.core.url_to_fs(path)
    if isinstance(fs, LocalFileSystem) and os.path.islink(target):
        os.unlink(target)  # the link of an earlier save, never the checkpoint it points to
    if fs.isfile(target):
        raise CheckpointError(f"{path} is a file: choose another name for the folder, or delete the file.")
    fs.makedirs(target, exist_ok=True)


def split(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors worth an entry of their own by key, and the checkpoint with placeholders in their stead."""
    tensors: dict[str, Tensor] = {}
    placeholders: dict[int, Tensor] = {}  # one object for a tied parameter, so that it is stored and read once

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


def write_tensors(tensors: dict[str, Tensor], folder: Path, agreement: Agreement) -> None:
    """``tensors`` and their index, by the planner and the writer of ``torch.distributed.checkpoint``, flushed to the
    disk. Collective.

    Its ``save`` calls them in the same order, and its collectives connect rank 0 to every other rank for good; here
    plans and results travel along the agreement's tree.
    """
    # To copy ahead the writer takes the current stream, which in a background thread is of the host's first device.
    writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    planner, is_first = _Materializing(), agreement.rank == 0

    def plan_of_rank() -> SavePlan:
        planner.set_up_planner(tensors, writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first, rank=agreement.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_of_all(plans: list[SavePlan]) -> list[SavePlan]:
        whole, _ = planner.create_global_plan(plans)
        return writer.prepare_global_plan(whole)

    def write_data() -> Any:
        with file.naming(str(folder)):  # on this rank, which knows how much is free here
            return writer.write_data(planner.finish_plan(plan), planner).wait()

    def write_index(results: list[Any]) -> list[None]:
        with file.naming(str(folder)):
            writer.finish(planner.metadata, results)
        return [None] * len(results)

    plan = agreement.decide(plan_of_rank, plan_of_all, "a checkpoint's plan")
    agreement.decide(write_data, write_index, "a checkpoint's index")


def commit(path: str, data: str) -> None:
    """Declares the folder ``data`` inside ``path`` complete and deletes the others, unless a run still writes them."""
    fs, target = fsspec.core.url_to_fs(path)
    if isinstance(fs, LocalFileSystem):
        Index(Path(target) / data)  # finds files that other hosts have written to disks of their own
        file.sync_folder(Path(target) / data)
        file.sync_folder(Path(target))
    with fs.open(f"{target}/{data}/.metadata", "rb") as index, file.writing(f"{path}/{layout.MARKER}") as stream:
        stream.write(layout.marker_text(data, index.read()).encode())
    if isinstance(fs, LocalFileSystem):
        file.sync_folder(Path(target).parent)
        (Path(target) / data / owner.MARK).unlink(missing_ok=True)
    for other in fs.ls(target, detail=False):
        name = other.rstrip("/").rpartition("/")[2]
        is_alive = isinstance(fs, LocalFileSystem) and _is_being_written(Path(target) / name)
        if name.startswith(layout.DATA_PREFIX) and name != data and not is_alive:
            fs.rm(other, recursive=True)


def remove_leftovers(path: str) -> None:
    """Deletes unfinished data of killed saves in ``path`` and in the folders beside it: data that no marker declares
    complete and whose mark names an owner that has ended."""
    fs, target = fsspec.core.url_to_fs(path)
    if not isinstance(fs, LocalFileSystem):  # there a save appears only once it is whole on this host
        return
    for mark in Path(target).absolute().parent.glob(f"*/{layout.DATA_PREFIX}*/{owner.MARK}"):
        data, checkpoint = mark.parent, mark.parents[1]
        with contextlib.suppress(OSError, ValueError, CheckpointError):  # others may be doing the same
            if _is_being_written(data):
                continue
            marker = checkpoint / layout.MARKER
            if marker.is_file() and layout.read_marker(marker.read_text(), str(checkpoint))[0] == data.name:
                mark.unlink()  # the save was killed after the marker was written and before the mark was removed
                continue
            shutil.rmtree(data)
            checkpoint.rmdir()  # unless it holds anything else


def _is_being_written(data: Path) -> bool:
    mark = data / owner.MARK
    try:
        if not owner.lives(mark):
            return False
        if owner.is_locked(mark):
            return True
    except (OSError, ValueError, KeyError, TypeError):  # no mark, or none of ours
        return False
    newest = max((entry.stat().st_mtime for entry in data.iterdir()), default=0.0)
    return time.time() - newest < _STALE_SECONDS  # another host's, of which no lock is to be seen here


_STALE_SECONDS = 24 * 3600.0
"""A save that has written nothing for this long has ended."""


def remove(path: Path) -> None:
    """Deletes a sharded directory, its marker first: if it is killed half-way, the rest is no checkpoint."""
    (path / layout.MARKER).unlink(missing_ok=True)
    file.sync_folder(path)
    shutil.rmtree(path)


# -- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path, weights_only: bool | None, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """The checkpoint in the local folder ``path``, its tensors lazy.

    Args:
        path: Local folder.
        weights_only: Unless ``False``, nothing beyond torch's allow-list is unpickled.
        part, parts: The share of the tensors to compare with their checksums (ranks share the work).

    Raises:
        CheckpointError: For an incomplete, damaged or foreign folder, naming what is missing.
    """
    folder = complete_data(path)
    index = Index(folder)
    index.verify(part, parts)
    rest = file.read(str(folder / layout.REST), weights_only)

    lazy: dict[int, Tensor] = {}

    def fill(where: layout.Path, tensor: Tensor) -> Tensor:
        if tensor.is_meta and id(tensor) not in lazy:
            found = index.lazy(layout.tensor_key(where), tensor)
            # Weights and optimizer states are copied into the run at once and may stay lazy; callbacks and others may
            # keep their tensors, which must not depend on the disk.
            lazy[id(tensor)] = found if where[0] in _COPIED_AT_ONCE else found.materialize()
        return lazy.get(id(tensor), tensor)

    return layout.map_tensors(fill, rest)


_COPIED_AT_ONCE = ("state_dict", "optimizer_states")


def complete_data(path: Path) -> Path:
    """The data folder that ``path``'s marker declares complete.

    Raises:
        CheckpointError: If there is none.
    """
    marker = path / layout.MARKER
    if not marker.is_file():
        # Empty: the save was killed before it had made its data folder.
        begun = any(path.glob(layout.DATA_PREFIX + "*")) or (path.is_dir() and not any(path.iterdir()))
        what = "its saving was interrupted" if begun else "it is no sharded checkpoint of lightning_zero"
        beside = [p.parent.name for p in sorted(path.absolute().parent.glob(f"*/{layout.MARKER}"))]
        raise CheckpointError(
            f"{path}: {layout.MARKER} is missing, so {what}. "
            + (f"Complete ones beside it: {', '.join(beside)}." if beside else "Use another checkpoint.")
        )
    data, crc32 = layout.read_marker(marker.read_text(encoding="utf-8", errors="replace"), str(path))
    folder = path / data
    for name in (layout.REST, ".metadata"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing: the checkpoint is damaged, use another one.")
    if crc32 is not None and zlib.crc32((folder / ".metadata").read_bytes()) != crc32:
        raise CheckpointError(f"{folder / '.metadata'} is damaged (its checksum is another): use another checkpoint.")
    return folder


_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in "Metadata TensorStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta".split()
} | {
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *PICKLED,
}
_WITH_STATE = (
    Metadata, TensorStorageMetadata, ChunkStorageMetadata, TensorProperties, MetadataIndex, StorageMeta, StorageInfo
)  # fmt: skip


class _IndexUnpickler(pickle._Unpickler):  # Python's, not C's: only there load_build can be overridden
    """Knows the classes an index of tensors consists of and no other, and gives state to their instances only: given
    to a class itself, state would change it for the whole process."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def load_build(self) -> None:
        if type(self.stack[-2]) not in _WITH_STATE:  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it gives state to something that has none")
        if type(self.stack[-2]) is TensorProperties:  # type: ignore[attr-defined]
            self.stack[-1] = self.stack[-1][:5]  # type: ignore[attr-defined]  # torch 2.15 adds strides, unused here
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            # the path that the checkpoint was written to, which nothing uses
            return lambda *parts: "/".join(map(str, parts))
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        known = (module, name) in _ALLOWED or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)


def _memory_format(kind: Any, name: str) -> Any:
    """An enumeration's member is pickled as an attribute of its class by Python 3.11.0-3.11.3, else as its value."""
    if kind is not MemoryFormats:
        raise pickle.UnpicklingError("an attribute of anything else than a memory format does not belong there")
    return MemoryFormats[name]


class Index(FileSystemReader):
    """The tensors in a data folder: reads any rows of any of them, unpickling nothing that is not on the list."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        try:
            self.metadata = self.read_metadata()
            self.set_up_storage_reader(self.metadata, is_coordinator=True)
            self._require_whole_files()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            path = folder / ".metadata"
            raise CheckpointError(f"{path} is damaged or not ours ({error}): use another checkpoint.") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(self.folder / ".metadata", "rb") as stream:
            metadata = _IndexUnpickler(stream).load()
        if type(metadata) is not Metadata or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("it is no index")
        if not all(isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()):
            raise pickle.UnpicklingError("it lists other things than tensors")
        return metadata

    def lazy(self, key: str, like: Tensor) -> LazyTensor:
        """The tensor named ``key``, with the shape and dtype of ``like``.

        Raises:
            CheckpointError: If the index lacks it or a part of it, or has another shape or dtype.
        """
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.folder}: the tensor {key!r} is missing; use another checkpoint.")
        if entry.size != like.shape or entry.properties.dtype != like.dtype:
            raise CheckpointError(
                f"{self.folder}: {key!r} is {tuple(entry.size)} {entry.properties.dtype} in .metadata and"
                f" {tuple(like.shape)} {like.dtype} in {layout.REST}; use another checkpoint."
            )
        stored = [self.storage_data.get(MetadataIndex(key, c.offsets, i)) for i, c in enumerate(entry.chunks)]
        if None in stored or sum(math.prod(c.sizes) for c in entry.chunks) != like.numel():
            raise CheckpointError(f"{self.folder}: parts of {key!r} are missing; use another checkpoint.")
        return LazyTensor(like.shape, like.dtype, lambda start, stop: self.rows(key, start, stop))

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of dim 0 of the tensor named ``key``; all of a 0-dim tensor."""
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        shape, offsets = list(entry.size), [0] * len(entry.size)
        if shape:
            shape[0], offsets[0] = stop - start, start
        rows = torch.empty(shape, dtype=entry.properties.dtype, device="cpu")
        if rows.numel():
            wanted = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(shape))
            items = create_read_items_for_chunk_list(key, entry, [wanted])
            if sum(math.prod(item.lengths) for item in items) != rows.numel():
                raise CheckpointError(f"{self.folder}: parts of {key!r} are missing; use another checkpoint.")
            self.read_data(LoadPlan(items), _Into(rows))
        return rows

    def _require_whole_files(self) -> None:
        ends: dict[str, int] = {}
        for info in self.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            path = self.folder / name
            if os.path.basename(name) != name or not path.is_file():
                raise CheckpointError(f"{path} is missing: the checkpoint is damaged, use another one.")
            if path.stat().st_size < end:
                raise CheckpointError(
                    f"{path} is truncated: {end} bytes were written, {path.stat().st_size} are there; use another"
                    " checkpoint."
                )

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compares every ``parts``-th stored piece, from ``part`` on, with its checksum."""
        for where, info in list(self.storage_data.items())[part::parts]:
            with open(self.folder / info.relative_path, "rb") as stream, _mapped(stream) as content:
                piece = io.BytesIO(content[info.offset : info.offset + info.length])
            try:
                broken = zipfile.ZipFile(piece).testzip()
            except zipfile.BadZipFile as error:
                broken = str(error)
            if broken:
                raise CheckpointError(
                    f"{self.folder / info.relative_path} is damaged at the tensor {where.fqn!r} ({broken}): use another"
                    " checkpoint."
                )


def _mapped(stream: Any) -> mmap.mmap:
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


class _Materializing(DefaultSavePlanner):
    """Lets a checkpoint that was read lazily be written again."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.materialize() if isinstance(data, LazyTensor) else data


class _Into(DefaultLoadPlanner):
    """Reads pieces directly into one tensor."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.target = rows

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.target
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: ``tensor`` is a view of the target."""
