"""The command line beside training: what it makes of the main job's checkpoint, what it refuses before any process
starts, and what it says of itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import lightning_zero
from tests.system.commands import SMALL, run

EVALUATION = [word for word in SMALL if not word.startswith("trainer.max_steps")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded one of the main job's after three steps on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    words = *SMALL, "trainer.limit_train_batches=3", "strategy.checkpoint=sharded", "hydra.run.dir=."
    done = run("fit", "experiment=main_job", *words, fork="all", cwd=folder)
    assert done.returncode == 0
    assert re.search(r"^loss \d.*val_perplexity \d", done.stdout, re.MULTILINE)
    return sorted(folder.rglob("checkpoint.json"))[-1].parent


def test_validate_test_and_predict(checkpoint, tmp_path):
    words = *EVALUATION, "trainer.devices=2", f"ckpt_path='{checkpoint}'"
    for command, said in (("validate", "val_perplexity"), ("test", "test_perplexity")):
        done = run(command, *words, fork="all", cwd=tmp_path)
        assert done.returncode == 0
        assert said in done.stdout
    words += "trainer.limit_predict_batches=4", "hydra.run.dir=predicted"
    done = run("predict", *words, fork="first", cwd=tmp_path)
    assert done.returncode == 0
    files = sorted(path.name for path in (tmp_path / "predicted").glob("*.pt"))
    assert files == ["predictions-rank0.pt", "predictions-rank1.pt"]


def test_convert_there_and_back(checkpoint, tmp_path):
    one, two, three = (str(tmp_path / name) for name in ("one.ckpt", "two.ckpt", "three.ckpt"))
    for source, target, form in ((str(checkpoint), one, "file"), (one, two, "sharded"), (two, three, "file")):
        done = run("convert", source, target, fork="all", cwd=tmp_path)
        assert done.returncode == 0
        assert done.stdout.strip().endswith(f"{target} ({form})")
    first, last = (torch.load(path, weights_only=True) for path in (one, three))
    assert list(first) == list(last)
    assert first["state_dict"].keys() == last["state_dict"].keys()
    assert all(torch.equal(first["state_dict"][k], last["state_dict"][k]) for k in first["state_dict"])
    for mine, other in zip(first["optimizer_states"], last["optimizer_states"], strict=True):
        for index, state in mine["state"].items():
            assert all(torch.equal(state[k], other["state"][index][k]) for k in state)
    assert sorted(os.listdir(tmp_path)) == ["one.ckpt", "three.ckpt", "two.ckpt"]  # no scratch is left


def test_convert_refuses_what_it_cannot_do(checkpoint, tmp_path):
    folder = str(checkpoint)
    for arguments, said in (
        ((folder, folder), "already exists"),
        ((f"{folder}/..", "x.ckpt"), "checkpoint.json is missing, so it is not a sharded checkpoint"),
        ((folder, "x", "--format", "safetensors", "--prefix", "nothing"), "lacks this prefix"),
    ):
        _refused("convert", *arguments, said=said, folder=tmp_path)
    assert os.listdir(tmp_path) == []


CONVERTS = """
from lightning_zero.checkpoint.convert import convert
from tests.helpers.saving import Peak

for source, target in (("one.ckpt", "two.ckpt"), ("two.ckpt", "three.ckpt")):
    with Peak() as peak:
        convert(source, target)
    print("took", peak.extra_mib)
"""


def test_converting_takes_one_tensor_of_memory(tmp_path):
    """206 MiB in 6 tensors, both ways: as read and in its place, and a bit for the buffers of files."""
    state = {f"w{i}": torch.full((3000, 3000), float(i)) for i in range(6)}
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.6"}, tmp_path / "one.ckpt")
    done = run("-c", CONVERTS, fork="all", cwd=tmp_path)
    took = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("took")]
    assert len(took) == 2
    assert max(took) < 2 * state["w0"].nbytes / 2**20 + 8
    assert torch.equal(torch.load(tmp_path / "three.ckpt", mmap=True)["state_dict"]["w5"], state["w5"])


def test_a_gpt2_goes_to_from_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install lightning-zero[examples]")
    done = run(
        *("fit", "experiment=gpt2_zero2", "trainer.max_steps=2", "data.block_size=32", "hydra.run.dir=."),
        *("+model.config.n_layer=2", "+model.config.n_embd=64", "+model.config.n_head=2"),
        *("data.vocab_size=300", "data.max_characters=20000"),
        fork="all",
        cwd=tmp_path,
    )
    assert done.returncode == 0
    path = sorted(tmp_path.rglob("*.ckpt"))[-1]
    done = run("convert", str(path), "out", "--format", "safetensors", fork="all", cwd=tmp_path)
    assert done.returncode == 0
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    saved = lightning_zero.load_checkpoint(path)["state_dict"]
    assert {name.removeprefix("model.") for name in saved} == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved[f"model.{name}"].clone()), name
    assert model.lm_head.weight is model.transformer.wte.weight


def _refused(*command: str, said: str, folder: Path, code: int = 2) -> None:
    """One message, before any process starts."""
    done = run(*command, fork="all", cwd=folder)
    assert done.returncode == code, command
    assert said in done.stdout.partition("error: ")[2], command
    assert "Traceback" not in done.stdout, command
    assert "Initializing distributed" not in done.stdout, command


def test_what_cannot_run_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    for words, said in (
        ("fit strategy=zero4", "Available options in 'strategy'"),
        ("fit strategy.stagee=1", "Did you mean 'stage'?"),
        ("fit strategy.stage=4", "stage=4: use one of 1, 2, 3"),
        ("fit trainer.max_steps=abc", "trainer: "),
        ("fit launcher.name=remote", "launcher.name='remote'"),
        ("fit model=custom model._target_=broken.MyModule", "No module named 'nothing_of_that_name'"),
        ("plan plan.device_memory_gib=1 plan.batch=[0,3]", "plan.batch=[0, 3]"),
        ("plan plan.device_memory_gib=1 trainer.devices=many", "trainer.devices='many'"),
        ("submit --dry-run launcher=slurm trainer.devices=2", "trainer.devices=2"),
        ("submit --dry-run launcher=local", "use submit launcher=slurm"),
    ):
        _refused(*words.split(), said=said, folder=tmp_path)
    popen = "strategy.start_method=popen"  # else ranks are spawned, as in pytest
    done = run("fit", "ckpt_path=nowhere/x.ckpt", popen, *SMALL, fork="all", cwd=tmp_path)
    assert done.returncode == 1
    assert "lightning-zero: error: Checkpoint file not found: " in done.stdout
    assert "Traceback" not in done.stdout


def test_submit_with_dry_run_only_writes(tmp_path):
    done = run(
        *("submit", "--dry-run", "launcher=slurm", "launcher.nodes=4", "launcher.gpus_per_node=8"),
        *("launcher.time_minutes=240", "strategy=zero3", "data.batch_size=4", 'launcher.extra=["--constraint=h100"]'),
        *("launcher.setup=[module load cuda]", "hydra.run.dir=job"),
        fork="all",
        cwd=tmp_path,
    )
    assert done.returncode == 0
    script = (tmp_path / "job" / "job.sbatch").read_text()
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=240",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --constraint=h100",
        "module load cuda",
        "  trainer.devices=8 \\",
        "  trainer.num_nodes=4 \\",
        "  data.batch_size=4 \\",
        "  trainer=gpu \\",
    ):
        assert line in script.splitlines()
    assert "launcher" not in script
    assert subprocess.run(["bash", "-n", str(tmp_path / "job" / "job.sbatch")], check=False).returncode == 0


def test_plan_as_table_and_json(tmp_path):
    words = "trainer.devices=8", "trainer.num_nodes=4", "trainer.precision=bf16-mixed"
    words += "trainer.accumulate_grad_batches=2", "plan.device_memory_gib=80", "plan.json=plan.json"
    done = run("plan", *words, *EVALUATION, fork="all", cwd=tmp_path)
    assert done.returncode == 0
    assert "take zero1: needs" in done.stdout
    assert "32 rank(s), micro-batch 16, 2 per optimizer step" in done.stdout
    made = json.loads((tmp_path / "plan.json").read_text())
    assert (made["world_size"], made["choice"]) == (32, "zero1")
    assert "Initializing distributed" not in done.stdout


def test_zero_auto_a_monitor_and_traces(tmp_path):
    words = "strategy=zero_auto", "callbacks=zero_monitor", "profile=true", "trainer.devices=2", *EVALUATION
    done = run("fit", *words, "trainer.max_steps=6", "hydra.run.dir=run", fork="all", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("zero_auto takes zero1: needs") == 1
    assert "ZeroMonitor" in done.stdout
    for rank in (0, 1):
        (path,) = (tmp_path / "run").glob(f"fit-trace-{rank}*.json")
        events = json.loads(path.read_text())["traceEvents"]
        assert any("reduce_scatter" in event.get("name", "") for event in events)


def test_help_and_config_say_what_can_be_set(tmp_path):
    assert "fit" in run("--help", fork="all", cwd=tmp_path).stdout
    assert lightning_zero.__version__ in run("--version", fork="all", cwd=tmp_path).stdout
    helped = run("fit", "seed=7", "--help", fork="all", cwd=tmp_path)
    assert helped.returncode == 0
    choices = re.search("^strategy: (.*)$", helped.stdout, re.MULTILINE)
    assert choices
    assert {"ddp", "zero1", "zero2", "zero3_offload_deepspeed"} <= set(choices[1].split(", "))
    assert "seed: 7" in helped.stdout
    config = run("fit", "--cfg", "job", "strategy=zero1", fork="all", cwd=tmp_path).stdout
    assert "stage: 1" in config
    assert run("nonsense", fork="all", cwd=tmp_path).returncode == 2
