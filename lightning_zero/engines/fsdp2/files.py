"""Shards in files: ``offload="nvme"``.

[Tensors] Host shards (see ``engine``) whose memory is a file's (``paged_file``): the master weights, and the
states of an optimizer that have their shape. Gradients stay in host memory. To everybody else they are tensors like
others; who touches one that is not in memory waits for the disk.

[Plan] The pages that the process has are those of a few units:

    gather of a unit       reads it; what was gathered next the last time is read ahead
    its copies dropped     its pages may go: they are unchanged
    optimizer's step       unit by unit, where stepping on a part of the parameters is stepping on the whole of them;
                           the next two are read ahead, those behind are written

The kernel keeps what it has read or written as long as nobody needs that memory, so a run that fits into memory rarely
waits for the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.paged_file import PagedFile, Region

UNITS_BEHIND = 2
"""Stepped and not yet given up."""
UNITS_AHEAD = 2
"""Read ahead of the one that is stepped."""
_ALIGNED_BYTES = 64
"""Of a tensor in its unit's region."""


class _Unit:
    """The regions of one unit: its parameters', and those of states, most of them one."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    @property
    def parameters(self) -> Region:
        return self.regions[0]


class FileShards:
    """The shards of this rank; see the module's text.

    Args:
        folder: On the disk.
    """

    def __init__(self, folder: str) -> None:
        self._file = PagedFile(folder)
        self._groups: list[private.Group] = []
        self._units: dict[int, _Unit] = {}  # id of a group -> its regions
        self._unit_of: dict[int, _Unit] = {}  # id of a shard's local tensor
        self._shards: list[Tensor] = []  # so that their ids stay their own
        self._slots: dict[tuple[int, int, str], Tensor] = {}  # ids of shard and optimizer, key of the state
        self._memories: set[int] = set()
        self._last: tuple[_Unit | None, _Unit | None] = (None, None)  # gathered
        self._followed: dict[tuple[_Unit | None, _Unit | None], _Unit] = {}

    # -- parameters

    def take(self, group: private.Group) -> None:
        """Moves the shards of ``group`` into the file."""
        unit = self._units[id(group)] = _Unit()
        self._groups.append(group)

        def move(shards: Sequence[Tensor]) -> list[Tensor]:
            return [moved.copy_(shard) for moved, shard in zip(self._room(unit, shards), shards, strict=True)]

        with torch.no_grad():
            for part in private.move_shards(group, move):
                self._unit_of[id(part)] = unit
                self._shards.append(part)
        for region in unit.regions:
            self._file.write_behind(region)

    def before_gather(self, group: private.Group) -> None:
        """``group`` is about to be gathered; what followed the last time is read ahead."""
        unit, last = self._units[id(group)], self._last
        if not unit.regions:
            return
        self._followed[last] = unit
        self._last = last[1], unit
        following = self._followed.get(self._last)
        if following is not None:
            self._file.read_ahead(following.parameters)

    def after_use(self, group: private.Group) -> None:
        """``group`` is about to be dropped."""
        if self._units[id(group)].regions:
            self._file.let_go(self._units[id(group)].parameters)

    # -- states

    def keep(self, optimizer: Any, shard: Tensor, key: str, value: Tensor) -> Tensor:
        """``value``, a state of ``optimizer`` beside the local tensor ``shard``, in the file."""
        unit, place = self._unit_of.get(id(shard)), (id(shard), id(optimizer), key)
        slot = self._slots.get(place)
        if slot is value or unit is None or value.shape != shard.shape or not value.numel():
            return value
        if slot is None or slot.dtype != value.dtype:
            (flat,) = self._room(unit, [value])
            slot = self._slots[place] = flat.view(value.shape)
        return slot.copy_(value.detach())

    # -- the step

    def in_parts(self, shards: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """``shards`` (local tensors) unit by unit, each in memory for as long as the caller holds on to it; first what
        is in no file."""
        beside = [shard for shard in shards if id(shard) not in self._unit_of]
        if beside:
            yield beside
        parts: dict[int, tuple[_Unit, list[Tensor]]] = {}
        for shard in shards:
            if (unit := self._unit_of.get(id(shard))) is not None:
                parts.setdefault(id(unit), (unit, []))[1].append(shard)
        order = list(parts.values())
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            coming = [reader.submit(self._come, unit) for unit, _ in order[:UNITS_AHEAD]]
            going: list[Future[None]] = []
            for i, (unit, part) in enumerate(order):
                coming.pop(0).result()
                coming += [reader.submit(self._come, later) for later, _ in order[i + UNITS_AHEAD :][:1]]
                yield part
                going.append(writer.submit(self._go, unit))
                while len(going) > UNITS_BEHIND:  # a slow disk holds the step up, before memory fills
                    going.pop(0).result()
            for done in going:
                done.result()

    def _come(self, unit: _Unit) -> None:
        for region in unit.regions:
            self._file.read_to_write(region)

    def _go(self, unit: _Unit) -> None:
        for region in unit.regions:
            self._file.write_behind(region)

    # -- the end

    def close(self) -> None:
        """Gives up the parameters, which are whole elsewhere by now. States that stay sharded stay in the file, which
        ends with the last of them."""
        for group in self._groups:
            for p in group.fsdp_params:
                private.drop_shard(p)
        self._shards.clear()
        self._slots.clear()
        self._file.close()

    # -- account

    def holds(self, tensor: Tensor) -> bool:
        """Whether the local ``tensor`` lies in the file."""
        return tensor.untyped_storage().data_ptr() in self._memories

    def _room(self, unit: _Unit, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Flat tensors for ``tensors``, in one region."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        region, memory = self._file.take(end)
        joined = unit.regions[-1].joined(region) if len(unit.regions) > 1 else None
        unit.regions[len(unit.regions) - (joined is not None) :] = [joined or region]
        self._memories.add(memory.untyped_storage().data_ptr())
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
