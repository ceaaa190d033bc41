"""Every way a run breaks: it ends by itself, says who was at fault and why, and leaves nothing but a whole checkpoint.

It ends long before ``timeout_seconds``, or :func:`break_run` raises. ``benchmarks/faults.py`` has the times, and the
faults with the ranks exchanged; loops of unequal lengths are ``tests/distributed/test_uneven.py``'s.
"""

from __future__ import annotations

import pytest

from tests.helpers.faults import FAULTS, break_run


@pytest.mark.parametrize(
    "name",
    [
        "exception-1",
        "kill-1",
        pytest.param("stop-0", marks=pytest.mark.timeout(240)),  # waits for timeout_seconds, 15
        "interrupt",
    ],
)
def test_fault_ends_cleanly(name, tmp_path):
    fault, outcome = FAULTS[name], break_run(name, tmp_path)
    assert (outcome.exit_code != 0) == fault.breaks
    for text in fault.shows:
        assert text in outcome.output
    assert outcome.left_behind == []
    assert outcome.checkpoint_step >= 2
