"""Runs of 16 ranks on one machine, forked after importing: one rank is slow, or is killed.

``python -m tests.helpers.many_ranks FOLDER CASE...`` runs each of :data:`CASES` that is named and prints a line of JSON
for it: :class:`Seen`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

ROOT = Path(__file__).resolve().parents[2]
RANKS, ODD, STEPS, BATCH, WIDTH = 16, 9, 4, 2, 8
OPEN_FILES = 256
CASES: dict[str, dict[str, Any]] = {
    "save": {"stage": 3, "shard_size": 8, "checkpoint": "sharded"},
    "kill": {"stage": 3},
}
"""``save``: before the last step, and one rank is slow. ``kill``: one rank in mid-run."""


@dataclass
class Seen:
    """What a case came to."""

    losses: list[float] = field(default_factory=list)
    """Of all ranks together, at each step."""
    sockets: list[int] = field(default_factory=list)
    """Of each rank at the last step, and so after a save."""
    ended: list[int] = field(default_factory=list)
    """Of each rank, when the module is whole again; the engine has closed its own."""
    error: str = ""
    left: int = 0
    """Processes that were there afterwards."""


class Module(L.LightningModule):
    def __init__(self, folder: str, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.folder, self.how = Path(folder), how

    def train_dataloader(self) -> Any:
        """Of the samples in their order, this rank's."""
        dealt = DistributedSampler(samples(), RANKS, self.global_rank, shuffle=False)  # type: ignore[arg-type]
        return DataLoader(samples(), batch_size=BATCH, sampler=dealt)  # type: ignore[arg-type]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.global_rank == ODD:
            if self.how == "save":
                time.sleep(0.1)
            elif index == 2:
                (self.folder / "fault").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        loss = self.net(batch).square().mean()
        with open(self.folder / f"losses{self.global_rank}", "a", encoding="utf-8") as file:
            file.write(f"{loss.item()!r}\n")  # no collective of its own, which would be the one that fails
        if index == STEPS - 1:
            self.count("sockets")
        return loss

    def count(self, name: str) -> None:
        """Writes down how many sockets this rank has open."""
        sockets = sum(_is_socket(name) for name in os.listdir("/proc/self/fd"))
        (self.folder / f"{name}{self.global_rank}").write_text(str(sockets))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.how == "save" and index == STEPS - 2:
            self.trainer.save_checkpoint(self.folder / "saved.ckpt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except OSError:  # the folder's own descriptor
        return False


def samples() -> torch.Tensor:
    """Of a whole run."""
    return torch.randn(RANKS * STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def expected_losses() -> list[float]:
    """One process, all samples of a step at once."""
    module, losses = Module("", ""), []
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    for batch in samples().split(RANKS * BATCH):
        optimizer.zero_grad()
        loss = module.net(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _run(case: str, folder: Path) -> Seen:
    from lightning_zero import ZeroStrategy

    class Counting(ZeroStrategy):
        def teardown(self) -> None:
            module = self.lightning_module
            super().teardown()
            module.count("ended")

    folder.mkdir()
    strategy = Counting(**CASES[case], min_unit_numel=1, timeout_seconds=600.0, start_method="fork")
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    seen = Seen()
    try:
        trainer.fit(Module(str(folder), case))
    except BaseException as error:
        if not (folder / "fault").exists():
            raise
        seen.error = str(error)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    seen.left = sum(Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" for pid in children)
    each = [path.read_text().splitlines() for path in folder.glob("losses*")]
    seen.losses = [sum(map(float, step)) / len(step) for step in zip(*each, strict=False)]
    for found, name in ((seen.sockets, "sockets"), (seen.ended, "ended")):
        found += [int((folder / f"{name}{rank}").read_text()) for rank in range(RANKS if not seen.error else 0)]
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    for given in sys.argv[2:]:
        result = _run(given, Path(sys.argv[1]) / given)
        print("SEEN", json.dumps({"case": given, **asdict(result)}), flush=True)
