"""How much memory saving and resuming take on each rank."""

from __future__ import annotations

import gc
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_zero import ZeroStrategy

MIB = 2**20


class Big(L.LightningModule):
    """``num_units`` units of ``width`` squared fp32 parameters, and as much momentum."""

    def __init__(self, width: int, num_units: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_units))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = batch.expand(1, self.width)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Peak:
    """Peak of this process's anonymous memory inside the block, above what it was; sampled, for the kernel keeps the
    peak of everything resident only, and pages of a mapped file are not ours to count."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.peak = _anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, _anonymous_bytes())

    def __exit__(self, *unused: Any) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def extra_mib(self) -> float:
        return (self.peak - self.before) / MIB


def _anonymous_bytes() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class _Measures(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path
        self.saving = 0.0
        self.resuming = 0.0
        self._loading: Peak | None = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._loading = Peak().__enter__()  # the module is there, nothing is loaded yet

    def on_train_start(self, trainer: Any, module: Any) -> None:
        assert self._loading is not None
        self._loading.__exit__()
        self.resuming = self._loading.extra_mib

    def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
        trainer.strategy.barrier()
        with Peak() as peak:
            trainer.save_checkpoint(self.path)
            if trainer.strategy._saving._background is not None:
                trainer.strategy._saving._background.wait()
        self.saving = peak.extra_mib


def _run(form: str, path: str, resume: str | None, size: tuple[int, int]) -> tuple[float, float]:
    measures = _Measures(path)
    trainer = L.Trainer(
        strategy=ZeroStrategy(stage=3, checkpoint=form, after_fit="sharded"), accelerator="cpu", devices=2,
        max_steps=1 if resume is None else 2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[measures],
    )  # fmt: skip
    trainer.fit(Big(*size), torch.utils.data.DataLoader(torch.ones(8, 1)), ckpt_path=resume)
    return measures.saving, measures.resuming


@dataclass(frozen=True)
class Memory:
    """All in MiB; lists are by rank."""

    saving: list[float]
    """Beyond what training holds."""
    resuming: list[float]
    """Beyond the whole module that ``__init__`` has made."""
    bounds: list[float]
    """What saving may take: one file on rank 0 its own size and one unit, on other ranks one unit; shards one unit, and
    in the background a copy of the rank's own."""
    size: float
    unit: float
    parameters: float

    @property
    def beyond(self) -> list[int]:
        """Ranks that took more than they may, and 8 MiB of buffers, which do not grow with the model."""
        return [rank for rank, bound in enumerate(self.bounds) if self.saving[rank] > bound + 8]


def measure(form: str, ranks: Any, width: int, num_units: int) -> Memory:
    """Saves after one step and resumes, on two ranks at stage 3.

    ``width`` should be above 2900: smaller tensors than 32 MiB stay with glibc's heap when they are freed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/x.ckpt"
        options = {"world_size": 2, "timeout_seconds": 600.0}
        saving = [peak for peak, _ in ranks(_run, form, path, None, (width, num_units), **options)]
        files = [f for f in [Path(path), *Path(path).rglob("*")] if f.is_file()]
        size = sum(f.stat().st_size for f in files) / MIB
        resuming = [peak for _, peak in ranks(_run, form, path, path, (width, num_units), **options)]
    unit = width * width * 4 / MIB
    bounds = {"file": [size + unit, unit], "sharded": [unit, unit], "sharded-async": [size / 2 + unit] * 2}
    return Memory(saving, resuming, bounds[form], size, unit, num_units * unit)
