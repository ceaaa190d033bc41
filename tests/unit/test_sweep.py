"""The results of a sweep's jobs, and the metric that a job returns to its sweeper."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lightning_zero.app.cli import _optimized
from lightning_zero.app.hydra_config import ConfigError
from lightning_zero.app.sweep import RESULT, compare


def test_a_job_that_ended_badly_after_its_fit_did_not_finish(tmp_path):
    for name, record in (("0", {"metrics": {"loss": 1.0}}), ("1", {"metrics": {}, "finished": True})):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(f"- a={name}\n")
        facts = {"ranks": 2, "steps": 3, "seconds": 1.0} if name == "0" else {}
        (tmp_path / name / RESULT).write_text(json.dumps({**record, **facts}))
    lines = compare(tmp_path).splitlines()
    assert "did not finish" in lines[2]
    assert "did not finish" not in lines[3]


def test_an_unknown_metric_is_named():
    trainer = SimpleNamespace(callback_metrics={"loss": 1.5})
    assert _optimized("loss", trainer) == 1.5
    with pytest.raises(ConfigError, match=r"optimized_metric='vall': .*it has logged loss"):
        _optimized("vall", trainer)
