"""Bytes of the model's state on a rank, counted tensor by tensor, by kind and place.

[Kinds] *parameters* with their master weights and gathered buffers, *gradients*, *optimizer* states.

[Places] *device*, *host* memory, *disk*. On a CPU-only machine, device and host are the same memory. A tensor is then
counted in the place that it would have with an accelerator: the shards of ``offload="cpu"`` on the host, gathered
buffers on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.comm.shards import local
from lightning_zero.engines.optimizer_family import family, states

KINDS = ("parameters", "gradients", "optimizer")
PLACES = ("device", "host", "disk")


@dataclass
class ModelState:
    """Numbers of bytes on this rank by kind and place."""

    here: dict[str, dict[str, int]] = field(default_factory=lambda: {kind: dict.fromkeys(PLACES, 0) for kind in KINDS})
    """Kind -> place -> bytes."""

    def add(self, kind: str, tensor: Tensor, place: str) -> None:
        """Counts ``tensor``, or this rank's shard of it."""
        self.add_bytes(kind, local(tensor).nbytes, place)

    def add_bytes(self, kind: str, nbytes: int, place: str) -> None:
        self.here[kind][place] += nbytes

    def held(self, kind: str) -> int:
        """Bytes of ``kind`` on this rank, in all places."""
        return sum(self.here[kind].values())

    def at(self, place: str) -> int:
        """Bytes of all kinds in one place."""
        return sum(self.here[kind][place] for kind in KINDS)


def plain_state(module: nn.Module, optimizers: Iterable[Optimizer]) -> ModelState:
    """The state of a module that no engine has sharded, on one device."""
    state = ModelState()
    for p in module.parameters():
        state.add("parameters", p, "device")
        if p.grad is not None:
            state.add("gradients", p.grad, "device")
    for _, tensor in states_of(optimizers):
        state.add("optimizer", tensor, "device")
    return state


def states_of(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each tensor in the optimizers' states (a shard if the state is sharded) with its parameter."""
    for of_all in (each for optimizer in optimizers for each in states(family(optimizer))):
        for p, state in of_all.items():
            yield from ((p, value) for value in state.values() if isinstance(value, Tensor))


def place_of(
    tensor: Tensor,
    device: torch.device,
    shards_on_host: bool,
    in_files: Callable[[Tensor], bool] | None = None,
) -> str:
    """Returns the place of ``tensor``: the disk if ``in_files`` is true for its shard; on a CPU-only machine the place
    that it would have with an accelerator (see the file's docstring)."""
    if in_files is not None and in_files(local(tensor)):
        return "disk"
    if device.type == "cpu":
        return "host" if shards_on_host and isinstance(tensor, DTensor) else "device"
    return "host" if local(tensor).device.type == "cpu" else "device"
