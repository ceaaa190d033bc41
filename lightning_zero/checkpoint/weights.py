"""Finds the tensors behind a path, whatever wrote them, and leaves them on the disk until they are used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_zero.checkpoint import directory, file, layout, safetensors_file
from lightning_zero.checkpoint.store import load, together
from lightning_zero.comm.agree import Agreement
from lightning_zero.errors import CheckpointError


class Stored(NamedTuple):
    """A tensor on the disk."""

    tensor: Tensor
    """Lazy or memory-mapped: taking its rows reads no others."""
    file: str
    key: str
    """Its name there."""


def find(path: str, weights_only: bool | None, agreement: Agreement) -> list[Stored]:
    """The weights at ``path`` (collective): a folder of safetensors or of transformers' ``pytorch_model.bin``, with or
    without an index; one such file; a portable checkpoint, file or folder, also at an fsspec URL.

    Raises:
        FileNotFoundError: On every rank, if there is nothing that can be read.
        CheckpointError: On every rank, for damaged or foreign files.
    """
    fs, target = together(agreement, lambda: fsspec.core.url_to_fs(path))
    if isinstance(fs, LocalFileSystem):
        share = agreement.rank, agreement.world_size
        return together(agreement, lambda: _read(Path(target), weights_only, *share))
    content = load(path, weights_only, agreement).content  # its copy may be read until the process ends
    return _of_state(content["state_dict"], path)


def _read(path: Path, weights_only: bool | None, part: int, parts: int) -> list[Stored]:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: load_pretrained reads local folders and files; fetch a model of the Hub with"
            " huggingface_hub.snapshot_download first."
        )
    if path.is_dir() and ((path / layout.MARKER).exists() or any(path.glob(layout.DATA_PREFIX + "*"))):
        return _of_state(directory.read(path, weights_only, part, parts)["state_dict"], str(path))
    path = _main_file(path) if path.is_dir() else path
    if path.name.endswith(".index.json"):
        return _of_index(path, weights_only, part, parts)
    return _of_file(path, weights_only, part, parts)


def _main_file(folder: Path) -> Path:
    """The file that stands for the folder: an index before what it indexes, safetensors before pickles."""
    for names in ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "pytorch_model.bin"):
        found = sorted(folder.glob(names))
        if len(found) > 1:  # the name that transformers gives them
            found = [p for p in found if p.name.startswith("model.")] or found
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} holds {', '.join(p.name for p in found)} and no index that joins them: give the file."
            )
        if found:
            return found[0]
    raise FileNotFoundError(
        f"{folder} holds neither *.safetensors nor pytorch_model.bin, and is no checkpoint of lightning_zero: give a"
        " folder that save_pretrained wrote, a checkpoint, or, for other forms, what lightning-zero convert makes"
        " of them."
    )


def _of_index(path: Path, weights_only: bool | None, part: int, parts: int) -> list[Stored]:
    try:
        places: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged or no index ({error!r}): use another folder.") from error
    stored = []
    for name in names:
        each = path.parent / name
        if os.path.basename(name) != name or not each.is_file():
            raise CheckpointError(f"{each} is missing, though {path.name} names it: the folder is incomplete.")
        there = {s.key: s for s in _of_file(each, weights_only, part, parts)}
        wanted = [key for key, home in places.items() if home == name]
        if absent := [key for key in wanted if key not in there]:
            raise CheckpointError(f"{each} lacks {absent[0]!r}, which {path.name} says it holds: use another folder.")
        stored += [there[key] for key in wanted]
    return stored


def _of_file(path: Path, weights_only: bool | None, part: int, parts: int) -> list[Stored]:
    if path.suffix == ".safetensors":
        return [Stored(tensor, str(path), key) for key, tensor in safetensors_file.read(str(path)).items()]
    content = file.read(str(path), weights_only, part, parts)
    return _of_state(content.get("state_dict", content), str(path))


def _of_state(state: dict[str, Tensor], path: str) -> list[Stored]:
    stored = [Stored(tensor, path, key) for key, tensor in state.items() if isinstance(tensor, Tensor)]
    if not stored:
        raise CheckpointError(f"{path} holds no tensors by name: use another file.")
    return stored
