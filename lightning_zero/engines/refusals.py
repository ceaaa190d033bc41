"""Refuses modules and calls that no engine can train correctly: by name, on all ranks, before any gather."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_zero.private.torch import base_of, in_fx_trace, in_transform, module_tables, storage_key, users_of


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
    """Raises ``ValueError`` for a module's attribute that is, or holds, a view of a parameter's memory. Sharding moves
    the parameter out of that memory, so the view would be stale from the first step on. Parameters themselves may be
    held anywhere.

    A view held elsewhere in the process only causes a warning: it may belong to a helper object and become stale in the
    same way, or to the argument of ``load_state_dict(states, assign=True)``, which is not read again.

    Parameters that are about to move to ``device`` are skipped: under DDP their views become stale, too.
    """
    staying = ((name, p) for name, p in module.named_parameters() if device in (None, p.device))
    storages = {name: p.untyped_storage() for name, p in staying if p.numel()}
    named = {storage_key(storage): name for name, storage in storages.items()}
    known, of_attributes = set(), Counter[int]()
    modules = {id(m) for m in module.modules()}  # searched one by one below
    for owner, m in module.named_modules():
        parameters, buffers, children = module_tables(m)
        for attribute, value in {**vars(m), **buffers}.items():
            if value is parameters or value is children:
                continue
            remade = f"{attribute}_orig" in parameters  # spectral_norm and prune set it in each forward
            for held in _tensors_in(value, modules):
                key = storage_key(held.untyped_storage())
                known.add(id(held))
                of_attributes[key] += 1
                name = named.get(key)
                if name is not None and not remade:
                    where = f"{owner}.{attribute}".lstrip(".")
                    raise ValueError(
                        f"{where!r} holds a view of parameter {name!r}, made by .data, detach() or slicing, which would"
                        " not follow the training: hold the parameter itself and take the view where it is used."
                    )
    on_cpu = {storage_key(each): each for each in storages.values() if each.device.type == "cpu"}

    def are_held_elsewhere() -> bool:
        return any(users_of(storage) > 1 + of_attributes[key] for key, storage in on_cpu.items())

    # A move to an accelerator makes views stale under DDP, too. The search of all objects takes tenths of a second.
    if are_held_elsewhere():
        gc.collect()  # perhaps the holder is garbage: the engine of an earlier run
        if are_held_elsewhere():
            _warn_of_views_elsewhere(named, known)


def _warn_of_views_elsewhere(named: dict[int, str], known: set[int]) -> None:
    plain = [each for each in gc.get_objects() if type(each) is Tensor and each.layout == torch.strided]
    views = [each for each in plain if storage_key(each.untyped_storage()) in named and id(each) not in known]
    between = {id(base_of(view)) for view in views}  # w.data, if w.data.view(-1) is held
    lasting = [view for view in views if id(view) not in between]
    if lasting:  # gc searches all objects for each holder: for a full state_dict() this would take minutes
        found = [f"{_holder(view)} of {named[storage_key(view.untyped_storage())]!r}" for view in lasting[:3]]
        more = f" and {len(lasting) - 3} more" if len(lasting) > 3 else ""
        rank_zero_warn(
            f"Objects outside of the module hold views of parameters ({', '.join(found)}{more}). These views keep their"
            " memory, and the values from before the run: hold the parameters themselves and take the views where they"
            " are used, or delete the views."
        )


def _holder(view: Tensor) -> str:
    """Describes the holder of ``view``, with a name from the user's code if there is one."""
    for names in gc.get_referrers(view):
        key = next((key for key, value in [*names.items()] if value is view), None) if isinstance(names, dict) else None
        if key is not None:
            owners = (each for each in gc.get_referrers(names) if getattr(each, "__dict__", None) is names)
            owner = names.get("__name__") or type(next(owners, names)).__name__
            return f"{owner}[{key!r}]"
    return f"a tensor of shape {tuple(view.shape)}"


def _tensors_in(value: Any, known: set[int]) -> Iterator[Tensor]:
    """Yields plain tensors that ``value`` holds in containers and objects, the nearest first.

    The search is bounded, as ``value`` may hold an entire dataset. It runs no user code: no properties, no
    ``__getattr__``, no methods of a container that loads items on access. ``known``: ids of objects to skip.
    """
    level, seen = [value], set[int]()
    for _ in range(_MAX_DEPTH + 1):
        following: list[Any] = []
        for each in level:
            if issubclass(type(each), Tensor):
                if type(each) is Tensor and each.layout == torch.strided:
                    yield each
            elif type(each) not in _ATOMS and id(each) not in known and id(each) not in seen:
                seen.add(id(each))
                following += islice(_held_by(each), min(_MAX_PER_HOLDER, _MAX_PER_LEVEL - len(following)))
        level = following


_ATOMS = {type(None), bool, int, float, str}
_MAX_DEPTH = 5
_MAX_PER_HOLDER, _MAX_PER_LEVEL = 1_000, 10_000


def _held_by(value: Any) -> Iterator[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        yield from dict.values(value)
    for sequence in (list, tuple, set, deque):
        if issubclass(kind, sequence):
            yield from sequence.__iter__(value)
    if kind not in (dict, list, tuple) and _is_plain(kind):
        with suppress(AttributeError):
            yield from object.__getattribute__(value, "__dict__").values()
        for slot in _slots(kind):
            with suppress(AttributeError):  # not assigned
                yield slot.__get__(value)


def _is_plain(kind: type) -> bool:
    """Whether to search attributes of instances. Lightning's classes are skipped: a ``Trainer`` holds all callbacks."""
    roots = {str(each.__module__).partition(".")[0] for each in kind.__mro__}
    return not issubclass(kind, (type, ModuleType, FunctionType)) and roots.isdisjoint(_NOT_OF_THE_MODULE)


_NOT_OF_THE_MODULE = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_zero"}


def _slots(kind: type) -> list[MemberDescriptorType]:
    own = [vars(each) for each in kind.__mro__ if "__slots__" in vars(each)]
    return [each for names in own for each in names.values() if isinstance(each, MemberDescriptorType)]


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
