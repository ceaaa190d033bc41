"""Reads of parameters that not all ranks make: as under DDP, or one line that names them, soon.

That values are DDP's in every hook, at every stage, is the parity test's: kind ``read_on_one_rank``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.helpers import zoo
from tests.helpers.ranks import outcome

LIMIT = 600.0
"""Longer than a job may take: a rank that waited for it would fail the test."""
FSDP2 = {"stage": 3, "timeout_seconds": LIMIT, **zoo.BLOCKS}
DEEPSPEED = {"stage": 3, "timeout_seconds": LIMIT, "engine": "deepspeed"}


def _states(module: Any) -> list[Any]:
    return [*module.optimizers().optimizer.state.values()]


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda module: module.net.head.weight.norm().item(),
    "gradient": lambda module: module.net.head.weight.grad.norm().item(),
    "written before": lambda module: (module.net.head.weight.data.mul_(1.0), module.net.head.weight.norm().item())[1],
    "forward": lambda module: module.net(torch.ones(2, zoo.WIDTH)).sum().item(),
    "state": lambda module: sum(v["momentum_buffer"].norm().item() for v in _states(module)),
    "state_dict": lambda module: sum(value.norm().item() for value in module.net.state_dict().values()),
    "backward": lambda module: module.net.head.weight.norm().backward(),
}


class Reader(zoo.Zoo):
    """Rank 0 reads before the first step, the last rank at the first epoch's end, just before all ranks log; goes on
    after an error."""

    def build(self) -> None:
        super().build()
        self.found: dict[str, Any] = {}

    def look(self, reads: tuple[str, ...]) -> None:
        for what in reads:
            try:
                self.found[what] = READS[what](self)
            except RuntimeError as error:
                self.found[what] = str(error)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 0 and not self.found:
            self.look(self.options["before"])

    def on_train_epoch_end(self) -> None:
        if self.global_rank == self.trainer.world_size - 1 and self.current_epoch == 0:
            self.look(self.options["at_the_end"])
        self.log("rank", torch.tensor(1.0 + self.global_rank), sync_dist=True)


def _look(strategy: Any, before: tuple[str, ...], at_the_end: tuple[str, ...]) -> dict[str, Any]:
    """What this rank has read, or the error's text; losses; what was logged."""
    module = Reader(before=before, at_the_end=at_the_end)
    trainer = _fit(module, strategy)
    return {"found": module.found, "losses": module.losses, "logged": trainer.callback_metrics["rank"].item()}


def _fit(module: zoo.Zoo, strategy: Any) -> Any:
    torch.manual_seed(7)
    module.net = zoo.Net()
    trainer = zoo.make_trainer(strategy, max_epochs=2, limit_train_batches=2)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    return trainer


@pytest.mark.parametrize(
    ("settings", "before", "at_the_end", "world_size"),
    [
        (FSDP2, ("norm", "gradient", "written before"), ("state", "forward", "state_dict"), 2),
        (DEEPSPEED, ("gradient",), ("state", "forward"), 2),
        ({**FSDP2, "shard_size": 2}, (), ("norm",), 4),  # only ranks 2 and 3 have the rows that rank 3 reads
    ],
    ids=["fsdp2", "deepspeed", "replicas"],
)
def test_one_rank_reads_what_it_would_under_ddp(
    ranks: Any, settings: Any, before: tuple[str, ...], at_the_end: tuple[str, ...], world_size: int
) -> None:
    results = ranks(_look, settings, before, at_the_end, world_size=world_size)
    expected = ranks(_look, "ddp", before, at_the_end, world_size=world_size)
    for result, of_ddp in zip(results, expected, strict=True):
        for key in of_ddp:  # norms of rows put together; sums of four ranks in another order
            assert result[key] == pytest.approx(of_ddp[key], rel=1e-6), key
    assert [set(result["found"]) for result in results] == [{*before}, *[set()] * (world_size - 2), {*at_the_end}]


def test_a_backward_of_one_rank_alone_is_refused(ranks2: Any) -> None:
    results = ranks2(_look, FSDP2, (), ("backward",))
    assert "backward through a parameter that not all ranks have read" in results[1]["found"]["backward"]
    assert all(len(result["losses"]) == 4 for result in results)  # it can be caught, and ranks go on as one


def test_a_rank_that_waits_for_another_by_itself_is_told_of_its_read(ranks2: Any) -> None:
    """The other one waits in a collective of user code, until the first one's read has run out of time."""
    first, second = ranks2(_wait_for_each_other)
    assert re.search(r"a read of parameter 'net\.stem\.weight' and .* on rank 0: not all", first)
    assert "timeout_seconds=2" in first
    assert second


def _wait_for_each_other() -> str:
    class Waits(zoo.Zoo):
        def on_train_epoch_end(self) -> None:
            if self.global_rank:
                dist.barrier()
            self.net.stem.weight.norm()
            dist.barrier()

    return outcome(_fit, Waits(), {**FSDP2, "timeout_seconds": 2.0})[1]


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


def _in_a_fork(strategy: Any) -> str:
    module = Forks()
    _fit(module, strategy)
    return module.said


@pytest.mark.parametrize("settings", [FSDP2, DEEPSPEED], ids=["fsdp2", "deepspeed"])
def test_processes_that_a_rank_starts_do_not_read_parameters(ranks2: Any, settings: dict[str, Any]) -> None:
    for text in ranks2(_in_a_fork, settings):
        assert re.search(r"RuntimeError.*in a process that this rank has started.*num_workers=0", text, re.S), text
