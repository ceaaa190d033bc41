"""Host memory of one rank at stage 3 before the first step and after the last: made, loaded, saved, ended."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.engines.birth import OPEN_BYTES
from lightning_zero.planner.memory import Layout, StateBytes


@dataclass(frozen=True, kw_only=True)
class Life:
    """Most that is alive in a rank's host memory at ``zero3`` on ``fsdp2``, bytes; steps have rows of their own."""

    whole: float
    """The module itself: what every rank holds that builds it in ``__init__``, or below stage 3."""
    made: float
    """While ``configure_model`` builds it: the shards, the open lots and the parameter that is being made, or later the
    unit that is about to be shards."""
    loaded: float
    """While ``load_pretrained`` or ``ckpt_path`` fills it: the shards and the unit that is being filled."""
    saved: float
    """On rank 0 while it writes one file; with ``checkpoint="sharded"`` no more than a step."""
    ended: float
    """Where ``after_fit`` makes module and optimizers' states whole, beside the shards they are made of; with
    ``"sharded"`` no more than a step."""


def life_of(layout: Layout, world_size: int, state: StateBytes, on_host: bool, built: str) -> Life:
    """``state`` is a rank's between two steps; ``on_host``: it lies in host memory. ``built`` is the setting."""
    parameters = layout.parameters
    whole = float(sum(p.numel * p.itemsize for p in parameters) + layout.buffer_bytes)
    whole_states = sum(p.numel * p.state_per_element + p.state_whole for p in parameters if p.trainable and p.used)
    unit = max((sum(p.numel * p.itemsize for p in u.parameters) for u in layout.units), default=0)
    largest = max((p.numel * p.itemsize for p in parameters), default=0)
    shards = state.parameters + layout.buffer_bytes
    born_sharded = world_size > 1 and built == "auto"
    return Life(
        whole=whole,
        made=min(whole, shards + max(OPEN_BYTES + largest, unit)) if born_sharded else whole,
        loaded=(shards if on_host else 0.0) + unit,
        saved=(state.total + layout.buffer_bytes if on_host else 0.0) + whole + whole_states,
        ended=(shards + state.optimizer if on_host else 0.0) + whole + whole_states,
    )
