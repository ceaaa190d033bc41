"""Bytes of messages per rank: formulas shared by the direct exchange, the meter and the plan."""

from __future__ import annotations

FEW_RANKS = 2
"""Up to this many ranks, each rank of an agreement sends its message to every other rank: half a round trip. More
ranks use a tree, which takes half as long with 4 ranks (``benchmarks/agreements.py``)."""


def agreement_bytes(nbytes: float, world_size: int) -> float:
    """Size of an all-reduce that causes the same traffic as an agreement on ``nbytes``."""
    return nbytes * world_size / 2 if world_size <= FEW_RANKS else nbytes


def wire_bytes(collective: str, nbytes: float, world_size: int) -> float:
    """Bytes that a rank sends, and receives, in a ``collective`` over ``nbytes`` (the full tensor, not a shard).

    This is the lower bound for any algorithm, and rings and pairwise exchanges reach it (ZeRO paper, section 7.1):
    (N-1)/N for an all-gather or a reduce-scatter, twice that for an all-reduce. In a broadcast the source only sends
    and the others only receive, ``nbytes`` each.
    """
    if world_size == 1:
        return 0.0
    share = (world_size - 1) / world_size
    return (
        nbytes * {"all_gather": share, "reduce_scatter": share, "all_reduce": 2 * share, "broadcast": 1.0}[collective]
    )
