"""``lightning-zero plan``: a plan for devices that are not there, without memory and without starting anything."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.commands import SMALL, run, run_imported

MODULE = "-m", "lightning_zero"
USED = """
import atexit, resource
atexit.register(lambda: print(f"\\nused {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss} KiB"))
"""
SHAPES = [s for s in SMALL if not s.startswith("trainer")]


def test_plan_of_the_main_job_as_table_and_json(tmp_path):
    done = run_imported(
        "plan",
        "trainer.devices=8",
        "trainer.num_nodes=4",
        "trainer.precision=bf16-mixed",
        "trainer.accumulate_grad_batches=2",
        "plan.device_memory_gib=80",
        "plan.json=plan.json",
        *SHAPES,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert "take zero1: needs" in done.stdout
    assert "32 rank(s), micro-batch 16, 2 per optimizer step" in done.stdout
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["world_size"] == 32
    assert made["choice"] == "zero1"
    assert [row["name"] for row in made["rows"]][:4] == ["ddp", "zero1", "zero2", "zero3"]
    assert "Initializing distributed" not in done.stdout


@pytest.mark.rest
def test_plan_of_70_billion_parameters_takes_little_memory(tmp_path):
    """2 GB, as the command itself counts them."""
    pytest.importorskip("transformers", reason="the extra `examples` is not installed")
    done = run(
        *("-c", f"import runpy\n{USED}\nrunpy.run_module('lightning_zero', run_name='__main__', alter_sys=True)"),
        "plan",
        "model=llama_70b",
        "data=none",
        "trainer=gpu",
        "trainer.devices=8",
        "trainer.num_nodes=8",
        "plan.batch=[1,4097]",
        "plan.device_memory_gib=80",
        "plan.json=plan.json",
        cwd=tmp_path,
        timeout_seconds=240,
    )
    assert done.returncode == 0, done.stdout
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["num_parameters"] == 70_553_706_496
    assert (made["choice"], made["checkpointing"]) == ("zero3", True)
    used = re.search(r"^used (\d+) KiB$", done.stdout, re.MULTILINE)
    assert used is not None
    assert int(used.group(1)) * 1024 < 2e9


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.device_memory_gb=80"], "did you mean plan.device_memory_gib?"),
        (["plan.headroom=1.5"], "plan.headroom=1.5"),
        (["plan.device_memory_gib=-1"], "plan.device_memory_gib=-1"),
        (["plan.batch=[0,3]"], "plan.batch=[0, 3]"),
        (["plan.batch=[2,3]", "plan.batch_dtype=int65"], "plan.batch_dtype='int65'"),
        (["trainer.devices=many"], "trainer.devices='many'"),
        (["trainer.precision=fp8"], "precision='fp8'"),
    ],
)
def test_bad_input_is_one_message(overrides, message, tmp_path):
    done = run_imported("plan", "plan.device_memory_gib=1", *SHAPES, *overrides, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert message in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.rest
def test_zero_auto_and_profile_from_the_command_line(tmp_path):
    done = run(
        *MODULE,
        "fit",
        "strategy=zero_auto",
        "callbacks=zero_monitor",
        "profile=true",
        "trainer.devices=2",
        *(s for s in SMALL if "max_steps" not in s),
        "trainer.max_steps=6",
        "hydra.run.dir=run",
        cwd=tmp_path,
        timeout_seconds=280,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("zero_auto takes zero1: needs") == 1
    assert "ZeroMonitor" in done.stdout
    for rank in (0, 1):
        events = json.loads((tmp_path / "run" / f"trace-rank{rank}.json").read_text())["traceEvents"]
        assert any("reduce_scatter" in event.get("name", "") for event in events)
