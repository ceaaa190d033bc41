"""Exchanges beside the engines' own: many tensors in one message, and small agreements.

All functions are collective over ``group`` and do nothing when it holds one rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.errors import CheckpointError

BUCKET_BYTES = 64 * 2**20
"""Tensors are joined up to this size, so that the copies never take more than a small part of the memory."""


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[Tensor], src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Rank ``src``'s values of ``tensors`` (any dtypes and shapes, one device) become every rank's, in place."""
    if dist.get_world_size(group) == 1:
        return
    for bucket in _buckets([t for t in tensors if t.numel()]):
        flat = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in bucket])
        dist.broadcast(flat, src, group=group)
        if dist.get_rank(group) != src:
            for tensor, part in zip(bucket, flat.split([_nbytes(t) for t in bucket]), strict=True):
                # A clone aligns the bytes for the wider dtype.
                tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def all_reduce_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Averages ``tensors`` over the ranks, in place."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return
    for dtype in {t.dtype: None for t in tensors}:
        for bucket in _buckets([t for t in tensors if t.dtype == dtype and t.numel()]):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            flat.div_(world_size)
            dist.all_reduce(flat, group=group)
            parts = flat.split([t.numel() for t in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + _nbytes(tensor) > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += _nbytes(tensor)
    if bucket:
        yield bucket


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Agreement:
    """Agreements of all ranks on a gloo group of their own, so that none is ever mixed up with an engine's messages.

    The constructor is collective, and so are ``gather``, ``meet`` and ``agree``; on one rank these return at once.

    Args:
        timeout_seconds: How long a call waits for the other ranks before it raises.
        alone: This process agrees with itself, even inside a process group.
    """

    def __init__(self, timeout_seconds: float = 1800.0, alone: bool = False) -> None:
        self.timeout_seconds = timeout_seconds
        several = not alone and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds)) if several else None
        self.lost = False  # a call has failed: gloo's connections do not recover
        # Connects now: a rank that later makes a call alone would first wait for the connection, and fail late
        self.gather(None, "the strategy's set-up")

    def close(self) -> None:
        """Gives the group back, if its process group still lives."""
        if self.group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # destroyed already, together with an earlier process group
                dist.destroy_process_group(self.group)
        self.group = None

    def gather(self, value: Any, call: str = "a checkpoint's agreement") -> list[Any]:
        """Every rank's ``value`` (picklable, small), by rank.

        Raises:
            RuntimeError: When a rank does not make the call within ``timeout_seconds``; names ``call``.
        """
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except Exception as error:  # gloo raises RuntimeError, or a DistBackendError where the peer is gone
            self.lost = True
            raise RuntimeError(
                f"{call} on rank {self.rank}: not all ranks made this call within timeout_seconds="
                f"{self.timeout_seconds:g}, or one has ended. It is collective: make it on every rank, outside of"
                " `if trainer.is_global_zero` and @rank_zero_only."
            ) from error
        return values

    def meet(self, call: str) -> None:
        """Waits until every rank makes ``call``.

        Raises:
            RuntimeError: As :meth:`gather`; also when another rank makes a different call.
        """
        calls = self.gather(call, call)
        if len(set(calls)) > 1:
            found = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(calls))
            raise RuntimeError(f"ranks make different collective calls ({found}): make the same one on every rank.")

    def agree(self, error: BaseException | None) -> None:
        """Raises on every rank if any rank has an ``error``.

        Raises:
            BaseException: On a rank with an ``error``, that one. On the others the closest of :data:`_REPEATABLE`, with
                the message of the first rank that has an error.
        """
        # A number and a text, not the exception: one that cannot be pickled would fail on its own rank alone.
        message = None if error is None else (_repeatable(error), str(error))
        try:
            found = self.gather(message)
        except RuntimeError as lost:
            raise (error or lost) from lost
        if error is not None:
            raise error
        for rank, other in enumerate(found):
            if other is not None:
                raise _REPEATABLE[other[0]](f"on rank {rank}: {other[1]}")


_shared: WeakKeyDictionary[dist.ProcessGroup, dict[float, Agreement]] = WeakKeyDictionary()
"""The agreements of each default process group, by their ``timeout_seconds``."""


def shared_agreement(timeout_seconds: float) -> Agreement:
    """The agreement of all runs in this default process group that have this ``timeout_seconds``. Collective.

    One for all of them: a group holds three threads and its sockets until the process group ends, and a strategy must
    not close its own at the end of its run, because a trainer saves after ``fit`` as well. Only for the main thread, on
    which all ranks make the same calls. Whether a group is made depends on earlier calls alone, never on garbage
    collection, so all ranks do the same.
    """
    if not dist.is_initialized():
        return Agreement(timeout_seconds)
    world = dist.group.WORLD
    assert world is not None
    made = _shared.setdefault(world, {})
    if timeout_seconds not in made or made[timeout_seconds].lost:
        made[timeout_seconds] = Agreement(timeout_seconds)
    return made[timeout_seconds]


_of_run: list[Agreement] = []


def set_run_agreement(agreement: Agreement | None) -> None:
    """What :func:`run_agreement` answers from now on."""
    _of_run[:] = [] if agreement is None else [agreement]


def run_agreement() -> Agreement | None:
    """The agreement of the run that is in progress, for functions that users call without naming its strategy."""
    return _of_run[0] if _of_run else None


_REPEATABLE = (CheckpointError, FileNotFoundError, OSError, ValueError, RuntimeError)
"""Errors that can be made again from their message; a subclass stands before its base class."""


def _repeatable(error: BaseException) -> int:
    return next((i for i, kind in enumerate(_REPEATABLE) if isinstance(error, kind)), len(_REPEATABLE) - 1)
