"""How parameters and gradients travel between ranks: the interface, and what an accelerator uses. See ``cpu`` for the
rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_zero.config import ZeroConfig
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.usage import Usage


class Transport:
    """PyTorch's own collectives, on the device's streams: every method leaves ``fully_shard`` as it is.

    The engine calls the methods in the order of a step: ``gather_up_front``, ``unit_begins`` for each unit,
    ``forward_ends``, ``backward_begins``, ``reduction_begins`` for each group, ``backward_ends``, ``awaits_step``,
    ``step_ends``.
    """

    gathers_up_front = False
    """Stages 1 and 2 gather every unit before the forward, so ranks may run different units."""
    agrees = False
    """Ranks agree on more than unused parameters, so they need a group for it."""

    def attach(self, units: Sequence[nn.Module]) -> None:
        """``fully_shard`` has taken ``units``, the root last; nothing has been gathered yet."""

    def alias_shards(self, groups: Sequence[private.Group]) -> None:
        """``groups`` are initialized; no optimizer holds a shard yet, so shards may still move."""

    def connect(self, usage: Usage) -> None:
        """Ranks can agree from now on, through ``usage``."""

    def gather_up_front(self, recurs: bool) -> None:
        """A forward is about to begin. ``recurs``: what is gathered may still be gathered from the forward before."""

    def unit_begins(self, index: int, recomputes: bool) -> None:
        """This rank is about to run unit ``index``; ``recomputes`` in a backward, where units run in another order."""

    def forward_ends(self) -> None:
        """This rank's forward has ended; every rank's does."""

    def before_backward(self) -> None:
        """A backward, or the backward of one group, is about to begin, maybe inside the forward."""

    def backward_begins(self, may_defer: bool) -> bool:
        """Whether all reductions wait for the end of the backward, in fixed order; only if they ``may_defer``."""
        return False

    def reduction_begins(self, group: private.Group) -> None:
        """The gradients of ``group`` are complete and about to be reduced."""

    def backward_ends(self) -> None:
        """Autograd is done; reductions that ``fully_shard`` has begun are complete when this returns."""

    def awaits_step(self, is_due: bool) -> None:
        """After a backward: whether the optimizer steps next, on all ranks."""

    def resharded(self) -> None:
        """All gathered parameters are about to be dropped, those that travel ahead included."""

    def before_write(self) -> None:
        """User code is about to write to shards."""

    def copies_written(self) -> None:
        """Gathered parameters were written to; their rows go to the shards now."""

    def step_ends(self) -> None:
        """An optimizer may have written to shards, perhaps by a kernel that no tensor's version tells of."""

    def await_readers(self) -> None:
        """Returns when no other rank reads this rank's shards or gradients any more."""

    def close(self) -> None:
        """Gives connections back."""


def make_transport(config: ZeroConfig, device: torch.device, mesh: DeviceMesh, may_alias: bool) -> Transport:
    """What ``config.transport`` says for this device and process group.

    Args:
        may_alias: Shards and gathered parameters lie in the same memory, so the first may be a part of the second.

    Raises:
        ValueError: For ``"direct"`` between other than CPU processes over gloo.
    """
    backend = dist.get_backend(mesh.get_group("shard"))
    possible = device.type == "cpu" and backend == "gloo"
    if config.transport == "direct" and not possible:
        raise ValueError(
            f"transport='direct' on {device.type} with process_group_backend={backend!r}: direct exchange is between"
            " processes on CPUs over gloo; use transport='auto' or 'torch'."
        )
    if not possible or config.transport == "torch":
        return Transport()
    from lightning_zero.engines.fsdp2.cpu import DirectTransport  # what an accelerator needs not read

    return DirectTransport(config, mesh, may_alias)
