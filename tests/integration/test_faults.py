"""Every way a run breaks: it ends soon, says who was at fault and why, and leaves nothing but a whole checkpoint."""

from __future__ import annotations

import pytest

from tests.helpers.faults import FAULTS, HANG_SECONDS, break_run

OFTEN = ("exception-1", "kill-1", "stop-1", "dry-0", "interrupt")
"""Those that `make test` walks; the others take the same ways with the ranks exchanged."""


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in FAULTS]
)
def test_fault_ends_cleanly(name, tmp_path):
    fault, outcome = FAULTS[name], break_run(name, tmp_path)
    assert outcome.exit_code != 0, outcome.output
    for text in fault.shows:
        assert text in outcome.output, outcome.output
    assert outcome.seconds < 30 + (HANG_SECONDS if fault.hangs else 0)
    assert outcome.left_behind == []
    assert outcome.checkpoint_step >= 2
