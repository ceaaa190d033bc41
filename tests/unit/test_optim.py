"""Which optimizers may step on shards: a wrong yes is silently wrong training, a wrong no is only slow."""

from __future__ import annotations

import pytest
import torch
from torch.optim import Optimizer

from lightning_zero.engines.optimizer_step import KNOWN_ELEMENTWISE, is_elementwise
from tests.helpers import zoo


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 3))]


@pytest.mark.parametrize("optimizer", sorted(KNOWN_ELEMENTWISE, key=lambda c: c.__name__))
def test_what_is_known_holds_when_tried(optimizer):
    """The list is not taken on trust: each class, disguised as a third party's, passes the trial."""
    disguised = type(optimizer.__name__, (optimizer,), {"__module__": "third_party"})
    assert is_elementwise(disguised(_params(), lr=0.01))
    assert is_elementwise(optimizer(_params(), lr=0.01))


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS"])
def test_those_that_look_across_elements_do_not(name):
    assert not is_elementwise(getattr(torch.optim, name)(_params(), lr=0.01))


def test_third_parties_are_tried():
    assert is_elementwise(zoo.Lion(_params()))
    assert not is_elementwise(zoo.Lamb(_params()))


def test_what_cannot_be_tried_is_taken_for_not_elementwise():
    class Peculiar(Optimizer):
        def __init__(self, params, secret):
            super().__init__(params, {})

        def step(self, closure=None):
            pass

    assert not is_elementwise(Peculiar(_params(), secret=1))
