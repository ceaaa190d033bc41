"""Modules that read parameters on some ranks only, and what came of it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero.comm.reads import Changes
from lightning_zero.engines import reads
from tests.helpers import zoo


def _write_more_than_is_kept(module: Any) -> None:
    with mock.patch.object(reads, "KEPT_BYTES", 0):
        module.net.head.weight.data.mul_(1.0)


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda module: module.net.head.weight.norm().item(),
    "unforeseen": lambda module: module.net.head.weight.norm().item(),
    "old gradient": lambda module: module.kept.norm().item(),
    "gradient": lambda module: module.net.head.weight.grad.norm().item(),
    "forward": lambda module: module.net(torch.ones(2, zoo.WIDTH)).sum().item(),
    "write": _write_more_than_is_kept,
    "written before": lambda module: (module.net.head.weight.data.mul_(1.0), module.net.head.weight.norm().item())[1],
}


class Reader(zoo.Zoo):
    """Reads in one hook, on one rank or on all with some seconds between them, and goes on after an error."""

    def __init__(self, hook: str, what: str, rank: int | None, seconds_apart: float = 0.0) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.hook, self.what, self.rank, self.seconds_apart = hook, what, rank, seconds_apart

    def look(self, hook: str) -> None:
        if hook != self.hook or self.rank not in (None, self.global_rank) or self.found:
            return
        if self.global_rank:
            time.sleep(self.seconds_apart)
        try:
            self.found.append(READS[self.what](self))
        except RuntimeError as error:
            self.found.append(str(error))

    def on_fit_start(self) -> None:
        if self.what == "unforeseen":  # in code that no hook tells of
            self.trainer.strategy.engine.reader.waits_before_step = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.what == "old gradient" and not self.global_step:
            self.kept = self.net.head.weight.grad
            return
        self.look("on_before_optimizer_step")

    def on_train_epoch_end(self) -> None:
        self.look("on_train_epoch_end")


def look(strategy: Any, hook: str, what: str, rank: int | None, seconds_apart: float = 0.0) -> dict[str, Any]:
    """What this rank has read, or the error's text; threads that are left; losses."""
    torch.manual_seed(7)
    module = Reader(hook, what, rank, seconds_apart)
    trainer = zoo.make_trainer(strategy, max_epochs=2, limit_train_batches=2)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=4))
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_zero-")]
    return {"found": module.found, "threads": left, "losses": module.losses}


class Shrinks(zoo.Zoo):
    """Rank 0 alone reads all parameters, then all ranks write to all of them."""

    def build(self) -> None:
        super().build()
        self.found: list[float] = []
        self.kept = 0

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            time.sleep(0.2)  # the other goes ahead
            self.found += [p.norm().item() for p in self.parameters()]
        changes = getattr(getattr(self.trainer.strategy, "engine", None), "changes", Changes())
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.9)
                self.kept = max(self.kept, changes.kept_bytes)


def shrink(strategy: Any, kept_bytes: int) -> dict[str, Any]:
    """What this rank has read, its losses, and how much was kept at most of at most ``kept_bytes``."""
    torch.manual_seed(7)
    module = Shrinks()
    trainer = zoo.make_trainer(strategy, max_epochs=2, limit_train_batches=2)
    with mock.patch.object(reads, "KEPT_BYTES", kept_bytes):
        trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=4))
    return {"found": module.found, "losses": module.losses, "kept": module.kept}


class Saves(zoo.Zoo):
    """``if self.trainer.is_global_zero: self.net.save_pretrained(folder)``."""

    def build(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        self.net = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2))
        self.folder = tempfile.mkdtemp()

    def loss(self, batch: Any) -> Tensor:
        tokens, following = batch
        logits = self.net(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.net.save_pretrained(f"{self.folder}/{self.current_epoch}")


def save(strategy: Any) -> dict[str, Tensor]:
    """The tensors in the files that this rank has written."""
    from safetensors.torch import load_file

    torch.manual_seed(7)
    module = Saves()
    trainer = zoo.make_trainer(strategy, max_epochs=2, limit_train_batches=2)
    trainer.fit(module, DataLoader(zoo.TokenDataset(), batch_size=4))
    found = {}
    for path in sorted(Path(module.folder).glob("*/model.safetensors")):
        found |= {f"{path.parent.name}/{name}": value for name, value in load_file(path).items()}
    return found


class Hooked(zoo.Zoo):
    """User code runs between each backward and its step."""

    def build(self) -> None:
        super().build()
        self.by_step: list[int] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.by_step.append(dist.isend.call_count)  # type: ignore[attr-defined]


def sockets_used(strategy: Any) -> list[int]:
    """Messages through gloo's sockets that this rank has sent by each step."""
    module = Hooked()
    trainer = zoo.make_trainer(strategy, max_epochs=2, limit_train_batches=3)
    with mock.patch.object(dist, "isend", wraps=dist.isend):
        trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=4))
    return module.by_step


class _ReadsWeights:
    """What a DataLoader's worker does with a batch."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, items: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(items)
        return x + self.module.net.head.weight.detach().mean(), y


def in_worker(strategy: str | dict[str, Any]) -> None:
    """Trains on batches to which a worker has added a mean of weights."""
    module = zoo.make_module("sgd_momentum")
    loader = DataLoader(zoo.RandomDataset(), zoo.BATCH, num_workers=1, collate_fn=_ReadsWeights(module))
    zoo.make_trainer(strategy, max_steps=2, limit_val_batches=0).fit(module, loader)
