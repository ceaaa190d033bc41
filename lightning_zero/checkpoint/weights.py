"""Finds the tensors behind a path in any supported form, and leaves them on the disk until they are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lightning_zero.checkpoint import directory, file, layout
from lightning_zero.errors import CheckpointError


class Stored(NamedTuple):
    """A tensor on the disk."""

    tensor: Tensor
    """Lazy or memory-mapped: reading some rows reads no others."""
    file: str
    key: str
    """The tensor's name in the file."""


def find(path: Path, weights_only: bool | None) -> list[Stored]:
    """Returns the weights at the local ``path``.

    ``path`` is a folder of safetensors or of transformers' ``pytorch_model.bin``, with or without an index; one such
    file; or a checkpoint of this package, file or folder.

    Raises:
        FileNotFoundError: If there is nothing that can be read.
        CheckpointError: If a file is damaged or foreign.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: load_pretrained reads local folders and files; download a model with"
            " huggingface_hub.snapshot_download, or a checkpoint with fsspec, first."
        )
    if (path / layout.MARKER).exists():
        return _of_state(directory.read(path, weights_only)["state_dict"], str(path))
    files = _files_in(path) if path.is_dir() else [path]
    return [stored for each in files for stored in _of_file(each, weights_only)]


def _files_in(folder: Path) -> list[Path]:
    """Returns the files with a model's weights: those that an index lists, else one; safetensors before pickles."""
    for names in ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "pytorch_model.bin"):
        found = sorted(folder.glob(names))
        if len(found) > 1:  # prefer the name that transformers uses
            found = [p for p in found if p.name.startswith("model.")] or found
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} holds {', '.join(p.name for p in found)} and no index of them: pass the path of one file."
            )
        if found:
            return _listed_in(found[0]) if found[0].suffix == ".json" else found
    raise FileNotFoundError(
        f"{folder} holds neither *.safetensors nor pytorch_model.bin, and is not a checkpoint of lightning_zero: pass a"
        " folder that save_pretrained wrote, or a checkpoint. DeepSpeed's own folders: run their zero_to_fp32.py first."
    )


def _listed_in(index: Path) -> list[Path]:
    try:
        names = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        files = [index.parent / Path(name).name for name in names]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged or not an index ({error!r}): use another folder.") from error
    if missing := [each for each in files if not each.is_file()]:
        raise CheckpointError(
            f"{missing[0]} is missing, although {index.name} lists it: complete the folder, or use another one."
        )
    return files


def _of_file(path: Path, weights_only: bool | None) -> list[Stored]:
    if path.suffix == ".safetensors":
        return [Stored(tensor, str(path), key) for key, tensor in read_safetensors(str(path)).items()]
    content = file.read(str(path), weights_only)
    return _of_state(content.get("state_dict", content), str(path))


def read_safetensors(path: str) -> dict[str, Tensor]:
    """Returns the tensors of the local file ``path`` by name, memory-mapped.

    Raises:
        CheckpointError: If the file is truncated, damaged or foreign, or the library is missing.
    """
    try:
        from safetensors import SafetensorError, safe_open  # comes with transformers, timm and others
    except ImportError as error:
        raise CheckpointError(f"reading {path} needs safetensors: pip install safetensors.") from error
    try:
        opened = safe_open(path, framework="pt")
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a dictionary)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated, damaged or not a safetensors file ({error}): use another."
        ) from error


def _of_state(state: dict[str, Tensor], path: str) -> list[Stored]:
    stored = [Stored(tensor, path, key) for key, tensor in state.items() if isinstance(tensor, Tensor)]
    if not stored:
        raise CheckpointError(f"{path} holds no named tensors: use another file.")
    return stored
