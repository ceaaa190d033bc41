"""Bytes of messages per rank: arithmetic that the direct exchange, the meter and the plan share."""

from __future__ import annotations

ORDER_BYTES = 16
"""The announcement of a unit at stage 3 between CPU processes: four integers."""
CHANGED_BYTES = 4
"""The agreement on whether any rank has written to its shards since the last gather: one integer."""
FEW_RANKS = 2
"""Up to this many ranks, each sends its message to every other in an agreement, half a round trip; more of them pass
theirs up and down a tree, which takes half as long among 4 (``benchmarks/agreements.py``)."""


def agreement_bytes(nbytes: float, world_size: int) -> float:
    """The size of an all-reduce with the same traffic as an agreement on ``nbytes``."""
    return nbytes * world_size / 2 if world_size <= FEW_RANKS else nbytes


def wire_bytes(collective: str, nbytes: float, world_size: int) -> float:
    """Bytes a rank sends, and receives, in a ``collective`` over ``nbytes`` (the whole tensor, not a shard).

    The least that any algorithm sends, which rings and pairwise exchanges reach (section 7.1 of the paper): (N-1)/N for
    an all-gather and a reduce-scatter, twice that for an all-reduce. A broadcast's source only sends, the others only
    receive: ``nbytes`` each.
    """
    if world_size == 1:
        return 0.0
    share = (world_size - 1) / world_size
    return (
        nbytes * {"all_gather": share, "reduce_scatter": share, "all_reduce": 2 * share, "broadcast": 1.0}[collective]
    )
