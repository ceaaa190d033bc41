"""Patterns that public packages bring: saving in hooks, adjoints, averages. At every stage of both engines as DDP."""

from __future__ import annotations

import pytest

from tests.helpers import held_packages

pytestmark = pytest.mark.rest

ENGINES = ("fsdp2", "deepspeed")
TOLERANCE = 1e-6
"""Two ranks' gradients have one sum, and all of these are equal to the bit here; kernels may take another path for
memory that is aligned otherwise."""


@pytest.fixture(scope="module")
def differences(ranks):
    """All that are installed, in one job."""
    names = [name for name in held_packages.PACKAGED if not held_packages.missing(name)]
    return ranks(held_packages.compare, names, ENGINES, world_size=2, timeout_seconds=240)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", held_packages.PACKAGED)
def test_packages_equal_ddp(kind, engine, differences):
    if package := held_packages.missing(kind):
        pytest.skip(f"{package} is not installed: make models")
    for rank, found in enumerate(differences):
        for stage in held_packages.stages(kind, engine):
            assert found[kind, engine, stage] <= TOLERANCE, (rank, stage)
