"""A run that is killed while it saves leaves a whole checkpoint to continue from, every time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero.errors import CheckpointError
from tests.helpers.ranks import RankPool

NUM_KILLS = 6
"""For each of three forms; runs are forks of one process that has everything imported: about a second each."""
WORLD_SIZE = 2
WIDTH = 384


class Saver(L.LightningModule):
    """Counts its steps in a weight of 2.4 MB that takes a while to write; a torn file would show different counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for p in self.parameters():
            nn.init.zeros_(p)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return sum(layer.weight.sum() for layer in self.layers)  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)  # each step takes 1 from every element


class _SavesEachStep(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
        Path(f"{self.path}.started").touch()
        trainer.save_checkpoint(self.path)
        if trainer.is_global_zero:
            Path(f"{self.path}.{trainer.global_step}").touch()  # from now on this step must not be lost


def _rank(rank: int, port: int, form: str, path: str, resume: str | None) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="crash",
    )  # fmt: skip
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # rank 0 serves the store, as without an agent
    log = os.open(f"{path}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    trainer = L.Trainer(
        strategy=lightning_zero.ZeroStrategy(stage=3, min_unit_numel=1, checkpoint=form, timeout_seconds=20.0),
        accelerator="cpu", devices=WORLD_SIZE, max_steps=100_000, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[_SavesEachStep(path)],
    )  # fmt: skip
    trainer.fit(Saver(), DataLoader(torch.zeros(1000, 1)), ckpt_path=resume)


def _start(form: str, path: str, resume: str | None) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _rank(rank, port, form, path, resume)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    return pids


def _wait_for_saves(count: int, path: str, pids: list[int]) -> None:
    """Until the run has begun, and ``count`` saves are done."""
    while not (Path(f"{path}.started").exists() and _steps_said_saved(path) >= count):
        for pid in pids:
            if os.waitpid(pid, os.WNOHANG)[0]:
                pytest.fail(f"a rank ended by itself:\n{Path(f'{path}.log').read_text()[-3000:]}")
        time.sleep(0.002)


def _steps_said_saved(path: str) -> int:
    marks = Path(path).parent.glob(Path(path).name + ".[0-9]*")
    return max((int(mark.suffix[1:]) for mark in marks), default=0)


def _step_in(path: str) -> int | None:
    """The step of a whole checkpoint; ``None`` if there never was one; fails if it is torn."""
    try:
        content = lightning_zero.load_checkpoint(path)
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        if "its saving was interrupted" in str(error):
            return None
        raise
    values = torch.cat([w.flatten() for w in content["state_dict"].values()])
    assert (values == -float(content["global_step"])).all(), "weights of different steps in one checkpoint"
    return int(content["global_step"])


def _kill_again_and_again(form: str, folder: str) -> None:
    torch.set_num_threads(1)
    path = f"{folder}/x.ckpt"
    generator = random.Random(form)
    reached = 0
    for _ in range(NUM_KILLS):
        Path(f"{path}.started").unlink(missing_ok=True)
        pids = _start(form, path, path if reached else None)
        try:
            _wait_for_saves(_steps_said_saved(path) + generator.randrange(1, 4), path, pids)
            time.sleep(generator.uniform(0.0, 0.02))  # anywhere within the next save
        finally:
            for pid in generator.sample(pids, WORLD_SIZE):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        step, said = _step_in(path) or 0, _steps_said_saved(path)
        # in the background, the last save or two were still being written
        assert step >= (said - 2 if form == "sharded-async" else said)
        assert step >= reached
        reached = step
    leftovers = [name for name in os.listdir(folder) if name.endswith(".partial")]
    assert len(leftovers) <= 1, "each save removes what a killed one left"


@pytest.mark.parametrize("form", ["file", "sharded", "sharded-async"])
def test_a_run_killed_at_any_moment_resumes_from_a_whole_checkpoint(form: str, tmp_path: Path) -> None:
    with RankPool() as pool:  # a fresh process to fork from: this one holds threads and what other tests have left
        pool.run(_kill_again_and_again, form, str(tmp_path), world_size=1, timeout_seconds=55.0)
