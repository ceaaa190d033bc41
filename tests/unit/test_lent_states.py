"""``optimizer.state`` of a run under DeepSpeed: a dict of whole states, put together when they are looked at."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict

import pytest
import torch

from lightning_zero.engines.deepspeed.lent_states import LentStates, raw

A, B, C = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))


@pytest.fixture
def flats():
    """What lies there, by parameter."""
    return {A: {"m": torch.tensor([1.0, 2.0])}, B: {"m": torch.tensor([3.0, 4.0])}}


@pytest.fixture
def states(flats):
    """The state of ``C`` stands beside it."""
    whole = lambda p: {key: value.clone() for key, value in flats[p].items()}  # noqa: E731
    return LentStates(flats.keys, whole, lambda p: flats.pop(p, None), {C: {"m": torch.zeros(2)}})


def test_only_what_is_read_is_put_together(states):
    assert list(raw(states)) == [C]
    assert A in states
    assert len(states) == 3
    assert not states.lent
    assert states[A]["m"].tolist() == [1.0, 2.0]
    assert states.get(B)["m"].tolist() == [3.0, 4.0]
    assert states.lent == {A, B}
    states[A]["m"].add_(1)
    assert states[A]["m"].tolist() == [2.0, 3.0]
    assert states.take(A)["m"].tolist() == [2.0, 3.0]
    assert states.lent == {B}


def test_walks_over_all(states):
    assert {id(p) for p in states} == {id(p) for p, _ in states.items()} == {id(p) for p in (A, B, C)}
    assert len(states.values()) == len(states.keys()) == 3


def test_what_is_deleted_is_gone_from_the_flats(states, flats):
    assert states.pop(A)["m"].tolist() == [1.0, 2.0]
    assert A not in states
    assert list(flats) == [B]
    del states[C]
    states.clear()
    assert not flats
    assert len(states) == 0
    assert states.pop(A, None) is None
    with pytest.raises(KeyError):
        del states[A]


def test_what_is_there_is_no_default(states, flats):
    assert states.setdefault(A, {})["m"].tolist() == [1.0, 2.0]
    assert states.setdefault(C, {})["m"].tolist() == [0.0, 0.0]
    assert {id(states.popitem()[0]) for _ in range(3)} == {id(p) for p in (A, B, C)}
    assert not flats
    assert states.setdefault(A, {}) == {}
    with pytest.raises(KeyError):
        LentStates(dict, None, None, {}).popitem()


def test_a_state_that_nobody_has_begins_empty(states):
    new = torch.nn.Parameter(torch.ones(1))
    assert states.get(new) is None
    states[new]["m"] = torch.ones(1)
    assert new not in states.lent


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_are_ordinary(states, duplicate):
    found = duplicate(states)
    assert type(found) is defaultdict
    assert sorted(each["m"].sum().item() for each in found.values()) == [0.0, 3.0, 7.0]
