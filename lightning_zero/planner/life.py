"""Host memory of one rank at stage 3, from its first byte to its last: made, loaded, trained, saved, ended."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_zero.engines.birth import OPEN_BYTES
from lightning_zero.planner.memory import Layout, StateBytes, state_bytes


@dataclass(frozen=True, kw_only=True)
class Life:
    """Most that is alive in a rank's host memory at ``zero3`` on ``fsdp2``, bytes. Pages of files
    (``offload="nvme"``) are the kernel's, which takes them back, and don't count."""

    offload: str
    """The setting that it holds for."""
    whole: float
    """The module itself: what every rank holds that builds it in ``__init__``, or below stage 3."""
    made: float
    """While ``configure_model`` builds it: the shards, the open lots and the parameter that is being made, or later the
    unit that is about to be shards."""
    loaded: float
    """While ``load_pretrained`` or ``ckpt_path`` fills it: the shards and the unit that is being filled."""
    trained: float
    """In a step: all of it where the host's memory is the device's, else what is offloaded."""
    kept: float
    """Between two steps: what other ranks hold while rank 0 saves."""
    saved: float
    """On rank 0 while it writes one file; with ``checkpoint="sharded"`` no more than a step."""
    ended: float
    """While ``after_fit`` makes module and optimizers' states whole, beside the shards they are made of; with
    ``"sharded"`` no more than a step."""


def life_of(layout: Layout, world_size: int, offload: str, host_is_device: bool, built: str, step_bytes: float) -> Life:
    """``offload`` and ``built`` are the settings; ``step_bytes`` is the most that a step needs of host memory."""
    parameters = layout.parameters
    held = on_host(layout, world_size, offload, host_is_device)
    buffers = layout.buffer_bytes if host_is_device else 0
    whole = float(sum(p.numel * p.itemsize for p in parameters) + layout.buffer_bytes)
    whole_states = sum(p.numel * p.state_per_element + p.state_whole for p in parameters if p.trainable and p.used)
    unit = max((sum(p.numel * p.itemsize for p in u.parameters) for u in layout.units), default=0)
    largest = max((p.numel * p.itemsize for p in parameters), default=0)
    shards = state_bytes(layout, 3, world_size).parameters + layout.buffer_bytes
    born_sharded = world_size > 1 and built == "auto"
    return Life(
        offload=offload,
        whole=whole,
        made=min(whole, shards + max(OPEN_BYTES + largest, unit)) if born_sharded else whole,
        loaded=held.parameters + buffers + unit,
        trained=step_bytes,
        kept=held.total + buffers,
        saved=held.total + buffers + whole + whole_states,
        ended=held.parameters + held.optimizer + buffers + whole + whole_states,
    )


def on_host(layout: Layout, world_size: int, offload: str, host_is_device: bool) -> StateBytes:
    """The part of a rank's state between two steps that lies in host memory. What cannot be sharded stays on the
    device; ``"nvme"`` leaves of the shards only gradients in memory."""
    whole = state_bytes(replace(layout, units=()), 3, world_size)
    shards = state_bytes(replace(layout, replicated=()), 3, world_size)
    if offload == "nvme":
        shards = replace(shards, parameters=0.0, optimizer=0.0)
    there = [*([whole] if host_is_device else []), *([shards] if host_is_device or offload != "none" else [])]
    return StateBytes(
        parameters=sum(s.parameters for s in there),
        gradients=sum(s.gradients for s in there),
        optimizer=sum(s.optimizer for s in there),
    )
