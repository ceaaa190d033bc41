"""What is compiled goes through all that a module goes through, as it does uncompiled: all loops, checkpoints that the
other reads, GANs, models of transformers that generate in a hook, recomputation.

A failure of "resumed" or "and back" says that a checkpoint holds something of the compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import zoo
from tests.helpers.compiled_life import gan, life, of_transformers, units_that_recompute
from tests.helpers.compiling import BACKEND, WHOLE

pytestmark = [pytest.mark.rest, pytest.mark.timeout(600)]


def _settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, **(zoo.BLOCKS if more.get("engine") != "deepspeed" else {}), **more}


STAGES = [*map(_settings, (1, 2, 3)), *(_settings(stage, engine="deepspeed") for stage in (1, 2))]
FORMS = ["blocks", "copy beside", WHOLE]
ARCHITECTURES = ["llama", "gpt2", "bert"]


def _each(cases: Iterable[Any], always: Callable[[int], bool]) -> list[Any]:
    """``cases``, of which `make test-all` alone walks those whose number is not ``always`` walked."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=() if always(i) else pytest.mark.full)
        for i, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("settings", "form"), _each(product(STAGES, FORMS), lambda i: i % 4 == 1), ids=str)
def test_all_loops_and_checkpoints(ranks2, tmp_path: Path, settings, form):
    for found in ranks2(life, form, settings, str(tmp_path), timeout_seconds=300):
        for what, (plain, compiled) in found.items():
            assert compiled == plain, what
            assert len(plain) >= 6


@pytest.mark.parametrize("settings", _each(STAGES, lambda i: i in (2, 3)), ids=str)
def test_gan(ranks2, settings):
    plain, compiled = (ranks2(gan, settings, backend, timeout_seconds=200) for backend in (None, BACKEND))
    assert compiled == plain


@pytest.mark.parametrize(
    ("settings", "recomputes", "architecture"),
    _each(
        product([_settings(3), _settings(2), _settings(2, engine="deepspeed")], [False, True], ARCHITECTURES),
        lambda i: i == 0,
    ),
    ids=str,
)
def test_transformers(ranks2, settings, recomputes, architecture):
    for found in ranks2(of_transformers, settings, architecture, recomputes, timeout_seconds=200):
        for what, (plain, compiled) in found.items():
            assert compiled == plain, what


@pytest.mark.parametrize("settings", [_settings(1), _settings(3)], ids=str)
def test_recomputation_of_compiled_units(ranks2, settings):
    settings = {**settings, "activation_checkpointing": "full"}
    for plain, compiled in ranks2(units_that_recompute, settings, timeout_seconds=300):
        assert compiled.losses == plain.losses
        assert compiled.graphs[-1] > plain.graphs[-1] == 0
