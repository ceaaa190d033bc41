"""The metric that a job returns to its sweeper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_zero.app.cli import _optimized
from lightning_zero.app.hydra_config import ConfigError


def test_an_unknown_metric_is_named():
    trainer = SimpleNamespace(callback_metrics={"loss": 1.5})
    assert _optimized("loss", trainer) == 1.5
    with pytest.raises(ConfigError, match=r"optimized_metric='vall': .*it has logged loss"):
        _optimized("vall", trainer)
