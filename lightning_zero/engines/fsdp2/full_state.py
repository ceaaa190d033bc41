"""Reads sharded state: for checkpoints and for reports of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.identity import Identity
from lightning_zero.engines.fsdp2.sharding import Sharded
from lightning_zero.engines.model_state import ModelState, states_of
from lightning_zero.engines.residency import States


def detached_shards(state: dict[str, Any], shard_of: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Replace the tensors in a ``state_dict()`` by detached shards; a tied one is one object under all its names."""
    detached: dict[int, Tensor] = {}
    return map_tensors(lambda path, t: detached.setdefault(id(t), shard_of(t).detach()), state)


def model_state(
    sharded: Sharded,
    identity: Identity,
    states: States,
    optimizers: Iterable[Optimizer],
    place: Callable[[Tensor], str],
) -> ModelState:
    """Return the tensors that this rank currently holds, with their places; ``place`` maps a parameter, gradient or
    state to its place."""
    state = ModelState()
    for p in sharded.parameters:
        state.add("parameters", p, place(p))
        if p.grad is not None:
            state.add("gradients", p.grad, place(p.grad))
    for unit in sharded.units:
        for group in private.groups(unit):
            for each in group.fsdp_params:
                copies, gradients = private.full_bytes(each)
                state.add_bytes("parameters", copies, "device")
                state.add_bytes("gradients", gradients, "device")
    replicated = set(sharded.replicated)
    for p, value in states_of(optimizers):  # other states, such as counters, are placed with their parameter
        shard = states.part_of(value)
        like = p if p in replicated else identity.shards.get(p, p)
        state.add("optimizer", value if shard is None else shard, place(like if shard is None else shard))
    return state
