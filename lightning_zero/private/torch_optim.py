"""Private parts of ``torch.optim``, each with the reason for its use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer

from lightning_zero.private.torch import uncompiled

StepHook = Callable[..., Any]


def is_step_replaced(optimizer: Optimizer) -> bool:
    """Whether the object's own ``step`` differs from its class's.

    Wrappers of the class's ``step`` do not count: a learning rate scheduler's, which only counts calls and is marked
    ``_wrapped_by_lr_sched``, and the result of ``torch.compile``.
    """
    function = _innermost(vars(optimizer).get("step"))
    return function is not None and function is not type(optimizer).step


def _innermost(step: Any) -> Any:
    function = getattr(step, "__func__", step)
    if getattr(function, "_wrapped_by_lr_sched", False):
        return _innermost(function.__wrapped__)
    inside = uncompiled(function)
    return function if inside is function else _innermost(inside)


def step_hooks(optimizer: Optimizer, with_global: bool = True) -> tuple[list[StepHook], list[StepHook]]:
    """Hooks before and after its ``step``: ``_optimizer_step_pre_hooks``, ``_optimizer_step_post_hooks`` and the
    global ones. None where ``Optimizer.__init__`` never ran, whose ``_patch_step_function`` marks a step ``hooked``."""
    if not getattr(type(optimizer).step, "hooked", False):
        return [], []
    before: Any = _optimizer._global_optimizer_pre_hooks if with_global else {}
    after: Any = _optimizer._global_optimizer_post_hooks if with_global else {}
    own_before = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    own_after = getattr(optimizer, "_optimizer_step_post_hooks", {})
    return [*before.values(), *own_before.values()], [*own_after.values(), *after.values()]


def has_hooks(optimizer: Any) -> bool:
    """Whether hooks can be registered on loading its states: not where ``Optimizer.__init__`` never ran."""
    return hasattr(optimizer, "_optimizer_load_state_dict_post_hooks")


def takes_step_hooks(optimizer: Any) -> bool:
    """Whether ``register_step_post_hook`` works: some that wrap another optimizer never run ``Optimizer.__init__``, and
    have a plain dict in the hooks' place."""
    return isinstance(getattr(optimizer, "_optimizer_step_post_hooks", None), OrderedDict)


@contextmanager
def without_step_hooks(optimizer: Optimizer, with_global: bool = True) -> Iterator[None]:
    """``step`` runs none of :func:`step_hooks` for a while."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    own = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    shared: list[Any] = (
        [_optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks] if with_global else []
    )
    kept = [dict(hooks) for hooks in shared]
    for name in own:
        setattr(optimizer, name, OrderedDict())
    for hooks in shared:
        hooks.clear()
    try:
        yield
    finally:
        for name, hooks in own.items():
            setattr(optimizer, name, hooks)
        for hooks, before in zip(shared, kept, strict=True):
            hooks.update(before)


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether user code has a say in ``state_dict`` or ``load_state_dict``: an override, or hooks on either. A hook of
    an engine's own says ``of_engine``."""
    own = type(optimizer)
    if own.state_dict is not Optimizer.state_dict or own.load_state_dict is not Optimizer.load_state_dict:
        return True
    names = (
        *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
        *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
    )
    hooks = (hook for name in names for hook in (getattr(optimizer, name, None) or {}).values())
    return any(not getattr(hook, "of_engine", False) for hook in hooks)


def make_parameter(kind: type[nn.Parameter], data: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter of a subclass, made as ``nn.Parameter.__new__`` does it: subclasses take other arguments."""
    return torch.Tensor._make_subclass(kind, data, requires_grad)  # type: ignore[return-value]


def num_function_modes() -> int:
    """Number of active ``TorchFunctionMode``. There is no public way to ask."""
    return torch._C._len_torch_function_stack()
