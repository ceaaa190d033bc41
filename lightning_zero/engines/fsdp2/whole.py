"""Reading and putting back whole state: for checkpoints, for user code, and at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.shards import gathered
from lightning_zero.engines.base import undetached_state_dict
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.sharding import Sharded
from lightning_zero.engines.model_state import ModelState, place_of, states_of


def sharded_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` of detached shards; a tied parameter is one object under all its names."""
    detached: dict[int, Tensor] = {}
    return map_tensors(lambda path, t: detached.setdefault(id(t), t.detach()), undetached_state_dict(module))


def make_whole(state: dict[str, Any]) -> None:
    """Gathers the shards of a state dict, in place (collective)."""
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = gathered(value)


def model_state(sharded: Sharded, optimizers: Iterable[Optimizer], device: torch.device, on_host: bool) -> ModelState:
    """What this rank holds right now, and where."""

    def place(tensor: Tensor) -> str:
        return place_of(tensor, device, on_host)

    state = ModelState()
    for p in sharded.parameters:
        state.add("parameters", p, place(p))
        if p.grad is not None:
            state.add("gradients", p.grad, place(p.grad))
    for unit in sharded.units:
        for group in private.groups(unit):
            for each in group.fsdp_params:
                copies, gradients = private.whole_bytes(each)
                state.add_bytes("parameters", copies, "device")
                state.add_bytes("gradients", gradients, "device")
    replicated = set(sharded.replicated)
    for p, value in states_of(optimizers):  # counters lie with what they count
        state.add("optimizer", value, place(value if p in replicated else p))
    return state


def restore_parameters(sharded: Sharded) -> None:
    """The module holds the parameters that the user made, with the shards' values (collective)."""
    for unit in sharded.units:
        for group in private.groups(unit):
            copies = private.gather_for_good(group)
            for p, places in list(private.registrations(group)):
                original = sharded.originals[p]
                assert isinstance(p, DTensor)
                original.data = _unpadded(copies.pop(p)) if p in copies else gathered(p).to("cpu")
                original.requires_grad_(p.requires_grad)
                for module, name in places:
                    setattr(module, name, original)


def _unpadded(whole: Tensor) -> Tensor:
    """``whole`` in memory of its own size: what it lies in may have room for larger shards."""
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()
