"""Reads pretrained weights into a module, in parts.

Each name in the files is mapped to a name in the module: by the caller's arguments, then by transformers' own
conversion if the module is one of theirs. All names are compared before anything is written. An unsharded module is
filled one tensor at a time; of a sharded one each rank reads only its rows; parameters without memory are read when the
engine shards them (``later``).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint import later
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.checkpoint.store import together
from lightning_zero.checkpoint.weights import Stored, find
from lightning_zero.comm.agree import Agreement, run_agreement
from lightning_zero.errors import CheckpointError
from lightning_zero.private import transformers
from lightning_zero.private.torch import saved_tensors

Rename = Mapping[str, str] | Callable[[str], str | None] | None
_SHOWN = 8


class LoadedKeys(NamedTuple):
    """The result of :func:`load_pretrained`, in the form of ``nn.Module.load_state_dict``."""

    missing_keys: list[str]
    """Names in the module for which the files have no value."""
    unexpected_keys: list[str]
    """Names in the files, unchanged, that the module does not have."""


def _renamed(key: str, strip: str, add: str, rename: Rename) -> str | None:
    """Maps a name in the files to a name in the module; ``None`` if it is left out."""
    if not key.startswith(strip):
        return None
    name = add + key.removeprefix(strip)
    if callable(rename):
        return rename(name)
    longest = max((old for old in rename or () if name.startswith(old)), key=len, default=None)
    return name if rename is None or longest is None else rename[longest] + name.removeprefix(longest)


def load_pretrained(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    strip: str = "",
    add: str = "",
    rename: Rename = None,
    strict: bool = True,
    weights_only: bool | None = None,
) -> LoadedKeys:
    """Reads weights into ``module``; each rank reads only the rows that it holds.

    Call it in ``configure_model``, in ``setup``, in any later hook of a run, or outside of a run. In a run it is
    collective: every rank must make the call, with the same files (rank 0's ``path`` is used).

    Values are converted to the module's dtypes. Buffers in ``state_dict`` are read like parameters. The module's
    ``_load_from_state_dict`` and its hooks are not called. If ``module`` is a transformers model, transformers'
    conversion of names and layouts applies, as in ``from_pretrained``.

    Args:
        module: A LightningModule, or any module in it.
        path: A folder that ``save_pretrained`` wrote, one ``.safetensors`` or ``.bin`` file, or a checkpoint of any
            strategy (file or folder).
        strip: Prefix of the names to read; it is removed. Use ``"model."`` to read a LightningModule's checkpoint into
            its ``self.model``.
        add: Prefix to add to every name. Use ``"model."`` to read a published model into a LightningModule that holds
            it as ``self.model``.
        rename: Applied after both: a mapping from old prefixes to new ones, of which the longest match is used; or a
            function of a name that returns the new name, or ``None`` to leave it out.
        strict: Raise if names are missing or left over. Different shapes always raise.
        weights_only: Unless ``False``, nothing beyond torch's allow-list is unpickled.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, both empty if ``strict``.

    Raises:
        FileNotFoundError: On every rank, if there is nothing to read at ``path``.
        CheckpointError: On every rank, before anything is written: if files are damaged; if shapes or kinds of dtypes
            differ, naming file, key and both; if ``strict`` and names are missing or left over.
    """
    run = run_agreement()
    agreement = run or Agreement(alone=True)
    agreement.gather(None, "lightning_zero.load_pretrained()")
    where = agreement.gather(os.fspath(path))[0]
    stored = together(agreement, lambda: find(Path(where), weights_only))
    targets = saved_tensors(module)

    def matched() -> tuple[dict[str, Stored], LoadedKeys]:
        names = {s.key: _renamed(s.key, strip, add, rename) for s in stored}
        found, keys = _matched(module, targets, stored, names)
        if strict and (keys.missing_keys or keys.unexpected_keys):
            raise CheckpointError(_incomplete(where, type(module).__name__, keys, list(targets), stored))
        return found, keys

    found, keys = together(agreement, matched)
    _require_same_files(found, where, agreement)
    together(agreement, lambda: _fill(targets, found, in_run=run is not None))
    return keys


def _matched(
    module: nn.Module, targets: Mapping[str, Tensor], stored: Sequence[Stored], names: Mapping[str, str | None]
) -> tuple[dict[str, Stored], LoadedKeys]:
    """Returns the source of each name of the module, and the names that are missing or left over.

    Raises:
        CheckpointError: If two tensors get the same name, or a tensor does not fit.
    """
    renamed: dict[str, Stored] = {}
    for each in stored:
        name = names[each.key]
        if name in renamed:
            raise CheckpointError(
                f"{each.file}: {each.key!r} and {renamed[name].key!r} of {renamed[name].file} would both become"
                f" {name!r}: pass the path of one file, or change strip, add or rename."
            )
        if name is not None:
            renamed[name] = each
    found, unexpected = dict[str, Stored](), list[str]()
    tensors = {name: s.tensor for name, s in renamed.items()}
    converted = transformers.converted(module, tensors, targets, LazyTensor)
    if converted is None:
        found = {name: s for name, s in renamed.items() if name in targets}
        unexpected = [s.key for name, s in renamed.items() if name not in targets]
    else:
        for name, (tensor, sources) in converted.by_name.items():
            found[name] = Stored(tensor, renamed[sources[0]].file, renamed[sources[0]].key)
        unexpected = [renamed[name].key for name in converted.unexpected]
    if misfits := [text for name, s in found.items() if (text := _misfit(name, targets[name], s))]:
        raise CheckpointError("; ".join(misfits[:_SHOWN]) + f" ({len(misfits)} in all): use a module that fits.")
    there = {id(targets[name]) for name in found}  # by id: of a tied tensor's names one is enough
    missing = [name for name, tensor in targets.items() if id(tensor) not in there]
    return found, LoadedKeys(*transformers.without_ignored(module, missing, unexpected))


def _misfit(name: str, target: Tensor, stored: Stored) -> str:
    value, place = stored.tensor, f"{stored.file}: {stored.key!r}"
    if value.shape != target.shape:
        return f"{place} is {tuple(value.shape)}, but {name!r} of the module is {tuple(target.shape)}"
    kinds = [(t.dtype.is_floating_point, t.dtype.is_complex) for t in (value, target)]
    if kinds[0] != kinds[1]:
        return f"{place} is {value.dtype}, but {name!r} of the module is {target.dtype}"
    return ""


def _incomplete(where: str, kind: str, keys: LoadedKeys, names: Sequence[str], stored: Sequence[Stored]) -> str:
    def shown(keys: Sequence[str]) -> str:
        return (", ".join(map(repr, keys[:_SHOWN])) or "none") + (", ..." if len(keys) > _SHOWN else "")

    return (
        f"{where} does not fit {kind}: it lacks {shown(keys.missing_keys)}; the module lacks"
        f" {shown(keys.unexpected_keys)}. Its first name is {stored[0].key!r}, the module's is"
        f" {names[0] if names else 'none'!r}: map names with strip, add or rename, or ignore them with strict=False."
    )


def _require_same_files(found: Mapping[str, Stored], where: str, agreement: Agreement) -> None:
    """Raises unless all ranks found the same tensors: their rows become parts of the same parameters."""
    text = "\n".join(f"{name} {tuple(s.tensor.shape)} {s.tensor.dtype}" for name, s in sorted(found.items()))
    marks = agreement.gather(zlib.crc32(text.encode()))
    if len(set(marks)) > 1:
        others = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        raise CheckpointError(
            f"{where} holds different tensors on rank {others[0]} than on rank 0: copy the same files to every host."
        )


def _fill(targets: Mapping[str, Tensor], found: Mapping[str, Stored], in_run: bool) -> None:
    done: set[int] = set()
    with torch.no_grad():
        for name, each in found.items():
            target = targets[name]
            if id(target) in done:  # a tied tensor under its second name: its value is already stored
                continue
            done.add(id(target))
            if not later.has_no_memory(target):
                target.copy_(each.tensor)  # a sharded target copies a slice of the lazy tensor: only its rows are read
            elif in_run and isinstance(target, nn.Parameter):
                later.leave(target, each.tensor)
            else:
                later.become(target, later.memory_for(target, "cpu").copy_(each.tensor))
