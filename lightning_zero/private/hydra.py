"""Private parts of Hydra, read in hydra-core 1.3.0-1.3.8.

They give a job's config to its ranks: Hydra passes a job its folder and its overrides, but no public name gives its
config. Checked when a job's ranks are started.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

from lightning_zero.private.check import Library, Needed, check

HYDRA = Library(
    "hydra-core",
    ">=1.3,<1.4",
    (Needed("hydra.core.utils:run_job", stores="config task_cfg hydra"),),
)
"""The flag ``--experimental-rerun`` is private, too; ``tests/system/test_multirun.py`` uses it."""


class Job(NamedTuple):
    """The local variables of ``run_job`` that describe the job."""

    config: Any
    """The config with the ``hydra`` node."""
    task: Any
    """The config without that node, as the function gets it, with the interpolations that were resolved."""


def running_job() -> Job | None:
    """Returns the innermost job of this thread, read from the frame of ``run_job``; ``None`` in other threads."""
    check(HYDRA)
    from hydra.core.utils import run_job

    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not run_job.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    found = frame.f_locals
    return Job(found["config"], found["task_cfg"])
