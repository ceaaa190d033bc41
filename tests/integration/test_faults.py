"""Every way a run breaks: it ends by itself, says who was at fault and why, and leaves nothing but a whole checkpoint.

It ends long before ``timeout_seconds``, or :func:`break_run` raises; ``benchmarks/faults.py`` has the times.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.faults import FAULTS, break_run

OFTEN = ("exception-1", "kill-1", "stop-0", "stop-1", "dry-0", "interrupt")
"""CI walks them; the others take the same ways with the ranks exchanged."""


def _level(name: str) -> Any:
    return pytest.mark.rest if name in OFTEN else pytest.mark.full


@pytest.mark.timeout(600)  # longer than all that break_run waits for
@pytest.mark.parametrize("name", [pytest.param(name, marks=_level(name)) for name in FAULTS])
def test_fault_ends_cleanly(name, tmp_path):
    fault, outcome = FAULTS[name], break_run(name, tmp_path)
    assert outcome.exit_code != 0, outcome.output
    for text in fault.shows:
        assert text in outcome.output, outcome.output
    assert outcome.left_behind == []
    assert outcome.checkpoint_step >= 2
