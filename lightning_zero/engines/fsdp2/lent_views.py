"""Writes through views of a whole tensor that user code got for a sharded one reach the shards.

``p.view(-1)``, ``p[0]`` and ``p.T`` of a sharded ``p`` are views of a gathered copy, which torch would let nobody write
to, or whose writes would be lost; so would those to the values of ``state_dict()``. Of each such copy it is known whose
it is for as long as one of its views lives; an in-place function then brings the copy up to date, runs on the view and
stores the rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.comm.shards import before_host_write, gathered, local, shard_like


@dataclass(frozen=True)
class _Lent:
    owner: DTensor
    original: Tensor | None
    alive: StorageWeakRef
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class LentViews:
    """The gathered copies of which views may be held, by their storage."""

    def __init__(self) -> None:
        self._lent: dict[int, _Lent] = {}

    def __bool__(self) -> bool:
        return bool(self._lent)

    def record(self, whole: Tensor, owner: DTensor, original: Tensor | None = None) -> None:
        """``whole`` holds the values of ``owner``, and it or views of it are about to be handed out. ``original``: the
        user's parameter, if the owner is the shard of one."""
        storage = whole.untyped_storage()
        lent = _Lent(owner, original, StorageWeakRef(storage), whole.stride(), whole.storage_offset())
        self._lent[lent.alive.cdata] = lent  # no other storage's as long as this is here

    def forget_expired(self) -> None:
        """Copies of which nothing is held any more."""
        if self._lent:
            self._lent = {at: lent for at, lent in self._lent.items() if not lent.alive.expired()}

    def owns(self, value: Any) -> bool:
        """Whether ``value``, or one of a list, is such a view."""
        if isinstance(value, (list, tuple)):
            return any(map(self.owns, value))
        return isinstance(value, Tensor) and self._find(value) is not None

    def _find(self, view: Tensor) -> _Lent | None:
        if isinstance(view, DTensor) or view.layout != torch.strided:
            return None
        try:
            return self._lent.get(StorageWeakRef(view.untyped_storage()).cdata)
        except RuntimeError:  # no memory of its own: inside a transform of torch.func
            return None

    def owner(self, view: Tensor) -> tuple[DTensor, Tensor | None]:
        """Whose view it is: the shard, and the user's parameter if it is of one."""
        lent = self._find(view)
        assert lent is not None
        return lent.owner, lent.original

    def write(
        self,
        func: Callable[..., Any],
        view: Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        now: Tensor | None = None,
    ) -> Any:
        """``func(view, *args, **kwargs)``, all of whose tensors are whole (collective).

        Args:
            now: The owner as it is gathered, if it is: what is written goes there.
        """
        lent = self._find(view)
        assert lent is not None
        before_host_write(lent.owner)
        with torch.no_grad():
            with torch.inference_mode() if view.is_inference() else nullcontext():
                copy = view.detach().as_strided(lent.owner.shape, lent.stride, lent.offset)
                copy.copy_(gathered(lent.owner) if now is None else now)  # other writes since
                result = func(view, *args, **kwargs)
                if hasattr(result, "wait"):  # of a collective with async_op
                    result.wait()
            # outside of inference mode: the engine looks at the version of its shards
            if now is None:
                local(lent.owner).copy_(local(shard_like(copy, lent.owner)))
            else:
                now.copy_(copy)
        return result
