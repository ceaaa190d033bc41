"""Views of parameters that were taken before a run: one that the module holds is refused, any other is warned of."""

from __future__ import annotations

import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engines.refusals import refuse_held_views


def _module() -> nn.Module:
    recurrent, normed = nn.GRU(3, 4), nn.utils.spectral_norm(nn.Linear(4, 4))  # they hold tensors of their own
    return nn.ModuleDict({"recurrent": recurrent, "normed": normed, "head": nn.Linear(4, 2)})


def _said(module: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        refuse_held_views(module)
    return [str(each.message) for each in said if "Views of parameters" in str(each.message)]


HOLDERS: dict[str, Any] = {
    "a helper": lambda m: SimpleNamespace(flat=m["head"].weight.data.view(-1)),
    "states": lambda m: m["head"].state_dict(),
    "a graph": lambda m: m["head"].weight[0],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_view_held_elsewhere_is_warned_of(holder):
    module = _module()
    held = HOLDERS[holder](module)
    (text,) = _said(module)
    assert "'head.weight'" in text
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
    module = _module()
    held = [*module.parameters(), module["head"].weight.detach().clone(), nn.Parameter(torch.ones(3))]
    assert not _said(module)
    assert held


def test_on_an_accelerator_ddp_leaves_views_behind_as_well():
    module = _module().to("meta")
    held = module["head"].weight.data
    assert not _said(module)
    assert held.is_meta


HELD: dict[str, Any] = {
    "itself": lambda view: view,
    "a dict": lambda view: {"name": "x", "view": view},
    "dicts in dicts": lambda view: {"a": {"b": view}},
    "after a name": lambda view: ("x", view),
}


@pytest.mark.parametrize("form", HELD)
def test_what_an_attribute_holds_is_refused(form):
    module = _module()
    module["head"].held = HELD[form](module["head"].weight.data.view(-1))
    with pytest.raises(ValueError, match=r"'head.held' holds a view of parameter 'head.weight'"):
        refuse_held_views(module)


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
