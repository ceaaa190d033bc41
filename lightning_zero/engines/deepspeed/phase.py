"""The engine's current activities, which decide how a parameter's read or write is handled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto


class Phase(Enum):
    """An activity that may be under way.

    Between steps, including hooks there, no phase is under way. Parameters are then full from user code's first touch
    until the window ends, and DeepSpeed's own hooks do nothing."""

    STEP = auto()
    """Inside ``DeepSpeedEngine.run``: a stage-3 parameter that user code reads is gathered in place, and stays full for
    its module's forward and backward."""
    BACKWARD = auto()
    """DeepSpeed and autograd access tensors directly: nothing is gathered or opened for user code."""


class UnderWay(list[Phase]):
    """The phases that are under way, the outermost first. Phases nest: a user's own backward runs inside a
    step, and the step continues afterwards. Test for one phase with ``in``; never compare with the
    innermost."""

    def is_between(self) -> bool:
        """Whether no phase is under way: user code runs between steps."""
        return not self

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Marks ``phase`` as under way inside the context."""
        self.append(phase)
        try:
            yield
        finally:
            self.pop()
