"""What messages cost, in bytes per rank: arithmetic that the exchange, the meter and the plan share."""

from __future__ import annotations

ORDER_BYTES = 16
"""What ranks say to each other of each unit that they run at stage 3 on the CPU: four integers."""
CHANGED_BYTES = 4
"""What ranks say before they gather copies that may still be what the shards are: whether one has changed."""
FEW_RANKS = 4
"""Up to so many send each other directly what they must agree on: between 2 half the time of gloo's all-reduce, between
4 as long."""


def agreement_bytes(nbytes: float, world_size: int) -> float:
    """The size whose all-reduce sends as much as ranks that agree on ``nbytes``: few of them send all to each other."""
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
