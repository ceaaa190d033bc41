"""The command line: one run folder per run, clear refusals before any process starts, no process left behind."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

import lightning_zero
from tests.helpers.faults import marked_processes, wait_for
from tests.integration.commands import SMALL, console_script, run, run_imported

MODULE = "-m", "lightning_zero"


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(MODULE, id="python -m", marks=pytest.mark.full),
        pytest.param((console_script(),), id="console script", marks=pytest.mark.rest),
    ],
)
def test_two_processes_share_one_run_folder(entry, tmp_path):
    done = run(*entry, "fit", "strategy=zero2", "trainer.devices=2", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "share of DDP's" in done.stdout
    (folder,) = (tmp_path / "outputs").glob("*/*")
    assert "stage: 2" in (folder / "config.yaml").read_text()
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["outputs"]


@pytest.mark.rest
@pytest.mark.timeout(450)
def test_main_job_beats_the_unigram_baseline(tmp_path):
    done = run(*MODULE, "fit", "experiment=main_job", "trainer.max_steps=90", cwd=tmp_path, timeout_seconds=400)
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("held-out perplexity")]
    words = [word.strip(",") for word in line.split()]
    perplexity, baseline = (float(word) for word in words if word.replace(".", "").isdigit())
    assert perplexity < 0.7 * baseline
    assert "sample:" in done.stdout
    assert "checkpoint: " in done.stdout


@pytest.mark.rest
def test_validates_and_predicts_from_a_checkpoint(tmp_path):
    small = [s for s in SMALL if not s.startswith("trainer.max_steps")]
    run(*MODULE, "fit", *SMALL, "hydra.run.dir=first", cwd=tmp_path)
    checkpoint = tmp_path / "first" / "checkpoints" / "last.ckpt"
    done = run(*MODULE, "validate", *small, "trainer.devices=2", f"ckpt_path={checkpoint}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "val_perplexity" in done.stdout
    done = run(*MODULE, "predict", *small, f"ckpt_path={checkpoint}", "hydra.run.dir=third", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "third" / "predictions-rank0.pt").is_file()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.stage=4", "stage=4: use one of 1, 2, 3"),
        ("strategy.stage=two", "'two'"),
        ("strategy.offload=cpu", "strategy/offload=cpu"),
        ("strategy/offload=nvme strategy.offload.buffer_count=4", "offload.buffer_count=4 with engine='fsdp2'"),
        ("strategy.deepspeed_config=/nowhere.json", "deepspeed_config='/nowhere.json' cannot be read"),
        ("strategy.deepspeed.overlap_com=true", "overlap_com"),
        ("strategy.units=Block", "units"),
        ("strategy=zero4", "zero4"),
        ("strategy.stagee=1", "did you mean strategy.stage?"),
        ("trainer.foo=1", "trainer.foo"),
        ("+trainer.max_stepz=1", "did you mean trainer.max_steps?"),
        ("trainer.strategy=ddp", "use strategy=ddp"),
        ("trainer.max_steps=abc", "abc"),
        ("launcher.name=remote", "launcher.name='remote'"),
        ("model._target_=nowhere.Nothing", "nowhere"),
    ],
)
def test_bad_input_is_one_message_before_any_process_starts(override, message, tmp_path):
    done = run_imported("fit", "trainer.devices=2", *override.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert message in done.stdout
    assert "Traceback" not in done.stdout
    assert "Initializing distributed" not in done.stdout


def test_help_and_config_say_what_can_be_set(tmp_path):
    assert "fit" in run_imported("--help", cwd=tmp_path).stdout
    assert lightning_zero.__version__ in run_imported("--version", cwd=tmp_path).stdout
    helped = run_imported("fit", "--help", cwd=tmp_path)
    assert helped.returncode == 0
    choices = re.search("^strategy: (.*)$", helped.stdout, re.MULTILINE)
    assert choices
    assert {"ddp", "zero1", "zero2", "zero3_offload_deepspeed"} <= set(choices[1].split(", "))
    with_config = run_imported("fit", "seed=7", "--help", cwd=tmp_path).stdout  # Hydra's own, from the same template
    assert with_config.startswith(helped.stdout)
    assert "seed: 7" in with_config.removeprefix(helped.stdout)
    config = run_imported("fit", "--cfg", "job", "strategy=zero1", cwd=tmp_path).stdout
    assert "stage: 1" in config
    assert "find_unused_parameters: true" in config
    assert run_imported("nonsense", cwd=tmp_path).returncode == 2


FAILS = """
import os, time
import lightning as L
import torch

class Fails(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == int(os.environ["FAILING_RANK"]):
            raise RuntimeError("rank %d is not well" % self.global_rank)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.mark.rest
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_failing_rank_ends_the_run_and_is_shown(rank, tmp_path):
    (tmp_path / "my_module.py").write_text(FAILS)
    done = run(
        *MODULE,
        "fit",
        "model=custom",
        "model._target_=my_module.Fails",
        "data=none",
        "callbacks=none",
        "trainer.devices=2",
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
        FAILING_RANK=str(rank),
        LIGHTNING_ZERO_TEST=str(tmp_path),
    )
    assert done.returncode not in (0, 2)
    assert f"rank {rank} is not well" in done.stdout
    assert "Traceback" in done.stdout
    wait_for(lambda: not marked_processes(tmp_path, "LIGHTNING_ZERO_TEST"))


@pytest.mark.rest
def test_the_environment_of_these_tests_is_clean():
    """A run started from inside another rank's environment would wait for peers that don't exist."""
    assert "RANK" not in os.environ
    assert subprocess.run([console_script(), "--version"], capture_output=True, check=False).returncode == 0
