"""Who may read whose memory is found out alike on all ranks; nothing is freed or written to while it is being read."""

from __future__ import annotations

import os
import socket
import time
import weakref
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.comm import peer_memory
from lightning_zero.comm.peer_memory import PeerMemory
from tests.helpers import zoo
from tests.helpers.peer_memory import NEIGHBOURS
from tests.helpers.ranks import job_store, outcome

pytestmark = NEIGHBOURS
KIND = 1
NUMEL = 2048


def _meet(timeout_seconds: float = 60) -> PeerMemory:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    return PeerMemory(dist.group.WORLD, timeout_seconds)


# -- meeting ---------------------------------------------------------------------------------------------------------


def _met(refused: str) -> list[int]:
    """The neighbours that each rank finds, where rank 1 may not do one thing."""
    with ExitStack() as stack:
        if int(os.environ["RANK"]) == 1:
            refuses = lambda *unused: -1 if refused == "_read_memory" else False  # noqa: E731
            stack.enter_context(mock.patch.object(peer_memory, refused, refuses))
        return list(_meet().ranks)


@pytest.mark.parametrize("refused", ["_read_memory", "_connect"])
def test_all_read_each_other_or_none(ranks, refused):
    assert ranks(_met, refused, world_size=3) == [[], [], []]


def _visited() -> list[int]:
    accepts = peer_memory._accept

    def visited(links: Any, cards: Any, listener: Any) -> bool:
        pid = os.fork()
        if not pid:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visiting:
                visiting.connect(listener.getsockname())
                os._exit(0)
        os.waitpid(pid, 0)
        return accepts(links, cards, listener)

    with mock.patch.object(peer_memory, "_accept", visited):
        return list(_meet().ranks)


def test_other_processes_are_turned_away(ranks2):
    """A local socket's name is no secret."""
    assert ranks2(_visited) == [[1], [0]]


# -- exchanging ------------------------------------------------------------------------------------------------------


def _held() -> tuple[bool, bool]:
    """Both let go of what they offer, and rank 1 reads when rank 0 has nothing left to do but wait for it."""
    near, store, rank = _meet(), job_store(), dist.get_rank()
    mine = torch.full((NUMEL,), rank + 1.0)
    kept = weakref.ref(mine)
    offer = near.offer(KIND, [mine])
    del mine
    found = torch.empty(NUMEL)
    if rank == 1:
        store.wait(["rank 0 waits"])
    source = near.source(offer, 1 - rank)
    near.read(source, [found])
    if rank == 1:
        store.add("rank 1 has read", 1)
    near.done(offer, source)
    del offer
    torch.full((NUMEL,), 9.0)  # would lie where the other was
    if rank == 0:
        store.add("rank 0 waits", 1)
    near.await_readers()
    assert torch.equal(found, torch.full((NUMEL,), 2.0 - rank))
    return store.check(["rank 1 has read"]), kept() is None


def test_what_is_offered_is_held_until_it_is_read(ranks2):
    assert ranks2(_held) == [(True, True), (True, True)]


def _does_not_come() -> None:
    near, store = _meet(timeout_seconds=0.3), job_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 was told"])
        return
    with pytest.raises(RuntimeError, match=r"rank 1 did not respond within timeout_seconds=0.3"):
        near.source(near.offer(KIND, [torch.ones(1)]), 1)
    store.add("rank 0 was told", 1)


def test_a_rank_that_does_not_come_is_named(ranks2):
    ranks2(_does_not_come)


# -- in the engine ---------------------------------------------------------------------------------------------------


class Shrinks(zoo.Zoo):
    """Writes to gathered weights inside its forward."""

    def build(self) -> None:
        super().build()
        for layer in self.layers():
            layer.register_forward_pre_hook(_shrink)

    def layers(self) -> list[nn.Module]:
        return [layer for layer in self.modules() if isinstance(layer, nn.Linear)]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.record(self.loss(batch))  # and no agreement


def _shrink(layer: nn.Module, *unused: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.9)  # type: ignore[operator, union-attr]


class ShrinksEarly(Shrinks):
    """To shards, before the forward, and in a validation after it."""

    def build(self) -> None:
        zoo.Zoo.build(self)

    def loss(self, batch: Any) -> Tensor:
        for layer in self.layers() if self.training else []:
            _shrink(layer)
        loss = super().loss(batch)
        for layer in self.layers() if not self.training else []:
            _shrink(layer)
        return loss


def _trained(kind: type[Shrinks], stage: int, near: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses; rank 1 reads late."""
    torch.manual_seed(0)
    reads, connect = PeerMemory.read, peer_memory._connect if near else lambda *unused: False

    def late_read(self: PeerMemory, *args: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.005)  # the other goes ahead
        assert near
        reads(self, *args)

    with (
        mock.patch.object(peer_memory, "_connect", connect),
        mock.patch.object(PeerMemory, "read", autospec=True, side_effect=late_read) as read,
    ):
        trainer = zoo.make_trainer({"stage": stage, "min_unit_numel": 1}, max_epochs=2, num_sanity_val_steps=0)
        module = kind()
        trainer.fit(module, *(DataLoader(zoo.RandomDataset(zoo.BATCH * 2 * n), batch_size=zoo.BATCH) for n in (2, 1)))
    assert near == read.called
    return module.state_dict(), module.losses


@pytest.mark.parametrize(("kind", "stage"), [(Shrinks, 3), (ShrinksEarly, 1)])
def test_nobody_reads_what_is_written_later(ranks2, kind, stage):
    """To the last bit of what gloo's own collectives give: two ranks have one order of additions."""
    expected, found = ranks2(_trained, kind, stage, False), ranks2(_trained, kind, stage, True)
    for (state, losses), (expected_state, expected_losses) in zip(found, expected, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(state[name], tensor) for name, tensor in expected_state.items())


def _refused() -> str:
    with mock.patch.object(peer_memory, "_connect", return_value=False):
        trainer = zoo.make_trainer({"stage": 2, "transport": "direct"})
        return outcome(trainer.fit, zoo.Zoo(), DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))[1]


def test_direct_exchange_between_hosts_is_refused_by_name(ranks2):
    for said in ranks2(_refused):
        assert said.startswith("transport='direct': ranks that share a module's shards cannot read each other's memory")
