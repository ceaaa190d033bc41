"""The direct exchanges give what a sum over the ranks, written down plainly, gives: to the last bit, in a fixed order.

They localise mistakes in who sends which part to whom; parity tests show only that weights differ.
"""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import exchange
from tests.helpers.ranks import RankError

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _exchanges() -> None:
    dist.init_process_group("gloo")
    with mock.patch.object(exchange, "PIECE_BYTES", 4096):
        for dtype in DTYPES:
            for numel in (0, 1, 4096, 5000):  # nothing, less than a piece, whole pieces, more than that
                _exchange(numel, dtype, None)


def _late_exchange(late: int) -> None:
    dist.init_process_group("gloo")
    with mock.patch.object(exchange, "PIECE_BYTES", 4096):
        _exchange(100_000, torch.float32, late)


def _exchange(numel: int, dtype: torch.dtype, late: int | None) -> None:
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    pool = exchange.Pool()
    gather, reduce = exchange.AllGather(pool), exchange.ReduceScatter(pool)
    assert group is not None
    for _ in range(3):  # the second and third time in memory that has been used
        if late == rank:
            time.sleep(0.2)
        whole = gather.allocate([n * numel], dtype=dtype, device=torch.device("cpu"))
        shard = whole.narrow(0, rank * numel, numel)  # as fully_shard has it
        shard.copy_(_values(rank, numel, dtype))
        pending = gather(whole, shard, group)

        sent = reduce.allocate([n * numel], dtype=dtype, device=torch.device("cpu"))
        mean = reduce.allocate([numel], dtype=dtype, device=torch.device("cpu"))
        sent.copy_(_values(100 + rank, n * numel, dtype))
        reduce(mean, sent, group, dist.ReduceOp.AVG)  # while the gather is on its way
        pending.wait()

        assert torch.equal(whole, torch.cat([_values(r, numel, dtype) for r in range(n)]))
        expected = torch.zeros(numel, dtype=dtype)
        for r in [(rank - distance) % n for distance in range(n)]:
            expected += _values(100 + r, n * numel, dtype)[rank * numel : (rank + 1) * numel]
        assert torch.equal(mean, expected / n)
        del whole, shard, sent


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_exchanges_equal_their_definition(ranks, world_size):
    ranks(_exchanges, world_size=world_size)


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_may_come_late(ranks, late):
    ranks(_late_exchange, late, world_size=3)


def _dies() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    reduce = exchange.ReduceScatter(exchange.Pool())
    assert dist.group.WORLD is not None
    reduce(torch.empty(4), torch.ones(8), dist.group.WORLD, dist.ReduceOp.SUM)


def test_a_rank_that_dies_ends_the_exchange(ranks):
    """Rank 0 has sent, and waits for what will never come: it must be told, not be found waiting."""
    with pytest.raises(RankError) as caught:
        ranks(_dies, world_size=2, timeout_seconds=60)
    kinds = {failure.rank: failure.kind for failure in caught.value.failures}
    assert kinds == {0: "RuntimeError", 1: "exit"}


def test_memory_is_lent_again_only_when_no_tensor_is_left_in_it():
    pool = exchange.Pool()
    first = pool.empty(1000, torch.float32)
    address, view = first.data_ptr(), first[10:20].as_strided((2, 3), (3, 1))
    del first
    other = pool.empty(1000, torch.float32)
    assert other.data_ptr() != address
    del view
    assert pool.empty(1000, torch.float32).data_ptr() == address
    assert pool.empty(100, torch.float32).data_ptr() != address  # a small one does not take a large one's place
