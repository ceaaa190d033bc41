"""Modules that read parameters on some ranks only, and what came of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

from lightning_zero.comm import reads as exchange
from lightning_zero.comm.reads import Changes
from lightning_zero.engines import reads
from tests.helpers import zoo
from tests.helpers.ranks import job_store, outcome


def _write_more_than_is_kept(module: Any) -> None:
    with mock.patch.object(reads, "KEPT_BYTES", 0):
        module.net.head.weight.data.mul_(1.0)


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda module: module.net.head.weight.norm().item(),
    "unforeseen": lambda module: module.net.head.weight.norm().item(),
    "gradient": lambda module: module.net.head.weight.grad.norm().item(),
    "forward": lambda module: module.net(torch.ones(2, zoo.WIDTH)).sum().item(),
    "write": _write_more_than_is_kept,
    "written before": lambda module: (module.net.head.weight.data.mul_(1.0), module.net.head.weight.norm().item())[1],
}


class Reader(zoo.Zoo):
    """Reads in one hook, on one rank or on all, perhaps one after the other, and goes on after an error."""

    def __init__(self, hook: str, what: str, rank: int | None, in_turn: bool) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.hook, self.what, self.rank, self.in_turn = hook, what, rank, in_turn

    def look(self, hook: str) -> None:
        if hook != self.hook or self.rank not in (None, self.global_rank) or self.found:
            return
        if self.in_turn and self.global_rank:
            job_store().wait(["rank 0 has read"])
        try:
            self.found.append(READS[self.what](self))
        except RuntimeError as error:
            self.found.append(str(error))
        if self.in_turn and not self.global_rank:
            job_store().add("rank 0 has read", 1)

    def on_fit_start(self) -> None:
        if self.what == "unforeseen":  # in code that no hook tells of
            self.trainer.strategy.engine.reader.waits_before_step = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("on_before_optimizer_step")

    def on_train_epoch_end(self) -> None:
        self.look("on_train_epoch_end")


def look(strategy: Any, hook: str, what: str, rank: int | None, in_turn: bool = False) -> dict[str, Any]:
    """What this rank has read, or the error's text; threads that are left; losses."""
    torch.manual_seed(7)
    module = Reader(hook, what, rank, in_turn)
    trainer = zoo.make_trainer(strategy, max_epochs=2, limit_train_batches=2)
    with mock.patch.object(exchange, "_BEHIND_SECONDS", 0.5):
        trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=4))
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_zero-")]
    return {"found": module.found, "threads": left, "losses": module.losses}


class Shrinks(zoo.Zoo):
    """Rank 0 alone reads all parameters, then all ranks write to all of them; the other begins as soon as it may."""

    def build(self) -> None:
        super().build()
        self.found: list[float] = []
        self.kept = 0

    def on_train_epoch_end(self) -> None:
        store, key = job_store(), f"written in epoch {self.current_epoch}"
        if self.trainer.is_global_zero:
            if self.options["goes_ahead"]:
                store.wait([key])
            self.found += [p.norm().item() for p in self.parameters()]
        changes = getattr(getattr(self.trainer.strategy, "engine", None), "changes", Changes())
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.9)
                store.add(key, 1)
                self.kept = max(self.kept, changes.kept_bytes)


def shrink(strategy: Any, kept_bytes: int) -> dict[str, Any]:
    """What this rank has read, its losses, and how much was kept at most of at most ``kept_bytes``."""
    torch.manual_seed(7)
    module = Shrinks(goes_ahead=kept_bytes > 0)
    trainer = zoo.make_trainer(strategy, max_epochs=2, limit_train_batches=2)
    with mock.patch.object(reads, "KEPT_BYTES", kept_bytes):
        trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=4))
    return {"found": module.found, "losses": module.losses, "kept": module.kept}


class Forks(zoo.Zoo):
    """A process that this rank starts reads a parameter, as a worker of a ``DataLoader`` might."""

    said = ""

    def on_train_start(self) -> None:
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            os.write(writes, " ".join(outcome(self.net.head.weight.norm)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        self.said = os.read(reads, 10_000).decode()


def in_a_fork(strategy: str | dict[str, Any]) -> str:
    """What a process that this rank starts is told."""
    module = Forks()
    zoo.make_trainer(strategy, max_steps=1).fit(module, DataLoader(zoo.RandomDataset(), zoo.BATCH))
    return module.said
