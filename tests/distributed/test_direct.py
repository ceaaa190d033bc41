"""The direct exchanges give what a sum over the ranks, written down plainly, gives: to the last bit, in a fixed order.

They localise mistakes in who sends which part to whom; parity tests show only that weights differ.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_zero.comm import direct, peer_memory, shards
from lightning_zero.comm.peer_memory import PeerMemory
from tests.helpers import ranks as helper
from tests.helpers.peer_memory import NEIGHBOURS
from tests.helpers.ranks import RankError, job_store

DTYPES = [torch.float32, torch.bfloat16]


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _met() -> PeerMemory:
    """Of all ranks."""
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    near = PeerMemory(dist.group.WORLD, 60)
    assert near.ranks
    direct.connect(dist.group.WORLD, near)
    return near


def _exchanges() -> None:
    near = _met()
    with (
        mock.patch.object(direct, "PIECE_BYTES", 2048),
        mock.patch.object(peer_memory, "_CALL_BYTES", 10_000),
        mock.patch.object(peer_memory, "_CALL_PIECES", 2),
    ):
        for dtype in DTYPES:
            for numel in (0, 1, 4096, 5000):  # nothing, less than a piece, whole pieces, more than that
                _exchange(numel, dtype, near)
    near.close()


def _late_exchange(late: int) -> None:
    near = _met()
    with mock.patch.object(direct, "PIECE_BYTES", 4096):
        _exchange(100_000, torch.float32, near, late)
    near.close()


def _exchange(numel: int, dtype: torch.dtype, near: PeerMemory, late: int | None = None) -> None:
    """Gathers and reductions that lie over each other in time, in either order."""
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    reduce = direct.ReduceScatter(near)
    assert group is not None
    for turn in range(3):  # the second and third time in memory that has been used
        if late == rank:  # the others have begun
            job_store().wait([f"{turn} {other}" for other in range(n) if other != late])
        shards = [_values(10 * i + rank, i * numel, dtype) for i in range(4)]  # an empty one, small and large ones
        outputs = [torch.empty(n * shard.numel(), dtype=dtype) for shard in shards]
        gathering = direct.all_gather_each([output.chunk(n) for output in outputs], shards, group, near)
        if late not in (None, rank):
            job_store().add(f"{turn} {rank}", 1)

        sent = reduce.allocate([n * numel], dtype=dtype, device=torch.device("cpu"))
        mean = reduce.allocate([numel], dtype=dtype, device=torch.device("cpu"))
        sent.copy_(_values(100 + rank, n * numel, dtype))
        reduce(mean, sent, group, dist.ReduceOp.AVG)  # while the gather is on its way
        one = torch.empty(n * numel, dtype=dtype)  # begins and ends while the gather is on its way
        one[rank * numel : (rank + 1) * numel] = _values(rank, numel, dtype)
        direct.all_gather(one, one.chunk(n)[rank] if numel else one, group).wait()
        one, written = one.clone(), one.fill_(-1)  # no late rank reads it any more
        gathering.wait()
        near.await_readers()
        for shard in shards:
            shard.zero_()  # nobody needs it any more

        assert torch.equal(one, torch.cat([_values(r, numel, dtype) for r in range(n)]))
        for i, output in enumerate(outputs):
            assert torch.equal(output, torch.cat([_values(10 * i + r, i * numel, dtype) for r in range(n)]))
        expected = torch.zeros(numel, dtype=dtype)
        for r in [(rank - distance) % n for distance in range(n)]:
            expected += _values(100 + r, n * numel, dtype)[rank * numel : (rank + 1) * numel]
        assert torch.equal(mean, expected / n)
        del one, written, sent


@NEIGHBOURS
def test_exchanges_equal_their_definition(ranks3):
    ranks3(_exchanges)


@NEIGHBOURS
def test_a_rank_may_come_late(ranks3):
    ranks3(_late_exchange, 2)


def _not_connected() -> None:
    dist.init_process_group("gloo")
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    for numel in (0, 5000):
        full = torch.empty(n * numel)
        mine = full.chunk(n)[rank].copy_(_values(rank, numel, full.dtype)) if numel else full  # a part of the output
        direct.all_gather(full, mine, group).wait()
        assert torch.equal(full, torch.cat([_values(r, numel, full.dtype) for r in range(n)]))


def test_full_tensors_without_peer_memory(ranks3):
    ranks3(_not_connected)


def _dies() -> None:
    near = _met()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    reduce = direct.ReduceScatter(near)
    assert dist.group.WORLD is not None
    reduce(torch.empty(4), torch.ones(8), dist.group.WORLD, dist.ReduceOp.SUM)


@NEIGHBOURS
def test_a_rank_that_dies_ends_the_exchange(ranks2, monkeypatch):
    """Rank 0 has sent, and waits for what will never come: it must be told, not be found waiting."""
    monkeypatch.setattr(helper, "GRACE_SECONDS", 40.0)  # until rank 0 has been told
    with pytest.raises(RankError) as caught:
        ranks2(_dies)
    kinds = {failure.rank: failure.kind for failure in caught.value.failures}
    assert kinds == {0: "RuntimeError", 1: "exit"}


def _gathered_in_buckets() -> int:
    """The most bytes that small shards were gathered into at a time."""
    dist.init_process_group("gloo")
    mesh, sizes, gather = init_device_mesh("cpu", (2,)), [], direct.all_gather
    full = [torch.arange(100.0) * i for i in range(20)]

    def seen(output: Tensor, *args: Any) -> Any:
        sizes.append(output.nbytes)
        return gather(output, *args)

    with mock.patch.object(shards, "BUCKET_BYTES", 2000), mock.patch.object(direct, "all_gather", seen):
        found = shards.gathered_each([distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in full])
    assert all(torch.equal(a, b) for a, b in zip(found, full, strict=True))
    return max(sizes)


def test_small_shards_are_gathered_in_buckets(ranks2):
    """All together would take the memory of all of them at once."""
    assert all(most < 3000 for most in ranks2(_gathered_in_buckets))
