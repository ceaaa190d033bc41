"""The engine's current activities, on which the meaning of a parameter's read or write depends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto


class Phase(Enum):
    """One thing that may be under way; none is, between steps and in hooks there: parameters are whole from the moment
    user code touches them until its window ends, and DeepSpeed's own hooks do nothing."""

    STEP = auto()
    """Inside ``DeepSpeedEngine.run``: a stage-3 parameter that user code reads is gathered in place, and stays for its
    module's forward and backward."""
    BACKWARD = auto()
    """DeepSpeed and autograd read and write tensors as they are: nothing is brought or opened."""
    WHOLE = auto()
    """Whole copies are registered on the module: nothing is opened, gathered, released or agreed on."""


class UnderWay:
    """The phases that are under way. They nest, so each is asked for by itself: a backward or ``full_parameters`` of
    the user's own comes inside a step, and the step goes on afterwards."""

    def __init__(self) -> None:
        self._phases: list[Phase] = []  # the outermost first

    def is_between(self) -> bool:
        """Whether none is."""
        return not self._phases

    def __contains__(self, phase: Phase) -> bool:
        return phase in self._phases

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """``phase`` is under way inside it."""
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()
