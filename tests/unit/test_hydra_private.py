"""Tells when a private part of Hydra that we touch has moved: each is used here as the package uses it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from lightning_zero.private import hydra as private
from lightning_zero.private.check import check


def test_the_table() -> None:
    check(private.HYDRA)


def test_a_job_finds_its_own_config(tmp_path: Path, monkeypatch) -> None:
    """Within it, but not in a thread of its own, nor outside of any job."""
    (tmp_path / "config.yaml").write_text("a: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["program", "a=2", f"hydra.run.dir={tmp_path / 'out'}", "hydra.output_subdir=null"]
    )
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    found = []

    def task(cfg) -> None:
        found.append((cfg, private.running_job()))
        thread = threading.Thread(target=lambda: found.append(private.running_job()))
        thread.start()
        thread.join()

    assert private.running_job() is None
    main = hydra.main(version_base="1.3", config_path=str(tmp_path), config_name="config")
    try:
        main(task)()
    finally:
        GlobalHydra.instance().clear()
    (given, job), in_thread = found
    assert in_thread is None
    assert isinstance(job, private.Job)
    assert job.function is task
    assert job.task is given
    assert job.task == {"a": 2}
    assert job.config.hydra.runtime.output_dir == str(tmp_path / "out")
