"""Refuses modules and calls that no engine can train correctly: by name, on all ranks, before any gather."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_zero.private.torch import in_fx_trace, in_transform, module_tables, storage_key, users_of


def refuse_script_modules(module: nn.Module) -> None:
    """Raises ``ValueError`` for modules of ``torch.jit``: their compiled code runs no hooks that gather parameters."""
    for name, m in module.named_modules():
        if isinstance(m, torch.jit.ScriptModule) and next(m.parameters(), None) is not None:
            raise ValueError(
                f"module {name!r} is a torch.jit module ({type(m).__name__}), which supports no hooks, so its"
                " parameters cannot be gathered: train the plain module and script or trace it after the run, or use"
                " strategy='ddp'."
            )


def refuse_uninitialized(module: nn.Module) -> None:
    """Raises ``ValueError`` for lazy layers, whose parameters get their shapes in the first forward."""
    for name, p in module.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"parameter {name!r} of a lazy layer has no shape yet, so it cannot be sharded: run one forward of"
                " the module, with any batch, at the end of __init__ or in configure_model."
            )


def refuse_held_views(module: nn.Module, device: torch.device | None = None) -> None:
    """Raises ``ValueError`` for a module's attribute that is a view of a parameter's memory, or a list, tuple or dict
    with one. Sharding moves the parameter out of that memory, so the view would be stale from the first step on.
    Parameters themselves may be held anywhere.

    A view held elsewhere in the process only causes a warning: it may belong to a helper object and become stale in the
    same way, or to the argument of ``load_state_dict(states, assign=True)``, which is not read again.

    Parameters that are about to move to ``device`` are skipped: under DDP their views become stale, too.
    """
    staying = ((name, p) for name, p in module.named_parameters() if device in (None, p.device))
    storages = {name: p.untyped_storage() for name, p in staying if p.numel()}
    named = {storage_key(storage): name for name, storage in storages.items()}
    of_attributes: dict[int, set[int]] = defaultdict(set)  # storage -> ids of tensors that attributes hold
    for owner, m in module.named_modules():
        parameters, buffers, children = module_tables(m)
        for attribute, value in {**vars(m), **buffers}.items():
            if value is parameters or value is children:
                continue
            remade = f"{attribute}_orig" in parameters  # spectral_norm and prune set it in each forward
            for held in _tensors_in(value):
                key = storage_key(held.untyped_storage())
                of_attributes[key].add(id(held))
                name = named.get(key)
                if name is not None and not remade:
                    where = f"{owner}.{attribute}".lstrip(".")
                    raise ValueError(
                        f"{where!r} holds a view of parameter {name!r}, made by .data, detach() or slicing, which would"
                        " not follow the training: hold the parameter itself and take the view where it is used."
                    )
    on_cpu = {storage_key(each): each for each in storages.values() if each.device.type == "cpu"}

    def held_elsewhere() -> list[str]:
        return [named[key] for key, each in on_cpu.items() if users_of(each) > 1 + len(of_attributes[key])]

    if held_elsewhere():
        gc.collect()  # perhaps the holder is garbage: the engine of an earlier run
    if found := held_elsewhere():
        warn_of_views(found)


def warn_of_views(names: Sequence[str]) -> None:
    """Warns that user code holds memory of the parameters ``names`` from before the run, or from an earlier hook or
    step."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    rank_zero_warn(
        f"Views of parameters ({', '.join(map(repr, names[:3]))}{more}) are held since before the run, or an earlier"
        " hook or step: .data, detach(), a slice, or a tensor assigned to .data. They keep the values of that time and"
        " do not follow the training, and writes to them are lost: hold the parameters themselves and take the views"
        " where they are used, or clone() them."
    )


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yields plain tensors in lists, tuples and dicts, up to ``depth`` levels deep: ``value`` may hold a dataset. Runs
    no user code."""
    if type(value) is Tensor and value.layout == torch.strided:
        yield value
    elif depth and type(value) in (list, tuple, dict):
        for each in islice(value.values() if type(value) is dict else value, _MAX_PER_HOLDER):
            yield from _tensors_in(each, depth - 1)


_MAX_PER_HOLDER = 1_000


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raises ``ValueError`` for embeddings with sparse gradients, which cannot be reduced to shards."""
    for name, m in module.named_modules():
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse and m.weight.requires_grad:
            raise ValueError(
                f"module {name!r} has sparse=True: sparse gradients cannot be reduced to shards. Use sparse=False, with"
                " Adam instead of SparseAdam (it also moves rows that a batch leaves out), or strategy='ddp'."
            )


def refuse_gradients_in_backward() -> None:
    """Raises ``ValueError``, for code in an overridden ``LightningModule.backward``: gradients are incomplete there."""
    raise ValueError(
        "LightningModule.backward of this module reads or assigns p.grad, but gradients are averaged over the ranks and"
        " sharded only after it: move the code after loss.backward() to on_after_backward or, for clipping, to"
        " configure_gradient_clipping."
    )


def refuse_tracing() -> None:
    """Raises ``RuntimeError`` inside ``torch.jit.trace`` and ``make_fx``, on all ranks before anything is gathered."""
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace of a module in a run would record the gathering of its parameters: trace a copy,"
            " torch.jit.trace(copy.deepcopy(module), ...), on every rank. Leave out"
            " TensorBoardLogger(log_graph=True), which traces, and call to_onnx after the run or on a copy."
        )
    if in_fx_trace():
        raise RuntimeError(
            "torch.func.linearize and make_fx of a module in a run would record the gathering of its parameters: call"
            " torch.func.jvp(function, primals, tangents) instead of linearize, or trace a copy, copy.deepcopy(module),"
            " made on every rank."
        )


def refuse_transforms(holder: str, instead: str) -> None:
    """Raises ``ValueError`` inside a transform of ``torch.func``, which the hooks of ``holder`` do not support."""
    if in_transform():
        raise ValueError(
            "torch.func (vmap, grad, jvp, ...) and torch.vmap cannot transform a module that"
            f" {holder} manages, because its hooks do not support them: use {instead},"
            " or a copy, copy.deepcopy(module), made in a hook on every rank."
        )


def require_shape(attribute: str, target: Tensor, value: Tensor) -> None:
    """Raises ``ValueError`` if ``value`` cannot replace ``target.<attribute>`` because of its shape."""
    if value.shape != target.shape:
        raise ValueError(
            f"assigning a tensor of shape {tuple(value.shape)} to .{attribute} of a sharded parameter of shape"
            f" {tuple(target.shape)}: shapes must not change during a run; change the module before the run starts."
        )
