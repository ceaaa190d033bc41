"""Reads sharded and full state: for checkpoints, for reports of memory, and at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.shards import gathered, to_host
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.identity import Identity
from lightning_zero.engines.fsdp2.sharding import Sharded
from lightning_zero.engines.model_state import ModelState, states_of


def detached_shards(state: dict[str, Any], shards: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    """Replace the parameters in a ``state_dict()`` by detached shards; a tied one is one object under all its names."""
    detached: dict[int, Tensor] = {}
    return map_tensors(lambda path, t: detached.setdefault(id(t), shards.get(t, t).detach()), state)


def model_state(
    sharded: Sharded, identity: Identity, optimizers: Iterable[Optimizer], place: Callable[[Tensor], str]
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
        like = p in replicated or isinstance(value, DTensor)
        state.add("optimizer", value, place(value if like else identity.shards.get(p, p)))
    return state


def gathered_for_good(groups: Iterable[private.Group]) -> Callable[[DTensor], Tensor]:
    """Return a function from shards to full values on the CPU, in memory of their own.

    The call with the first shard of a group gathers that group (collective). The groups must not be used again.
    """
    waiting = {p.sharded_param: group for group in groups for p in group.fsdp_params}
    copies: dict[Tensor, Tensor] = {}

    def value(shard: DTensor) -> Tensor:
        if (group := waiting.get(shard)) is not None:
            for p in group.fsdp_params:
                del waiting[p.sharded_param]
            copies.update(private.gather_for_good(group))
        return _unpadded(copies.pop(shard)) if shard in copies else to_host(gathered(shard))

    return value


def _unpadded(full: Tensor) -> Tensor:
    """Return ``full`` in a storage of exactly its size: the current storage may include padding of the shards."""
    return full if full.untyped_storage().nbytes() == full.nbytes else full.clone()
