"""Modules and calls that no engine can make right, each refused by name on all ranks, before anything is gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.private.torch import in_transform, module_tables, storage_key


def refuse_script_modules(module: nn.Module) -> None:
    """Raises ``ValueError``: compiled code finds parameters where nothing can be gathered for it."""
    for name, m in module.named_modules():
        if isinstance(m, torch.jit.ScriptModule) and next(m.parameters(), None) is not None:
            raise ValueError(
                f"module {name!r} is of torch.jit ({type(m).__name__}), which takes no hooks, so its parameters cannot"
                " be gathered: train the plain module, and script or trace it after the run (or use strategy='ddp')."
            )


def refuse_held_views(module: nn.Module) -> None:
    """Raises ``ValueError`` for an attribute that lies in a parameter's memory, which the run leaves: it would be
    stale from the first step on. Parameters themselves may be held anywhere."""
    named = {storage_key(p.untyped_storage()): name for name, p in module.named_parameters() if p.numel()}
    for owner, m in module.named_modules():
        parameters, buffers, children = module_tables(m)
        for attribute, value in {**vars(m), **buffers}.items():
            if value is parameters or value is children or f"{attribute}_orig" in parameters:
                continue  # made anew for each forward by torch.nn.utils.spectral_norm and prune
            for held in _tensors_in(value):
                name = named.get(storage_key(held.untyped_storage()))
                if name is not None:
                    where = f"{owner}.{attribute}".lstrip(".")
                    raise ValueError(
                        f"{where!r} holds a view of parameter {name!r}, made by .data, detach() or a slice of it, which"
                        " would not follow the training: hold the parameter itself and take the view when it is used."
                    )


def _tensors_in(value: Any, depth: int = 2) -> Iterator[Tensor]:
    """Plain tensors; a container is looked into by its first element, as it may be a whole dataset."""
    if type(value) is Tensor and value.layout == torch.strided:
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        values = list(value.values()) if isinstance(value, dict) else value
        if isinstance(next(iter(values), None), (Tensor, list, tuple, dict)):
            for inner in values:
                yield from _tensors_in(inner, depth - 1)


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raises ``ValueError``: a sparse gradient has no rows to share out."""
    for name, m in module.named_modules():
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse and m.weight.requires_grad:
            raise ValueError(
                f"module {name!r} has sparse=True: sparse gradients cannot be reduced to shards. Use sparse=False, with"
                " Adam instead of SparseAdam (it also moves rows that a batch leaves out), or strategy='ddp'."
            )


def refuse_tracing() -> None:
    """Raises ``RuntimeError`` inside ``torch.jit.trace``, on all ranks before anything is gathered."""
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace of a module in a run would record how its parameters are gathered: trace a copy,"
            " torch.jit.trace(copy.deepcopy(module), ...), on every rank."
        )


def refuse_transforms() -> None:
    """Raises ``ValueError`` inside a transform of ``torch.func``."""
    if in_transform():
        raise ValueError(
            "torch.func (vmap, grad, jvp, ...) and torch.vmap cannot pass through a module that stage 3 of"
            " engine='deepspeed' holds, because DeepSpeed's hooks have no rules for them: use stage=2, engine='fsdp2',"
            " or a copy, copy.deepcopy(module), made in a hook on every rank."
        )
