"""``p.data``, which user code takes and assigns, as it would be if the engine did not hold the memory of ``p``.

- ``old = p.data`` shares the memory of ``p`` until ``p`` gets other memory; then ``old`` keeps the values of before.
- ``p.data = x`` gives ``p`` the values of ``x``; once more it changes nothing: ``x`` would be the memory of ``p``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.comm.shards import local
from lightning_zero.private.torch import DisableTorchFunction, set_data, set_local_tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Aliases:
    """The tensors taken of ``p.data`` and assigned to it, by parameter."""

    def __init__(self) -> None:
        self._taken: Any = WeakIdKeyDictionary()  # weak references
        self._given: Any = WeakIdKeyDictionary()
        self._owners: Any = WeakIdKeyDictionary()  # alias -> what it was taken of
        self._uncounted: Any = WeakIdKeyDictionary()  # a set

    def taken(self, owner: Tensor, alias: Any, counted: bool = True) -> Any:
        """``alias`` is ``owner.data``, or ``owner.detach()``. ``counted``: it has its owner's version counter."""
        alive = [other for other in self._taken.get(owner, ()) if other() is not None]
        self._taken[owner] = [*alive, weakref.ref(alias)]
        if alias is not owner:
            self._owners[alias] = weakref.ref(owner)
            if not counted or owner in self._uncounted:
                self._uncounted[alias] = True
        return alias

    def counted(self, value: Any) -> bool:
        """Whether a write to ``value`` would be counted in the version of the parameter whose memory it shares."""
        return value not in self._uncounted

    def origin(self, alias: Any) -> Any:
        """The tensor that ``alias`` was taken of, or ``alias`` itself."""
        while (owner := self._owners.get(alias)) is not None and owner() is not None:
            alias = owner()
        return alias

    def assign(self, owner: Tensor, value: Tensor, copy: Callable[[], None]) -> list[Tensor]:
        """``owner.data = value``; ``copy`` writes it to the engine's memory. Returns what is no alias any more."""
        given = _Given(value) if not isinstance(value, DTensor) and value.numel() else None
        if given is not None and given == self._given.get(owner):
            return []
        alive = [reference() for reference in self._taken.pop(owner, ())]
        parted = [alias for alias in alive if alias is not None and alias is not value]
        for alias in parted:
            _part(alias)
        copy()
        self._given[owner] = given
        return parted


class _Given:
    """A tensor that was assigned: the same one again if its memory and values are."""

    def __init__(self, value: Tensor) -> None:
        value = value.detach()
        self._key = StorageWeakRef(value.untyped_storage()), value.storage_offset(), value.shape, value.stride()
        # Of all of it, as every rank must come to the same answer; of every second element, as the order counts, too
        words = value.contiguous().view(-1).view(_WORDS[min(value.element_size(), 8)])
        self._hash = torch.stack([torch.hash_tensor(words), torch.hash_tensor(words[::2])])

    def __eq__(self, other: object) -> bool:
        # Waits for the device only where the same memory is assigned twice in a row
        return isinstance(other, _Given) and self._key == other._key and torch.equal(self._hash, other._hash)

    __hash__ = None  # type: ignore[assignment]


def _part(alias: Tensor) -> None:
    """Gives ``alias`` memory of its own, with the values it has."""
    with torch.no_grad(), DisableTorchFunction():
        if isinstance(alias, DTensor):
            set_local_tensor(alias, local(alias).clone())
        else:
            set_data(alias, alias.clone())
