"""Modules that read parameters on some ranks only, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.helpers import zoo
from tests.helpers.ranks import outcome

READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda module: module.net.head.weight.norm().item(),
    "gradient": lambda module: module.net.head.weight.grad.norm().item(),
    "forward": lambda module: module.net(torch.ones(2, zoo.WIDTH)).sum().item(),
    "write": lambda module: module.net.head.weight.data.mul_(1.0),
    "state": lambda module: sum(v["momentum_buffer"].norm().item() for v in _states(module)),
    "state_dict": lambda module: sum(value.norm().item() for value in module.net.state_dict().values()),
    "backward": lambda module: module.net.head.weight.norm().backward(),
    "written before": lambda module: (module.net.head.weight.data.mul_(1.0), module.net.head.weight.norm().item())[1],
}


def _states(module: Any) -> list[Any]:
    return [*module.optimizers().optimizer.state.values()]


class Reader(zoo.Zoo):
    """Reads in one hook, on one rank or on all, and goes on after an error."""

    def __init__(self, hook: str, what: str, rank: int | None, logs: bool) -> None:
        super().__init__()
        self.logs = logs
        self.found: list[Any] = []
        self.hook, self.what, self.rank = hook, what, rank

    def look(self, hook: str) -> None:
        if hook != self.hook or self.rank not in (None, self.global_rank) or self.found:
            return
        try:
            self.found.append(READS[self.what](self))
        except RuntimeError as error:
            self.found.append(str(error))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("on_before_optimizer_step")

    def on_train_epoch_end(self) -> None:
        self.look("on_train_epoch_end")
        if self.logs:
            self.log("rank", torch.tensor(1.0 + self.global_rank), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def look(strategy: Any, hook: str, what: str, rank: int | None, logs: bool = False) -> dict[str, Any]:
    """What this rank has read, or the error's text; losses; what was logged."""
    torch.manual_seed(7)
    module = Reader(hook, what, rank, logs)
    trainer = zoo.make_trainer(strategy, max_epochs=2, limit_train_batches=2)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=4))
    logged = trainer.callback_metrics.get("rank")
    logged = None if logged is None else logged.item()
    return {"found": module.found, "losses": module.losses, "logged": logged}


class Shrinks(zoo.Zoo):
    """Rank 0 alone reads all parameters, then all ranks write to all of them; the other begins as soon as it may."""

    def build(self) -> None:
        super().build()
        self.found: list[float] = []

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.found += [p.norm().item() for p in self.parameters()]
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.9)


def shrink(strategy: Any) -> dict[str, Any]:
    """What this rank has read, and its losses."""
    torch.manual_seed(7)
    module = Shrinks()
    trainer = zoo.make_trainer(strategy, max_epochs=2, limit_train_batches=2)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=4))
    return {"found": module.found, "losses": module.losses}


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
