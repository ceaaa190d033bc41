"""What is kept of a run's error, and what is not."""

from __future__ import annotations

import weakref

from lightning_zero.launch import failure


def test_an_error_that_was_noted_does_not_outlive_the_script_that_caught_it():
    """Its frames hold the tensors of the step: after out-of-memory, the next fit needs their memory."""

    class OwnError(Exception):
        pass

    error = OwnError()
    failure.note(error, "the run failed with")
    alive = weakref.ref(error)
    del error
    assert alive() is None
