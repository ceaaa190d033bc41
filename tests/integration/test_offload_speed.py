"""``benchmarks/offload_speed.py`` runs, in its smallest form: every contender trains, and the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT

SCRIPT = str(ROOT / "benchmarks" / "offload_speed.py")
TOLERANCE = 2e-2
"""bf16 compute, which DeepSpeed also reduces and returns its loss in."""


@pytest.mark.rest
@pytest.mark.parametrize(
    "names",
    [
        ["raw-3", "zero2_offload", "zero3_offload"],
        pytest.param(["raw-2", "deepspeed-2", "deepspeed-3", "zero2_offload_deepspeed"], marks=pytest.mark.full),
    ],
)
def test_every_contender_trains_the_same(tmp_path: Path, names: list[str]) -> None:
    out, trace = tmp_path / "found.json", tmp_path / "trace.json"
    settings = ["--shape", "tiny", "--steps", "2", "--rounds", "1", "--out", str(out), "--trace", str(trace)]
    command = [sys.executable, SCRIPT, *settings, "--contenders", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert set(found["contenders"]) == set(names)
    assert min(found["bytes_per_second"].values()) > 0
    first = found["contenders"][names[0]]["losses"]
    for each in found["contenders"].values():
        assert each["losses"] == pytest.approx(first, rel=TOLERANCE)
        assert each["median_seconds"] > 0
    if "zero2_offload" in names:
        assert json.loads(trace.read_text())["traceEvents"]
        ours = found["contenders"]["zero2_offload"]
        # one rank, bf16: fp32 masters up and fp32 gradients down, twice ZeRO-Offload's floor
        assert ours["pcie_bytes"] == pytest.approx(2 * ours["floor_bytes"])
        # its one block, the last, is gathered once for forward and backward
        assert found["contenders"]["zero3_offload"]["pcie_bytes"] == pytest.approx(ours["pcie_bytes"])
