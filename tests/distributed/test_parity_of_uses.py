"""Every use that user code makes of parameters gives what it gives under DDP."""

from __future__ import annotations

import pytest

from tests.helpers.parity import USES, Batches, Case, batches, cases, compare  # noqa: F401  (the fixture)

ALONE = Case("written_past_versions", "deepspeed", 3, 1)
"""With one rank a parameter that DeepSpeed gathers is an alias of its shard, to which views must not write."""


@pytest.mark.parametrize("case", [*cases(USES), ALONE], ids=str)
def test_training_equals_ddp(case: Case, batches: Batches) -> None:  # noqa: F811
    compare(case, batches)
