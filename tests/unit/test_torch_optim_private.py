"""Tells when a private part of ``torch.optim`` that we touch has moved: each is used here as the package uses it."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_zero.private import torch_optim as private


class _Around(Optimizer):
    """Wraps another, and never runs ``Optimizer.__init__``."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.fixture
def optimizer() -> Optimizer:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return SGD([p], lr=0.5)


@pytest.fixture
def calls(optimizer: Optimizer) -> Iterator[list[str]]:
    """The hooks of ``optimizer``, two of its own and two of all optimizers, as they are called."""
    called: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *unused: called.append("before")),
        optimizer.register_step_post_hook(lambda *unused: called.append("after")),
        register_optimizer_step_pre_hook(lambda *unused: called.append("before any")),  # type: ignore[arg-type]
        register_optimizer_step_post_hook(lambda *unused: called.append("after any")),  # type: ignore[arg-type]
    ]
    yield called
    for handle in handles:
        handle.remove()


def test_a_replaced_step_is_told_from_a_schedulers(optimizer: Optimizer) -> None:
    assert not private.is_step_replaced(optimizer)
    StepLR(optimizer, 1)
    assert "step" in vars(optimizer)  # it counts
    assert not private.is_step_replaced(optimizer)
    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)  # type: ignore[method-assign]
    StepLR(optimizer, 1)
    assert private.is_step_replaced(optimizer)


def test_a_step_inside_its_hooks(optimizer: Optimizer, calls: list[str]) -> None:
    """Hooks of users run outside of what is done for the length of a step; an error leaves nothing behind."""
    assert private.has_step_hooks(optimizer)
    begin, end = (lambda: calls.append("begin")), (lambda: calls.append("end"))
    with private.inside_step_hooks(optimizer, begin, end):
        optimizer.step()
    assert calls == ["before any", "before", "begin", "end", "after", "after any"]
    with pytest.raises(KeyError), private.inside_step_hooks(optimizer, begin, end):
        raise KeyError
    calls.clear()
    optimizer.step()
    assert calls == ["before any", "before", "after", "after any"]
    assert not private.has_step_hooks(_Around(SGD(optimizer.param_groups, lr=1.0)))  # nobody calls any


def test_step_hooks_are_found(optimizer: Optimizer) -> None:
    assert not private.has_step_hooks(optimizer)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *unused: None)  # type: ignore[operator]
        assert private.has_step_hooks(optimizer)
        handle.remove()


def test_what_hooks_an_optimizer_takes(optimizer: Optimizer) -> None:
    around: Any = _Around(optimizer)
    assert private.takes_step_hooks(optimizer)
    assert not private.takes_step_hooks(around)
    around._optimizer_step_post_hooks = {}  # as some have
    assert not private.takes_step_hooks(around)
    optimizer.register_step_post_hook(lambda *unused: None)


@pytest.mark.parametrize(
    "register",
    [
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_who_has_a_say_in_states(optimizer: Optimizer, register: str) -> None:
    assert not private.has_own_state_dict(optimizer)
    getattr(optimizer, register)(lambda *unused: None)
    assert private.has_own_state_dict(optimizer)


def test_a_state_dict_of_its_own() -> None:
    class Own(SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)

    assert private.has_own_state_dict(Own([nn.Parameter(torch.ones(1))], lr=1.0))
