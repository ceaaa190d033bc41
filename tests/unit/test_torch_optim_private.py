"""Tells when a private part of ``torch.optim`` that we touch has moved: each is used here as the package uses it."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

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


def test_hooks_come_in_the_order_in_which_step_runs_them(optimizer: Optimizer, calls: list[str]) -> None:
    optimizer.step()
    ran = list(calls)
    calls.clear()
    for hooks in private.step_hooks(optimizer):
        for hook in hooks:
            hook(optimizer, (), {})
    assert calls == ran == ["before any", "before", "after", "after any"]
    assert [len(hooks) for hooks in private.step_hooks(optimizer, with_global=False)] == [1, 1]
    assert private.step_hooks(_Around(SGD(optimizer.param_groups, lr=1.0))) == ([], [])  # nobody calls any


@pytest.mark.parametrize(
    ("with_global", "left"), [(True, []), (False, ["before any", "after any"])], ids=["all", "its own"]
)
def test_a_step_without_hooks(optimizer: Optimizer, calls: list[str], with_global: bool, left: list[str]) -> None:
    """For a while, which may end in an error."""
    (p,) = optimizer.param_groups[0]["params"]
    with private.without_step_hooks(optimizer, with_global):
        optimizer.step()
    assert p.tolist() == [0.5, 0.5]
    assert calls == left
    with pytest.raises(KeyError), private.without_step_hooks(optimizer, with_global):
        raise KeyError
    calls.clear()
    optimizer.step()
    assert calls == ["before any", "before", "after", "after any"]


def test_what_hooks_an_optimizer_takes(optimizer: Optimizer) -> None:
    around: Any = _Around(optimizer)
    assert (private.has_hooks(optimizer), private.takes_step_hooks(optimizer)) == (True, True)
    assert (private.has_hooks(around), private.takes_step_hooks(around)) == (False, False)
    around._optimizer_step_post_hooks = {}  # as some have
    assert not private.takes_step_hooks(around)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
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
    def of_engine(*unused: Any) -> None: ...

    of_engine.of_engine = True  # type: ignore[attr-defined]
    getattr(optimizer, register)(of_engine)
    assert not private.has_own_state_dict(optimizer)
    getattr(optimizer, register)(lambda *unused: None)
    assert private.has_own_state_dict(optimizer)


def test_a_state_dict_of_its_own() -> None:
    class Own(SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)

    assert private.has_own_state_dict(Own([nn.Parameter(torch.ones(1))], lr=1.0))


def test_parameters_of_a_subclass_are_made_without_its_constructor() -> None:
    class Named(nn.Parameter):
        def __new__(cls, name: str, size: int) -> Any:  # type: ignore[misc]
            return super().__new__(cls, torch.zeros(size))

    data = torch.ones(2)
    made = private.make_parameter(Named, data, requires_grad=False)
    assert (type(made), made.requires_grad, made.data_ptr()) == (Named, False, data.data_ptr())
    assert isinstance(private.make_parameter(nn.Parameter, data, requires_grad=True), nn.Parameter)


def test_modes_are_counted() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
            counts.append(private.num_function_modes())  # it is off itself
            return func(*args, **(kwargs or {}))

    counts: list[int] = []
    assert private.num_function_modes() == 0
    with Mode(), Mode():
        assert private.num_function_modes() == 2
        torch.zeros(1)
    assert counts == [1, 0]
    assert private.num_function_modes() == 0
