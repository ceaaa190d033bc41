"""Views of parameters that were taken before a run: one that the module holds is refused, any other is warned of."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning import Trainer
from torch import nn

from lightning_zero.engines.refusals import refuse_held_views


def _module() -> nn.Module:
    recurrent, normed = nn.GRU(3, 4), nn.utils.spectral_norm(nn.Linear(4, 4))  # they hold tensors of their own
    return nn.ModuleDict({"recurrent": recurrent, "normed": normed, "head": nn.Linear(4, 2)})


def _said(module: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        refuse_held_views(module)
    return [str(each.message) for each in said if "views of parameters" in str(each.message)]


HOLDERS: dict[str, Any] = {
    # what is made of the module -> how the warning names it
    "a helper": (lambda m: SimpleNamespace(flat=m["head"].weight.data.view(-1)), "SimpleNamespace['flat'] of 'head."),
    "states": (lambda m: m["head"].state_dict(), "OrderedDict['weight'] of 'head.weight', OrderedDict['bias'] of"),
    "a closure": (lambda m: (lambda v: lambda: v)(m["head"].weight.detach()), "a tensor of shape (2, 4) of 'head."),
    "a graph": (lambda m: m["head"].weight[0], "a tensor of shape (4,) of 'head.weight'"),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_view_held_elsewhere_is_named(holder):
    take, name = HOLDERS[holder]
    module = _module()
    held = take(module)
    (text,) = _said(module)
    assert name in text
    del held
    assert not _said(module)


def test_a_view_in_garbage_is_held_by_nobody():
    """A second run found the engine of the first, which is in reference cycles."""
    module = _module()
    holder = SimpleNamespace(view=module["head"].weight.data)
    holder.itself = holder
    del holder
    assert not _said(module)


def test_parameters_and_copies_may_be_held_anywhere():
    """Without a look at all objects, which would be a copy of all forked ranks' pages."""
    module = _module()
    held = [*module.parameters(), module["head"].weight.detach().clone(), nn.Parameter(torch.ones(3))]
    with mock.patch("gc.get_objects", side_effect=AssertionError):
        assert not _said(module)
    assert held


def test_on_an_accelerator_ddp_leaves_views_behind_as_well():
    module = _module().to("meta")
    held = module["head"].weight.data
    assert not _said(module)
    assert held.is_meta


def test_an_attribute_is_refused():
    module = _module()
    module["head"].flat = module["head"].weight.data.view(-1)
    with pytest.raises(ValueError, match=r"'head.flat' holds a view of parameter 'head.weight'"):
        refuse_held_views(module)


class Slots:
    __slots__ = ("flat", "unset")

    def __init__(self, flat: Any) -> None:
        self.flat = flat


HELD: dict[str, Any] = {
    # what an attribute is made of a view
    "a dict": lambda view: {"name": "x", "view": view},
    "dicts in dicts": lambda view: {"a": {"b": {"c": view}}},
    "after None": lambda view: [None, view],
    "after a name": lambda view: ("x", view),
    "a deque": lambda view: deque([[view]]),
    "a plain object": lambda view: SimpleNamespace(flat=view),
    "objects in a list": lambda view: [SimpleNamespace(a=1), SimpleNamespace(parts=[SimpleNamespace(flat=view)])],
    "an object with slots": lambda view: Slots(view),
    "a distribution": lambda view: torch.distributions.Normal(view, 1.0),
    "beside a dataset": lambda view: SimpleNamespace(rows=[(i, [i]) for i in range(20_000)], a={"b": {"c": view}}),
    "a module that is not a child": lambda view: [nn.ModuleDict({"a": _with_flat(view)})],
}


def _with_flat(view: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    module.flat = view
    return module


@pytest.mark.parametrize("form", HELD)
def test_what_an_attribute_holds_is_refused(form):
    module = _module()
    module["head"].held = HELD[form](module["head"].weight.data.view(-1))
    with pytest.raises(ValueError, match=r"'head.held' holds a view of parameter 'head.weight'"):
        refuse_held_views(module)


def test_what_only_a_function_or_the_trainer_holds_is_warned_of():
    for hold in (lambda view: lambda: view, lambda view: _trainer_with(view)):
        module = _module()
        module["head"].held = hold(module["head"].weight.data)
        assert _said(module)


def _trainer_with(view: Any) -> Any:
    trainer = object.__new__(Trainer)
    trainer.callbacks = [SimpleNamespace(view=view)]
    return trainer


def test_a_child_that_is_held_twice_is_looked_at_as_itself():
    """spectral_norm's weight lies in its parameter's memory, until the next forward."""
    module = _module()
    module["normed"].weight = module["normed"].weight_orig.data
    module.layers = [module["normed"]]
    assert not _said(module)


def test_no_code_of_the_user_is_run_to_look_for_views():
    class Loads(dict):
        def values(self) -> Any:
            raise AssertionError

        __iter__ = __getitem__ = __len__ = values

    class Acts:
        @property
        def flat(self) -> Any:
            raise AssertionError

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        __class__ = flat  # asked for by isinstance

    module = _module()
    module.held = [Loads(a=1), Acts(), weakref.proxy(nn.Linear(1, 1))]
    assert not _said(module)
