"""Finds the tensors behind a path in any supported form, and leaves them on the disk until they are used."""

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
    """Lazy or memory-mapped: reading some rows reads no others."""
    file: str
    key: str
    """The tensor's name in the file."""


def find(path: str, weights_only: bool | None, agreement: Agreement) -> list[Stored]:
    """Returns the weights at ``path`` (collective).

    ``path`` is a folder of safetensors or of transformers' ``pytorch_model.bin``, with or without an index; one such
    file; or a checkpoint of this package, file or folder, also at an fsspec URL.

    Raises:
        FileNotFoundError: On every rank, if there is nothing that can be read.
        CheckpointError: On every rank, if a file is damaged or foreign.
    """
    fs, target = together(agreement, lambda: fsspec.core.url_to_fs(path))
    if isinstance(fs, LocalFileSystem):
        return together(agreement, lambda: _read(Path(target), weights_only))
    content = load(path, weights_only, agreement).content  # not closed: its copy may be read until the process ends
    return _of_state(content["state_dict"], path)


def _read(path: Path, weights_only: bool | None) -> list[Stored]:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: load_pretrained reads local folders and files; download a model from the Hub with"
            " huggingface_hub.snapshot_download first."
        )
    if path.is_dir() and ((path / layout.MARKER).exists() or any(path.glob(layout.DATA_PREFIX + "*"))):
        return _of_state(directory.read(path, weights_only)["state_dict"], str(path))
    path = _main_file(path) if path.is_dir() else path
    if path.name.endswith(".index.json"):
        return _of_index(path, weights_only)
    return _of_file(path, weights_only)


def _main_file(folder: Path) -> Path:
    """Returns the file to read in a folder: an index before the files that it lists, safetensors before pickles."""
    for names in ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "pytorch_model.bin"):
        found = sorted(folder.glob(names))
        if len(found) > 1:  # prefer the name that transformers uses
            found = [p for p in found if p.name.startswith("model.")] or found
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} holds {', '.join(p.name for p in found)} and no index of them: pass the path of one file."
            )
        if found:
            return found[0]
    raise FileNotFoundError(
        f"{folder} holds neither *.safetensors nor pytorch_model.bin, and is not a checkpoint of lightning_zero: pass a"
        " folder that save_pretrained wrote, or a checkpoint. For other forms, convert them first with lightning-zero"
        " convert."
    )


def _of_index(path: Path, weights_only: bool | None) -> list[Stored]:
    try:
        places: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged or not an index ({error!r}): use another folder.") from error
    stored = []
    for name in names:
        each = path.parent / name
        if os.path.basename(name) != name or not each.is_file():
            raise CheckpointError(
                f"{each} is missing, although {path.name} lists it: complete the folder, or use another one."
            )
        there = {s.key: s for s in _of_file(each, weights_only)}
        wanted = [key for key, home in places.items() if home == name]
        if absent := [key for key in wanted if key not in there]:
            raise CheckpointError(f"{each} lacks {absent[0]!r}, which {path.name} lists there: use another folder.")
        stored += [there[key] for key in wanted]
    return stored


def _of_file(path: Path, weights_only: bool | None) -> list[Stored]:
    if path.suffix == ".safetensors":
        return [Stored(tensor, str(path), key) for key, tensor in safetensors_file.read(str(path)).items()]
    content = file.read(str(path), weights_only)
    return _of_state(content.get("state_dict", content), str(path))


def _of_state(state: dict[str, Tensor], path: str) -> list[Stored]:
    stored = [Stored(tensor, path, key) for key, tensor in state.items() if isinstance(tensor, Tensor)]
    if not stored:
        raise CheckpointError(f"{path} holds no named tensors: use another file.")
    return stored
