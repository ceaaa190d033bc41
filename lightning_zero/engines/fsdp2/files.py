"""Shards in files: ``offload="nvme"``.

[Tensors] Host shards (see ``engine``) in the memory of a mapped file (``paged_file``): the master weights, and those
optimizer states that have the shape of their parameter. Gradients stay in host memory. All other code sees ordinary
tensors; an access to one that is not in memory waits for the disk.

[Plan] The process keeps the pages of only a few units:

    gather of a unit       reads the unit; the unit gathered next the last time is read ahead
    its copies dropped     its pages may be evicted: they are unchanged
    optimizer's step       unit by unit, if stepping on parts of the parameters equals stepping on all of them;
                           the next two units are read ahead, finished ones are written

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
"""Stepped units that may still wait to be written."""
UNITS_AHEAD = 2
"""Units read ahead of the stepping one."""
_ALIGNED_BYTES = 64
"""Alignment of each tensor in its unit's region."""


class _Unit:
    """The regions of one unit: first that of its parameters, then those of states, mostly joined into one."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    @property
    def parameters(self) -> Region:
        return self.regions[0]


class FileShards:
    """This rank's shards and states in one file; see the module docstring.

    Args:
        folder: On the disk; the file is created there.
    """

    def __init__(self, folder: str) -> None:
        self._file = PagedFile(folder)
        self._units: dict[int, _Unit] = {}  # id of a group -> its regions
        self._unit_of: dict[int, _Unit] = {}  # id of a shard's local tensor
        self._shards: list[Tensor] = []  # keeps the tensors alive, so that their ids are not reused
        self._slots: dict[tuple[int, int, str], Tensor] = {}  # ids of shard and optimizer, key of the state
        self._memories: set[int] = set()  # addresses of mapped storages
        self._last: tuple[_Unit | None, _Unit | None] = (None, None)  # the two units gathered last
        self._followed: dict[tuple[_Unit | None, _Unit | None], _Unit] = {}

    # -- parameters

    def take(self, group: private.Group) -> None:
        """Move the shards of ``group`` into the file."""
        unit = self._units[id(group)] = _Unit()

        def move(shards: Sequence[Tensor]) -> list[Tensor]:
            return [moved.copy_(shard) for moved, shard in zip(self._room(unit, shards), shards, strict=True)]

        with torch.no_grad():
            for part in private.move_shards(group, move):
                self._unit_of[id(part)] = unit
                self._shards.append(part)
        for region in unit.regions:
            self._file.write_behind(region)

    def before_gather(self, group: private.Group) -> None:
        """Read ahead the unit that followed the last time; ``group`` is about to be gathered."""
        unit, last = self._units[id(group)], self._last
        if not unit.regions:
            return
        self._followed[last] = unit
        self._last = last[1], unit
        following = self._followed.get(self._last)
        if following is not None:
            self._file.read_ahead(following.parameters)

    def after_use(self, group: private.Group) -> None:
        """Release the pages of ``group``, whose gathered parameters are about to be dropped."""
        if self._units[id(group)].regions:
            self._file.let_go(self._units[id(group)].parameters)

    # -- states

    def keep(self, optimizer: Any, shard: Tensor, key: str, value: Tensor) -> Tensor:
        """Copy ``value``, the state ``key`` of ``optimizer`` for the local tensor ``shard``, into the file.

        Returns the tensor in the file, or ``value`` if it cannot or need not be copied.
        """
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
        """Yield ``shards`` (local tensors) unit by unit, first those not in the file; a part stays in memory until the
        caller asks for the next."""
        others = [shard for shard in shards if id(shard) not in self._unit_of]
        if others:
            yield others
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
                while len(going) > UNITS_BEHIND:  # wait for a slow disk before memory fills
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
        """End the run. Parameters and states that stay sharded stay in the file, which is deleted with the last of
        them."""
        self._shards.clear()
        self._slots.clear()
        self._file.close()

    # -- account

    def holds(self, tensor: Tensor) -> bool:
        """Whether the local ``tensor`` is in the file."""
        return tensor.untyped_storage().data_ptr() in self._memories

    def _room(self, unit: _Unit, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Allocate flat tensors for ``tensors``, in one region of the file."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        region, memory = self._file.take(end)
        # The first region is that of the parameters alone: gathers read it without the states.
        joined = unit.regions[-1].joined(region) if len(unit.regions) > 1 else None
        unit.regions[len(unit.regions) - (joined is not None) :] = [joined or region]
        self._memories.add(memory.untyped_storage().data_ptr())
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype)
            for start, tensor in zip(starts, tensors, strict=True)
        ]
