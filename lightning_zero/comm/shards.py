"""Shards as ``DTensor``: their layout, and how to gather full tensors from them.

A sharded parameter is a ``DTensor`` whose dim 0 is split along one axis of its mesh (``Shard(0)``: ``ceil(rows / N)``
rows each, the last ranks fewer) and replicated along the others. Its shard is on the mesh's device. With CPU offload
the shard is in host memory although the mesh is of an accelerator; the gathered tensor is on the accelerator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_zero.comm import direct
from lightning_zero.private.torch import DisableTorchFunction, local_tensor, set_local_tensor


@torch.no_grad()
def gathered(tensor: Tensor) -> Tensor:
    """Gathers a ``DTensor`` into one plain tensor on every rank and its mesh's device, outside autograd (collective).
    Other tensors are returned detached."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    axis = _sharded_axis(tensor)
    if axis is None:
        return tensor.full_tensor()
    # Not full_tensor with gloo: it runs as ALLGATHER_COALESCED, and both threads of a gloo group write the name of
    # their last operation to one string without a lock (``ProcessGroupGloo::runLoop``, torch 2.13). Names of up to 15
    # letters fit into the string itself; longer ones are sometimes freed twice, which crashes the process.
    mesh, shard = tensor.device_mesh, local(tensor)
    each = -(-tensor.shape[0] // mesh.size(axis))
    full = shard.new_empty(mesh.size(axis) * each, *tensor.shape[1:], device=mesh_device(tensor))
    mine = full[mesh.get_local_rank(axis) * each :][:each]
    mine[: shard.shape[0]] = shard
    direct.all_gather(_bytes_of(full), _bytes_of(mine), mesh.get_group(axis)).wait()
    return full if full.shape == tensor.shape else full[: tensor.shape[0]].clone()


PACKED_BYTES = 1 << 20
"""Full tensors below this size are gathered together: a message of their own would cost more than they do."""
BUCKET_BYTES = 32 << 20
"""Size of the full tensors that are gathered together at a time."""
_ALIGNMENT = 16  # bytes between tensors in a bucket: a view in any dtype must be possible


@torch.no_grad()
def gathered_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gathers each tensor as :func:`gathered` does (collective): small ones in buckets, large ones one at a time.

    On a mesh of one rank the result is the shard itself, detached.
    """
    done: dict[int, Tensor] = {}
    buckets: dict[tuple[DeviceMesh, int], list[DTensor]] = {}
    sizes: Counter[tuple[DeviceMesh, int]] = Counter()
    for tensor in {id(t): t for t in tensors}.values():
        axis = _sharded_axis(tensor) if isinstance(tensor, DTensor) else None
        if axis is None or not isinstance(tensor, DTensor):
            done[id(tensor)] = gathered(tensor)
        elif tensor.device_mesh.size(axis) == 1 and not is_off_mesh(tensor):
            done[id(tensor)] = local(tensor).detach()
        elif tensor.nbytes >= PACKED_BYTES or not tensor.numel():
            done[id(tensor)] = gathered(tensor)
        else:
            key = tensor.device_mesh, axis
            buckets.setdefault(key, []).append(tensor)
            sizes[key] += tensor.nbytes
            if sizes[key] >= BUCKET_BYTES:
                done |= _gathered_together(buckets.pop(key), axis)
                del sizes[key]
    for (_, axis), waiting in buckets.items():
        done |= _gathered_together(waiting, axis)
    return [done[id(tensor)] for tensor in tensors]


def _gathered_together(tensors: Sequence[DTensor], axis: int) -> dict[int, Tensor]:
    """Gathers tensors by one all-gather of bytes; returns the full tensors by id. Every rank packs as many rows as the
    first rank has, so that all ranks send the same size."""
    mesh = tensors[0].device_mesh
    ranks, device = mesh.size(axis), mesh_device(tensors[0])
    rows = [-(-t.shape[0] // ranks) for t in tensors]
    nbytes = [n * (t.numel() // t.shape[0]) * t.element_size() for n, t in zip(rows, tensors, strict=True)]
    ends = list(accumulate(-(-n // _ALIGNMENT) * _ALIGNMENT for n in nbytes))
    packed = torch.empty(ranks, ends[-1], dtype=torch.uint8, device=device)
    mine = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    for t, n, size, end in zip(tensors, rows, nbytes, ends, strict=True):
        start = end - -(-size // _ALIGNMENT) * _ALIGNMENT
        shard = local(t)
        mine[start : start + size].view(t.dtype).view(n, *t.shape[1:])[: shard.shape[0]] = shard
    direct.all_gather(packed.view(-1), mine, mesh.get_group(axis)).wait()
    done = {}
    for t, n, size, end in zip(tensors, rows, nbytes, ends, strict=True):
        start = end - -(-size // _ALIGNMENT) * _ALIGNMENT
        full = torch.empty(ranks * n, *t.shape[1:], dtype=t.dtype, device=device)
        _bytes_of(full).view(ranks, size).copy_(packed[:, start : start + size])
        done[id(t)] = full if full.shape == t.shape else full[: t.shape[0]].clone()
    return done


def _sharded_axis(tensor: DTensor) -> int | None:
    """The mesh axis along which ``tensor``'s rows are split. ``None`` if it is not replicated along all other axes, as
    every tensor of an engine is."""
    axes = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return axes[0] if len(axes) == 1 and tensor.placements[axes[0]].is_shard(0) else None


def is_off_mesh(tensor: Tensor) -> bool:
    """Whether ``tensor`` is sharded over an accelerator's mesh while its shards are in host memory."""
    return isinstance(tensor, DTensor) and local(tensor).device.type != tensor.device_mesh.device_type


def mesh_device(tensor: Tensor) -> torch.device:
    """The device on which this rank gathers ``tensor``."""
    if not is_off_mesh(tensor):
        return local(tensor).device
    kind = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def before_host_write(tensor: Tensor) -> None:
    """Waits for queued copies from a host shard to the device. Call it before the shard's values change: copies still
    in the queue would read the new values."""
    if is_off_mesh(tensor):
        finish_copies(mesh_device(tensor))


def finish_copies(device: torch.device) -> None:
    """Waits for all copies between host memory and ``device``."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


PIECE_BYTES = 32 << 20
"""Size of the pinned buffers through which large tensors leave a device."""


@torch.no_grad()
def to_host(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Copies a plain tensor into ``out`` in host memory; without ``out`` as ``tensor.cpu()`` does.

    A large tensor leaves its device through two pinned buffers: the device fills one while the host empties the other.
    """
    if tensor.device.type == "cpu" or tensor.nbytes <= PIECE_BYTES or not tensor.is_contiguous():
        return tensor.cpu() if out is None else out.copy_(tensor)
    out = torch.empty_like(tensor, device="cpu") if out is None else out
    device = torch.get_device_module(tensor.device)
    filling: list[tuple[Tensor, Tensor, Any]] = []
    for source, target in zip(*(_bytes_of(t).split(PIECE_BYTES) for t in (tensor, out)), strict=True):
        pinned = torch.empty_like(source, device="cpu", pin_memory=True)  # PyTorch keeps freed ones for the next piece
        pinned.copy_(source, non_blocking=True)
        filling.append((target, pinned, device.current_stream().record_event()))
        if len(filling) == 2:
            _empty_first(filling)
    _empty_first(filling)
    return out


def _empty_first(filling: list[tuple[Tensor, Tensor, Any]]) -> None:
    target, pinned, full = filling.pop(0)
    full.synchronize()
    target.copy_(pinned)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes, because gloo does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a ``DTensor``, without a copy; other tensors are returned unchanged."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def shard_like(value: Tensor, like: DTensor, dtype: torch.dtype | None = None) -> DTensor:
    """Copies this rank's rows of ``value``, which is equal on all ranks, into a shard laid out as ``like``.

    The shard has ``dtype``, or that of ``like``.
    """
    shard = local(like)
    value = value.detach()
    if value.shape != like.shape:
        value = value.expand(like.shape)
    start, length = rows_of(like)
    mine = torch.empty_like(shard, dtype=dtype or shard.dtype)
    if length:
        mine.copy_(value.narrow(0, start, length))
    return as_shard(mine, like)


def as_shard(part: Tensor, like: DTensor) -> DTensor:
    """Wraps ``part``, without a copy, as this rank's shard of a tensor laid out as ``like``; it stays on its device."""
    if part.device.type == like.device_mesh.device_type:
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return _around(part, like)  # not from_local, which would move the part to the mesh's device


def _around(part: Tensor, like: DTensor) -> DTensor:
    with torch.no_grad(), DisableTorchFunction():
        sharded = torch.empty_like(like, dtype=part.dtype)
    assert isinstance(sharded, DTensor)
    set_local_tensor(sharded, part)
    return sharded


def rows_of(tensor: DTensor) -> tuple[int, int]:
    """Returns the first row of dim 0 that this rank holds and the number of its rows: ``ceil(rows / N)``, fewer on the
    last ranks."""
    start, length = 0, tensor.shape[0]
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_shard(0):  # split as torch.chunk does, which fully_shard uses: other rules would shift rows
            each = -(-length // tensor.device_mesh.size(mesh_dim))
            first = min(each * tensor.device_mesh.get_local_rank(mesh_dim), length)
            start, length = start + first, min(each, length - first)
    return start, length
