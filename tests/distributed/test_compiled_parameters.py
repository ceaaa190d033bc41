"""Compiled code may use any parameter at any time, as under DDP: it never computes with one that is away.

Compared is the same module uncompiled, whose every read and write the view sees. A failure says that a graph was given
an empty or stale parameter, that what it wrote did not reach the shards, or that Dynamo found no gradient where there
is one.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.helpers import zoo
from tests.helpers.compiled_uses import USES, DataAssigned, seen, seen_of_each
from tests.helpers.compiling import BACKEND
from tests.helpers.ranks import outcome

pytestmark = [pytest.mark.rest, pytest.mark.timeout(600)]


def _settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, **zoo.BLOCKS, **more}


@pytest.mark.parametrize("backend", [BACKEND, pytest.param("eager", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "settings", [_settings(1), _settings(2), _settings(3), _settings(3, transport="torch")], ids=str
)
def test_compiled_code_uses_whole_parameters(ranks2, settings, backend):
    for found in ranks2(seen_of_each, list(USES), settings, backend, timeout_seconds=400):
        for name, (plain, compiled) in found.items():
            # a compiled sum adds the gradients of one parameter in another order
            assert compiled == pytest.approx(plain, rel=1e-6), name


@pytest.mark.parametrize("settings", [_settings(3), _settings(3, transport="torch")], ids=str)
def test_inductor_uses_whole_parameters(ranks2, settings):
    """Its kernels read memory by address, where no operator could be looked at."""
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    names = ["PenaltyFirst", "WeightOfAnotherUnit", "PenaltyBesideOutput", "WrittenInStep"]
    for found in ranks2(seen_of_each, names, settings, "inductor", timeout_seconds=500):
        for name, (plain, compiled) in found.items():
            # kernels of its own add up in another order
            assert compiled == pytest.approx(plain, rel=1e-5), name


def test_assigned_data_is_refused(ranks2):
    for name, text in ranks2(outcome, seen, DataAssigned, _settings(3), BACKEND):
        assert name != "ok"
        assert "compiled code assigns p.data" in text
