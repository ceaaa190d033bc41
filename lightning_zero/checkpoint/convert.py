"""Converts one form into another, in one process, without an accelerator, one tensor at a time.

Tensors pass through memory-mapped files next to the target, so that the kernel may drop their pages. Converting needs
disk space for the target twice, and memory for its largest tensor twice (as read, and in its place).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_zero.checkpoint import directory, file, layout
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.checkpoint.store import is_directory, load
from lightning_zero.comm.agree import Agreement
from lightning_zero.errors import CheckpointError

MAX_SHARD_SIZE = "5GB"
"""Larger safetensors are split into several files, as in transformers."""


def convert(
    source: str,
    target: str,
    form: str | None = None,
    *,
    weights_only: bool | None = None,
    prefix: str | None = None,
) -> str:
    """Writes the checkpoint ``source`` to ``target`` as ``form``; returns the form.

    Args:
        source, target: Paths. ``target`` must not exist.
        form: One of :data:`~lightning_zero.checkpoint.FORMATS`; by default that of the other two checkpoints, ``file``
            and ``sharded``, which ``source`` does not have.
        weights_only: Unless ``False``, nothing beyond torch's allow-list is unpickled.
        prefix: For safetensors: prefix to remove from the parameters' names. By default the name of the module's only
            child, as in a LightningModule that holds ``self.model``.

    Raises:
        FileNotFoundError: If ``source`` does not exist.
        CheckpointError: If ``source`` cannot be read, or ``target`` cannot be written.
    """
    if target.endswith(".safetensors"):
        raise CheckpointError(f"{target}: safetensors go into a folder; use --format safetensors and a folder's name.")
    form = form or ("file" if is_directory(source) else "sharded")
    fs, place = fsspec.core.url_to_fs(target)
    if fs.exists(place):
        raise CheckpointError(f"{target} already exists: choose another name, or delete it.")
    agreement = Agreement(alone=True)
    _write(load(source, weights_only, agreement), target, form, agreement, prefix)
    return form


def _write(content: dict[str, Any], target: str, form: str, agreement: Agreement, prefix: str | None) -> None:
    if form == "safetensors":
        weights = without_prefix(dict(content["state_dict"]), prefix)
        _write_safetensors(layout.map_tensors(_on_disk(target), weights), target)
        if "hf_config" in content:  # from_pretrained needs it
            text = json.dumps(content["hf_config"], indent=2)
            Path(target, "config.json").write_text(text + "\n", encoding="utf-8")
        return
    content = layout.map_tensors(_on_disk(target), content)
    if form == "file":
        file.write(content, target)
    else:
        directory.write(content, target, agreement)


def _on_disk(target: str) -> Callable[[layout.Path, Tensor], Tensor]:
    """Returns a function for :func:`layout.map_tensors` that copies lazy tensors into files next to ``target``."""
    fs, place = fsspec.core.url_to_fs(target)
    folder = Path(place).absolute().parent if isinstance(fs, LocalFileSystem) else Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[int, Tensor] = {}

    def on_disk(path: layout.Path, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, LazyTensor):
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = _in_file(tensor, str(folder))
        return done[id(tensor)]

    return on_disk


def _in_file(tensor: LazyTensor, folder: str) -> Tensor:
    """Copies ``tensor`` into an unnamed file in ``folder``, which disappears with the process."""
    if not tensor.numel():
        return tensor.materialize()
    with tempfile.NamedTemporaryFile(dir=folder) as pages, file.naming(folder):
        os.posix_fallocate(pages.fileno(), 0, tensor.nbytes)  # on a full disk, writing to the pages would raise SIGBUS
        mapped = torch.from_file(pages.name, shared=True, size=tensor.numel(), dtype=tensor.dtype, device="cpu")
        return mapped.view(tensor.shape).copy_(tensor)


# -- safetensors -----------------------------------------------------------------------------------------------------


def without_prefix(state: dict[str, Tensor], prefix: str | None) -> dict[str, Tensor]:
    """Removes ``prefix`` from every name of ``state``; by default the first component, if all names share it.

    Raises:
        CheckpointError: If a name does not begin with ``prefix``.
    """
    if prefix is None:
        first = {name.partition(".")[0] for name in state}
        prefix = f"{first.pop()}." if len(first) == 1 and all("." in name for name in state) else ""
    prefix = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    others = [name for name in state if not name.startswith(prefix)]
    if others:
        raise CheckpointError(f"prefix={prefix!r}: {others[0]!r} lacks this prefix; use prefix='' to keep all names.")
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def _write_safetensors(state: dict[str, Tensor], target: str) -> None:
    try:
        from huggingface_hub import save_torch_state_dict  # handles tied weights, and the index of several files
    except ImportError as error:
        raise CheckpointError(
            "writing safetensors needs huggingface_hub and safetensors: pip install 'lightning-zero[examples]'."
        ) from error
    os.makedirs(target)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_torch_state_dict(state, target, max_shard_size=MAX_SHARD_SIZE)
