"""The main job through DeepSpeed with its states in files, from the command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.commands import SMALL

BIG_ENOUGH = ("model.width=256", "model.num_layers=4")
"""Four blocks of this width are 3.2 million elements; below 1 MiB per rank DeepSpeed keeps states in memory."""


@pytest.mark.usefixtures("nvme")
def test_main_job_under_zero3_with_nvme_has_its_states_on_disk(tmp_path: Path) -> None:
    fast = tmp_path / "fast"
    fast.mkdir()
    settings = [*SMALL, *BIG_ENOUGH, "trainer.devices=2", "trainer.limit_val_batches=1"]
    settings += [
        "strategy=zero3",
        "strategy/engine=deepspeed",
        "strategy/offload=nvme",
        f"strategy.offload.path={fast}",
    ]
    log = tmp_path / "log.txt"
    largest = 0
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_zero", "fit", *settings],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 400
        while process.poll() is None and time.monotonic() < deadline:
            largest = max(largest, _bytes_in(fast))
            time.sleep(0.05)
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    assert process.returncode == 0, log.read_text()
    assert len(list((tmp_path / "outputs").glob("*/*/checkpoints/last.ckpt"))) == 1, log.read_text()
    numel = 4 * 12 * 256 * 256  # the blocks' matrices: 12 width² each
    assert largest > 3 * 4 * numel, "masters and both of Adam's states, 4 bytes each"
    assert list(fast.iterdir()) == []  # removed at the end


def _bytes_in(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # which passes over folders that are on their way out
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(place) / name).stat().st_size if name.endswith(".swp") else 0
    return total
