"""A training that a batch system interrupts, and the one it is compared with.

``Numbered`` is trained on a loader that knows where it stands, so a checkpoint from the middle of an epoch continues
with the next batch. Global rank 0 appends every step's loss, averaged over the ranks, to ``$LOSSES``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from tests.helpers.slurm import Slurm


class NumberedBatches:
    """``count`` batches, each made from its number and the rank."""

    def __init__(self, count: int, rank: int) -> None:
        self.count, self.rank, self.at = count, rank, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            generator = torch.Generator().manual_seed(2 * self.at + self.rank)
            self.at += 1
            yield torch.randn(8, 16, generator=generator)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Numbered(L.LightningModule):
    """Learns a fixed linear map; every step of its first lives takes ``step_seconds``."""

    def __init__(self, steps: int = 60, step_seconds: float = 0.1) -> None:
        super().__init__()
        self.steps, self.step_seconds = steps, step_seconds
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))

    def train_dataloader(self) -> Any:
        return NumberedBatches(self.steps, self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch) - batch.roll(1, dims=1)).square().mean()
        mean = self.all_gather(loss.detach()).mean().item()
        life = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if self.global_rank == 0:
            with open(os.environ["LOSSES"], "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.global_step, "loss": mean, "life": life}) + "\n")
        if life < 2:
            time.sleep(self.step_seconds)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def settings(steps: int, step_seconds: float) -> list[str]:
    """Overrides of ``fit`` and ``submit`` that train it, in a run folder that carries a date and time."""
    return [
        *("strategy=zero3", "trainer.max_epochs=1", "model=custom", "model._target_=tests.helpers.requeued.Numbered"),
        *(f"+model.steps={steps}", f"+model.step_seconds={step_seconds}", "data=none", "callbacks=none"),
        *("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "trainer.logger=false"),
        *("trainer.use_distributed_sampler=false", "trainer.enable_checkpointing=false"),
        "hydra.run.dir='outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}'",
    ]


def read_losses(path: Path) -> list[dict[str, Any]]:
    """One entry per step that rank 0 has begun, in order."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _wait(slurm: Slurm, job: str, condition: Callable[[], bool], limit_seconds: float) -> dict[str, str]:
    """What SLURM says of the job as soon as ``condition`` holds; raises if the job ends before or time runs out."""
    deadline = time.monotonic() + limit_seconds
    while not condition():
        state = slurm.job(job)
        if time.monotonic() > deadline or state["JobState"] in ("FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED"):
            raise RuntimeError(f"job {job} has ended, or has not come far enough within {limit_seconds} s: {state}")
        time.sleep(0.3)
    return slurm.job(job)


@dataclass(frozen=True)
class Interrupted:
    """A job that was requeued, when it has ended."""

    losses: list[dict[str, Any]]
    state: dict[str, str]
    log: str
    """What its batch script and its ranks have printed."""


def run_interrupted(
    slurm: Slurm, folder: Path, env: dict[str, str], steps: int, by_signal: bool = False
) -> Interrupted:
    """Submits the job in ``folder``, requeues it with ``scontrol`` in its first life and, if ``by_signal``, lets
    SLURM's signal do it again."""
    folder.mkdir(parents=True, exist_ok=True)
    losses = folder / "losses.jsonl"
    slurm = replace(slurm, env={**slurm.env, **env, "LOSSES": str(losses)})
    # SLURM counts in minutes and is up to half a minute early with its signal: it comes 55 to 85 s after the start.
    limit = ("launcher.time_minutes=2", "launcher.signal_seconds=35") if by_signal else ("launcher.time_minutes=5",)
    words = ["submit", "launcher=slurm", "launcher.tasks_per_node=2", *limit, *settings(steps, 0.2)]
    said = slurm.run(sys.executable, "-m", "lightning_zero", *words, cwd=folder)
    job = said.split("Submitted batch job ")[1].split()[0]
    try:
        _wait(slurm, job, lambda: any(entry["step"] >= 8 for entry in read_losses(losses)), 100.0)
        slurm.run("scontrol", "requeue", job)
        state = _wait(slurm, job, lambda: slurm.job(job)["JobState"] == "COMPLETED", 300.0 if by_signal else 100.0)
    finally:
        logs = sorted([*folder.rglob("slurm-*.out"), *folder.rglob("rank*.log")])
        log = "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in logs)
        print(log)
    return Interrupted(read_losses(losses), state, log)
