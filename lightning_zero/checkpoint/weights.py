"""Finds the tensors behind a path in any supported form, and leaves them on the disk until they are used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lightning_zero.checkpoint import directory, file
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

    ``path`` is a folder of safetensors or of transformers' ``pytorch_model*.bin``, all of which are read; one such
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
    if path.is_dir() and directory.is_begun(path):
        return _of_state(directory.read(path, weights_only)["state_dict"], str(path))
    files = _files_in(path) if path.is_dir() else [path]
    return [stored for each in files for stored in _of_file(each, weights_only)]


def _files_in(folder: Path) -> list[Path]:
    """Returns the files with a model's weights, safetensors before pickles."""
    for names in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        if found := sorted(folder.glob(names)):
            counts = {int(number) for each in found for number in re.findall(r"-of-(\d+)\.", each.name)}
            if counts - {len(found)}:
                raise CheckpointError(
                    f"{folder} holds {len(found)} of the {min(counts)} files of which {found[0].name} is one: complete"
                    " the folder, or pass the path of one file."
                )
            return found
    raise FileNotFoundError(
        f"{folder} holds neither *.safetensors nor pytorch_model.bin, and is not a checkpoint of lightning_zero: pass a"
        " folder that save_pretrained wrote, or a checkpoint. DeepSpeed's own folders: run their zero_to_fp32.py first."
    )


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
