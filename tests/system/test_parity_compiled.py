"""Every kind that compiles trains as under DDP."""

from __future__ import annotations

import pytest

from tests.helpers.parity import COMPILED, Batches, Case, batches, cases, compare  # noqa: F401  (the fixture)


@pytest.mark.parametrize("case", list(cases(COMPILED)), ids=str)
def test_training_equals_ddp(case: Case, batches: Batches) -> None:  # noqa: F811
    compare(case, batches)
