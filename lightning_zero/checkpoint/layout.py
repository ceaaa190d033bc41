"""Defines the parts of a checkpoint, in memory and on disk.

*One file*: the dictionary that Lightning writes under DDP, by ``torch.save``.

*Sharded directory*::

    x.ckpt/
        checkpoint.json     the marker, written last: {"format": 2, "data": "data-1f0c…"}
        data-1f0c…/
            rest.pt         the same dictionary, with a meta tensor in place of each one in *.distcp; torch.save
            *.distcp        the tensors, by torch.distributed.checkpoint; each rank its own shards
            index.json      the file and bytes of each part of a tensor
            .metadata       the same for torch.distributed.checkpoint, a pickle: never read here

The marker names the data folder that is complete, so a killed save leaves the earlier checkpoint valid. While it is
written, a data folder is called ``data-.partial``. Both forms have one key in addition to Lightning's: :data:`EXTRA`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EXTRA = "lightning_zero"
"""Key of every rank's random states and loader states. Lightning does not save these, and ignores the key."""
MARKER = "checkpoint.json"
REST = "rest.pt"
INDEX = "index.json"
DATA_PREFIX = "data-"
FORMAT = 2
SMALL_BYTES = 4096
"""Plain tensors below this size stay in ``rest.pt``: an index entry would cost more than they do."""

Path = tuple[Any, ...]


def map_tensors(fn: Callable[[Path, Tensor], Any], value: Any, path: Path = ()) -> Any:
    """Replaces every tensor inside dicts, lists and tuples of ``value`` by ``fn(path, tensor)``.

    A container in which no tensor changes is returned as the same object; a new container keeps type and attributes.
    """
    if isinstance(value, Tensor):
        return fn(path, value)
    if isinstance(value, dict):
        changed = {k: new for k, v in value.items() if (new := map_tensors(fn, v, (*path, k))) is not v}
        return _with_items(value, changed) if changed else value
    if type(value) in (list, tuple):
        items = [map_tensors(fn, v, (*path, i)) for i, v in enumerate(value)]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return value


def _with_items(mapping: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    new = copy.copy(mapping)
    if hasattr(mapping, "__dict__"):  # OrderedDict's copy loses _metadata, the versions that load_state_dict reads
        new.__dict__.update(mapping.__dict__)
    new.update(changed)
    return new


def tensor_key(path: Path) -> str:
    """The name of the tensor at ``path`` inside a sharded directory: ``state_dict/blocks.0.weight``."""
    return "/".join(map(str, path))


def placeholder(tensor: Tensor) -> Tensor:
    """A meta tensor with the shape and dtype of ``tensor``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
