"""Private parts of ``torch.optim``, each with the reason for its use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer

from lightning_zero.private.torch import uncompiled


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


def takes_step_hooks(optimizer: Any) -> bool:
    """Whether ``register_step_post_hook`` works: some that wrap another optimizer never run ``Optimizer.__init__``, and
    have a plain dict in the hooks' place."""
    return isinstance(getattr(optimizer, "_optimizer_step_post_hooks", None), OrderedDict)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether its ``step`` calls hooks of users: ``_optimizer_step_pre_hooks``, ``_optimizer_step_post_hooks`` and the
    global ones. Where ``Optimizer.__init__`` never ran, ``_patch_step_function`` has not marked ``step`` as
    ``hooked``."""
    if not getattr(type(optimizer).step, "hooked", False) or not takes_step_hooks(optimizer):
        return False
    own: Any = optimizer
    return bool(
        _optimizer._global_optimizer_pre_hooks
        or _optimizer._global_optimizer_post_hooks
        or own._optimizer_step_pre_hooks
        or own._optimizer_step_post_hooks
    )


@contextmanager
def inside_step_hooks(optimizer: Optimizer, begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Calls of ``optimizer.step`` inside call ``begin`` after all hooks before the step, and ``end`` ahead of all hooks
    after it."""
    hooks: Any = optimizer
    handles = (
        optimizer.register_step_pre_hook(lambda *unused: begin()),
        optimizer.register_step_post_hook(lambda *unused: end()),
    )
    hooks._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether user code has a say in ``state_dict`` or ``load_state_dict``: an override, or hooks on either."""
    own = type(optimizer)
    if own.state_dict is not Optimizer.state_dict or own.load_state_dict is not Optimizer.load_state_dict:
        return True
    names = (
        *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
        *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
    )
    return any(getattr(optimizer, name, None) for name in names)
