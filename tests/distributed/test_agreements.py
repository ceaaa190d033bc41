"""What ranks agree upon: everyone hears everyone, nothing meets another message, and a failure is found out alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn

from lightning_zero.comm import tree
from lightning_zero.comm.agree import (
    IN_BACKGROUND,
    IN_STEP,
    STEP_SYNC,
    broadcast_coalesced,
    shared_agreement,
)  # fmt: skip
from tests.helpers import zoo
from tests.helpers.lifetime import forget_peak, resident
from tests.helpers.ranks import job_store, outcome

LIMIT = 2.0
"""Of an agreement that one rank does not come to."""


@pytest.mark.parametrize("size", [1, 2, 13, 64, 4096])
def test_the_tree_has_each_rank_once_and_few_edges_and_levels(size):
    below = {rank: tree.children(rank, size) for rank in range(size)}
    assert sorted(child for each in below.values() for child in each) == list(range(1, size))
    assert all(tree.parent(child) == rank for rank, each in below.items() for child in each)
    bits = (size - 1).bit_length()
    assert max(map(len, below.values())) == len(below[0]) == bits
    assert all(rank.bit_count() <= bits for rank in below)  # levels above a rank
    for rank, each in below.items():  # a subtree is a block, so few edges leave a host
        assert each == [rank + 2**i for i in range(len(each))]


def _everyones() -> None:
    dist.init_process_group("gloo")
    agreement, rank, n = shared_agreement(60), dist.get_rank(), dist.get_world_size()
    for size in (0, 1, 100_000):
        assert agreement.gather(bytes([rank]) * size * (rank + 1)) == [bytes([r]) * size * (r + 1) for r in range(n)]
    with pytest.raises(RuntimeError, match="rank 0: a; rank 1: b"):
        agreement.gather(None, "ab"[rank % 2])


def test_objects_of_any_size_are_everyones(ranks3):
    ranks3(_everyones)


def _at_once() -> None:
    """The step sync travels ahead, the engine agrees several times, a thread saves, the main thread agrees."""
    dist.init_process_group("gloo")
    agreement, rank, n = shared_agreement(60), dist.get_rank(), dist.get_world_size()
    saver = agreement.with_kind(IN_BACKGROUND)
    heard: list[list[int]] = []
    thread = threading.Thread(target=lambda: heard.extend(saver.gather(-rank - i) for i in range(30)))
    thread.start()
    for i in range(30):
        ahead = torch.tensor([1000 * i + rank])
        works = [agreement.all_reduce(ahead, dist.ReduceOp.MAX, STEP_SYNC)]
        said = [torch.tensor([rank, i, j]) for j in range(3)]
        works += [agreement.all_reduce(each, dist.ReduceOp.SUM, IN_STEP) for each in said]
        if rank == i % n:
            time.sleep(0.002)
        assert agreement.gather(rank + i) == [r + i for r in range(n)]
        for work in reversed(works):  # the last one's wait is that of those before it, too
            work.wait()
        assert ahead.tolist() == [1000 * i + n - 1]
        assert [each.tolist() for each in said] == [[n * (n - 1) // 2, n * i, n * j] for j in range(3)]
    thread.join(60)
    assert heard == [[-r - i for r in range(n)] for i in range(30)]


def test_messages_of_different_kinds_never_meet(ranks4):
    ranks4(_at_once)


def _not_joined(absent: int) -> str:
    """Rank ``absent`` comes when the others have given up."""
    dist.init_process_group("gloo")
    agreement, rank, store, said = shared_agreement(LIMIT), dist.get_rank(), job_store(), ""
    if rank == absent:
        store.wait([str(other) for other in range(dist.get_world_size()) if other != absent])
    else:
        said = outcome(agreement.gather, None, "the call")[1]
        store.add(str(rank), 1)
    return said


def test_a_rank_that_does_not_come_is_named(ranks3):
    absent = 0
    for rank, said in enumerate(ranks3(_not_joined, absent)):
        if rank != absent:
            assert "the call on rank" in said
            assert f"within timeout_seconds={LIMIT:g} (rank {absent} has ended, or did not respond in time" in said


def _broadcast_of_a_large_tensor() -> int:
    dist.init_process_group("gloo")
    broadcast_coalesced([torch.zeros(2**20)])  # buffers of the connections are there
    tensor = torch.full((2**24,), float(dist.get_rank() + 1))
    versions = tensor._version
    before = resident("VmRSS")
    forget_peak()
    broadcast_coalesced([tensor])
    more = resident("VmHWM") - before
    assert tensor.eq(1).all()
    assert (tensor._version > versions) == (dist.get_rank() > 0)  # rank 1's was written to
    return more


def test_a_large_tensor_is_broadcast_without_copies(ranks2):
    for more in ranks2(_broadcast_of_a_large_tensor):
        assert more < 2**24 * 4 / 2


def _broadcast_of_all_kinds() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shapes = [(), (3,), (2, 5), (0, 4)]
    dtypes = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.int16, torch.complex64]
    tensors = [torch.full(shape, rank + 1).to(dtype) for shape in shapes for dtype in dtypes]
    tensors += [torch.full((4, 3), rank + 1.0).T, nn.Parameter(torch.full((2,), rank + 1.0))]
    expected = [torch.ones_like(t) for t in tensors]
    versions = [t._version for t in tensors]
    broadcast_coalesced(tensors)
    for tensor, one, version in zip(tensors, expected, versions, strict=True):
        assert torch.equal(tensor, one)
        assert (tensor._version > version) == (rank > 0 and tensor.numel() > 0)
    assert tensors[-2].stride() == (1, 3)


def test_tensors_of_all_dtypes_and_layouts_get_rank_0s_values(ranks2):
    ranks2(_broadcast_of_all_kinds)


class _Batches:
    """A ``DataLoader`` makes tensors on the default device."""

    def __init__(self) -> None:
        self._batches = list(zoo.DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _losses(strategy: Any, folder: str, default_device: str | None) -> list[float]:
    """Of an epoch, and another that goes on from its checkpoint."""
    torch.manual_seed(3)
    module, batches = zoo.Zoo(), _Batches()
    torch.set_default_device(default_device)
    try:
        for epochs, path in ((1, None), (2, f"{folder}/checkpoint")):
            trainer = zoo.make_trainer(strategy, max_epochs=epochs)
            trainer.fit(module, batches, ckpt_path=path)
            trainer.save_checkpoint(f"{folder}/checkpoint")
    finally:
        torch.set_default_device(None)
    return module.losses


def test_the_default_device_is_for_user_code(ranks2, tmp_path):
    """``torch.set_default_device("cuda")`` in a script; on ``"meta"`` no tensor of ours has values."""
    settings = {"stage": 3, "transport": "direct", "checkpoint": "sharded"}
    reference = ranks2(_losses, "ddp", str(tmp_path / "ddp"), None)
    assert ranks2(_losses, {**settings, "min_unit_numel": 1}, str(tmp_path / "ours"), "meta") == [
        pytest.approx(losses, rel=1e-6) for losses in reference
    ]


class _Peers(Callback):
    def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
        self.ranks = [*trainer.strategy.engine.peer_memory.ranks]


def _peers() -> list[int]:
    peers = _Peers()
    settings = {"stage": 3, "transport": "torch", **zoo.BLOCKS}
    zoo.make_trainer(settings, max_steps=1, callbacks=[peers]).fit(zoo.Zoo(), _Batches())
    return peers.ranks


def test_ranks_of_one_host_agree_over_local_sockets_beside_torchs_collectives(ranks2):
    """As on GPUs: gloo's messages take several times as long."""
    assert ranks2(_peers) == [[1], [0]]
