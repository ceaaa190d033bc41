"""Steps of a module whose state is offloaded: their time, the memory they take, and what they read and write."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import account, zoo

WARM_STEPS = 2
"""Before it is measured: states are made in the first one."""


class Blocks(L.LightningModule):
    """Equal layers; ``numel`` is that of one."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        loss = batch.square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def traffic() -> tuple[int, int]:
    """Bytes that this process has read from the disk, and written to it."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def resident() -> dict[str, int]:
    """Bytes of this process in memory: anonymous ones, and those of files."""
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {key: int(value.split()[0]) << 10 for key, value in lines if key in ("RssAnon", "RssFile")}
    return {"anonymous": sizes["RssAnon"], "files": sizes["RssFile"]}


_SYNC, _PAGEOUT = 4, 21  # MS_SYNC and MADV_PAGEOUT of linux/mman.h


def evict() -> None:
    """Writes this process's files without names to the disk and drops their pages from memory."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if " rw-s " in line and line.endswith("(deleted)"):
            first, end = (int(number, 16) for number in line.split()[0].split("-"))
            region = ctypes.c_void_p(first), ctypes.c_size_t(end - first)
            libc.msync(*region, _SYNC)
            libc.madvise(*region, _PAGEOUT)


def _trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Watch(Callback):
    """Times of steps, and the most that is in memory from the end of the warm ones on.

    Args:
        trims: Whether free memory goes back to the kernel first where ``alive``, anonymous bytes before and after the
            optimizer steps, is looked at: a peak holds gaps between tensors, more of them on a busy machine.
        evicts: Whether nothing of the files is in memory when a forward, a backward or an optimizer's step begins.
    """

    def __init__(self, trims: bool = False, evicts: bool = False) -> None:
        self._trims, self._evicts, self.alive = trims, evicts, 0
        self.steps: list[float] = []
        self.optimizer_steps: list[float] = []
        self.peak = {"anonymous": 0, "files": 0}
        _trim()  # what an earlier run in this process has freed is nobody's
        self.before = resident()
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            self.peak = {kind: max(self.peak[kind], now) for kind, now in resident().items()}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_STEPS:
            self.traffic = traffic()
            self._sampler.start()
        self._began = time.perf_counter()
        self._look()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._look()

    def _look(self) -> None:
        if self._trims:
            _trim()
            self.alive = max(self.alive, resident()["anonymous"] - self.before["anonymous"])
        if self._evicts:
            evict()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._look()
        self._stepped = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if batch_idx >= WARM_STEPS:
            self.steps.append(now - self._began)
            self.optimizer_steps.append(now - self._stepped)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._ended.set()
        self._sampler.join()
        self.traffic = tuple(now - then for now, then in zip(traffic(), self.traffic, strict=True))


def steps(
    settings: dict[str, Any],
    num_blocks: int,
    width: int,
    num_steps: int,
    folder: str,
    short: bool = False,
    trims: bool = False,
) -> dict[str, Any]:
    """What the steps of a :class:`Blocks` took on this rank; bytes are those beyond what the process had before.

    Args:
        settings: Of the strategy; with nvme its files go to ``folder``.
        num_steps: Measured, beside the warm ones.
        short: Whether memory is taken to be short, so that each part of a step reads the disk.
    """
    from lightning_zero.config import OffloadConfig

    given = dict(settings)
    offload = given.pop("offload", {"target": "none"})
    if offload["target"] == "nvme":
        offload = {**offload, "path": folder}
    torch.manual_seed(0)
    watch = Watch(trims, short)
    module = Blocks(num_blocks, width)
    total = WARM_STEPS + num_steps
    with tempfile.TemporaryDirectory() as root:
        trainer = zoo.make_trainer(
            {**given, "offload": OffloadConfig(**offload)},
            max_steps=total,
            max_epochs=1,
            callbacks=[watch],
            default_root_dir=root,
        )
        trainer.fit(module, DataLoader(account.Vectors(width), batch_size=1))
    return {
        "step": statistics.median(watch.steps),
        "optimizer": statistics.median(watch.optimizer_steps),
        "read": watch.traffic[0] / num_steps,
        "written": watch.traffic[1] / num_steps,
        **{kind: watch.peak[kind] - watch.before[kind] for kind in watch.peak},
        "alive": watch.alive,
        "losses": module.losses,
        "pid": os.getpid(),
    }
