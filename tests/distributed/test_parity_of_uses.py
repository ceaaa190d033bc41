"""Every use that user code makes of parameters gives what it gives under DDP."""

from __future__ import annotations

import pytest

from tests.helpers.batches import Batches
from tests.helpers.parity import USES, Case, batches, cases, compare  # noqa: F401  (the fixture)


@pytest.mark.parametrize("case", list(cases(USES)), ids=str)
def test_training_equals_ddp(case: Case, batches: Batches) -> None:  # noqa: F811
    compare(case, batches)
