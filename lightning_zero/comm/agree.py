"""Collectives outside the engines' own traffic: coalesced tensors, and small agreements of all ranks.

Every function is collective over ``group`` and does nothing if the group has one rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_zero.comm import direct, tree
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.errors import CheckpointError

BUCKET_BYTES = 64 * 2**20
"""Tensors are coalesced up to this size, so that the copies take only a small part of the memory."""


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[Tensor], src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copies rank ``src``'s values of ``tensors`` to every rank, in place; any dtypes and shapes, one device."""
    if dist.get_world_size(group) == 1:
        return
    sends = dist.get_rank(group) == src
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():  # sent in place: a large tensor must not be copied
            dist.broadcast(_as_bytes(bucket[0]), src, group=group)
            if not sends and not bucket[0].is_inference():
                increment_version(bucket[0])  # a collective does not: autograd would miss this write
            continue
        flat = _flat(bucket) if sends else bucket[0].new_empty(sum(t.numel() for t in bucket))
        dist.broadcast(_as_bytes(flat), src, group=group)
        if not sends:
            _copy_from(flat, bucket)


@torch.no_grad()
def all_reduce_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Averages ``tensors`` over the ranks, in place."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return
    for bucket in _buckets(tensors):
        flat = _flat(bucket)
        flat.div_(world_size)  # before the sum, as in DDP: in float16 the sum could overflow
        dist.all_reduce(flat, group=group)
        _copy_from(flat, bucket)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the tensors that have elements, in lists of one dtype and at most :data:`BUCKET_BYTES`."""
    for dtype in {t.dtype: None for t in tensors}:
        bucket: list[Tensor] = []
        size = 0
        for tensor in (t.detach() for t in tensors if t.dtype == dtype and t.numel()):
            if bucket and size + _nbytes(tensor) > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += _nbytes(tensor)
        if bucket:
            yield bucket


def _flat(bucket: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in bucket])


def _copy_from(flat: Tensor, bucket: list[Tensor]) -> None:
    """Copies the parts of ``flat`` into the tensors of ``bucket``, on an accelerator in a few kernels for all."""
    parts = flat.split([t.numel() for t in bucket])
    torch._foreach_copy_(bucket, [part.view(t.shape) for t, part in zip(bucket, parts, strict=True)])


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor as bytes: gloo lacks some dtypes."""
    return tensor.view(-1).view(torch.uint8)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Agreement:
    """Agreements of all ranks over one gloo group, the channel, which carries none of the engines' messages.

    The constructor and every method are collective. With one rank :meth:`gather` and :meth:`raise_if_any_failed` return
    at once.

    All agreements share the channel: its connections follow a tree, so each rank has few
    (:mod:`~lightning_zero.comm.tree`). Messages that may be in flight at the same time, on one thread or on several,
    differ in their tags. Do not run gloo's own collectives on this group: they match calls by counting them, and some
    connect rank 0 to every rank. After a call that has failed every further one fails: gloo closes the connection.

    Args:
        timeout_seconds: How long a call waits for the other ranks before it raises.
        alone: Agree with this process only, even inside a process group.
        group: The channel to use; ``None`` makes one.
        kind: Kind of the messages, below. Agreements that may be in flight together need different kinds.

    Attributes:
        group: The channel's process group; ``None`` with one rank.
    """

    def __init__(
        self,
        timeout_seconds: float = 1800.0,
        alone: bool = False,
        group: dist.ProcessGroup | None = None,
        kind: int = 0,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        several = not alone and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self.group = (group or _channel(timeout_seconds)) if several else None
        self._kind = kind
        self._latest: dict[int, dist.Work] = {}  # by kind
        # Connect now: a rank that later makes a call alone would wait for its connection first, and fail late.
        self.gather(None, "the strategy's set-up")

    def with_kind(self, kind: int) -> Agreement:
        """An agreement of another ``kind`` on the same channel, for another thread."""
        if self.group is None:
            return Agreement(self.timeout_seconds, alone=True)
        return Agreement(self.timeout_seconds, group=self.group, kind=kind)

    def gather(
        self, value: Any, call: str = "a checkpoint's agreement", error: BaseException | None = None
    ) -> list[Any]:
        """Returns every rank's ``value`` (picklable, small), by rank.

        Raises:
            BaseException: On every rank if any rank passes an ``error``. That rank raises its own; the others raise the
                closest of :data:`_REPEATABLE`, with the message of the first rank that failed.
            RuntimeError: If a rank does not make the call within ``timeout_seconds``, naming ``call``; on every rank if
                ranks make different calls.
        """
        everyones = [(call, None, value)]
        if self.group is not None:
            # Send a number and a text, not the exception: if it could not be pickled, its rank alone would fail here.
            failure = None if error is None else (_repeatable(error), str(error))
            content = pickle.dumps((call, failure, value))  # outside the try: an error here is the caller's
            try:
                gathered = tree.gather(content, self.group, _tag(self._kind), timedelta(seconds=self.timeout_seconds))
            except Exception as lost:  # gloo raises RuntimeError, or DistBackendError if the peer has ended
                raise (error or self._not_made_by_all(call, lost)) from lost
            everyones = [pickle.loads(each) for each in gathered]
        if error is not None:
            raise error
        for rank, (_, failure, _) in enumerate(everyones):
            if failure is not None:
                raise _REPEATABLE[failure[0]](f"on rank {rank}: {failure[1]}")
        if len({name for name, _, _ in everyones}) > 1:
            found = "; ".join(f"rank {rank}: {name}" for rank, (name, _, _) in enumerate(everyones))
            raise RuntimeError(f"ranks make different collective calls ({found}): make the same one on every rank.")
        return [each for _, _, each in everyones]

    @contextmanager
    def raise_if_any_failed(self) -> Iterator[None]:
        """Raises on every rank if the block raises on any, as :meth:`gather` does."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        self.gather(None, error=error)

    def all_reduce(self, message: Tensor, op: Any, kind: int, peer_memory: PeerMemory | None = None) -> dist.Work:
        """Reduces ``message`` (a few numbers in host memory) over the ranks in place; ``op`` is a sum or a maximum.

        The result is there after the returned work was waited for. Earlier calls of the same ``kind`` are then
        complete as well.
        """
        assert self.group is not None
        rest = tree.all_reduce(message, op, self.group, _tag(kind), peer_memory)
        next(rest)
        self._latest[kind] = direct.Begun(self._completed(self._latest.get(kind), rest))
        return self._latest[kind]

    def _completed(self, before: dist.Work | None, rest: Iterator[None]) -> Iterator[None]:
        if before is not None:  # a rank forwards messages while it waits, so all ranks must wait in the same order
            before.wait()
        yield from rest

    def _not_made_by_all(self, call: str, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"{call} on rank {self.rank}: not all ranks made this call within timeout_seconds="
            f"{self.timeout_seconds:g} ({error}). It is collective: make it on every rank,"
            " outside of `if trainer.is_global_zero` and @rank_zero_only."
        )


def _channel(timeout_seconds: float) -> dist.ProcessGroup:
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    return group


OF_RUN, IN_STEP, STEP_SYNC, IN_BACKGROUND, READS = range(5)
"""Kinds of messages: agreements of the main thread; the engine's; the step sync's, which are sent ahead; those of a
save in the background; barriers (:mod:`~lightning_zero.comm.barrier`) and reads after a run."""


def _tag(kind: int) -> int:
    return tree.FIRST_TAG + 1 + kind


_shared: WeakKeyDictionary[dist.ProcessGroup, dict[float, Agreement]] = WeakKeyDictionary()
"""Default process group -> ``timeout_seconds`` -> agreement."""


def shared_agreement(timeout_seconds: float) -> Agreement:
    """Returns the agreement of all runs in this default process group (collective, main thread only).

    A gloo group holds three threads and its sockets until the process group ends, and a strategy cannot close its own
    at the end of a run, because a trainer saves after ``fit`` as well.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Agreement(timeout_seconds)
    world = dist.group.WORLD
    assert world is not None
    shared = _shared.setdefault(world, {})
    if timeout_seconds not in shared:
        shared[timeout_seconds] = Agreement(timeout_seconds)
    return shared[timeout_seconds]


def forget_shared() -> None:
    """Forgets all shared channels. Call it when the process group has ended: their threads and sockets end with it."""
    _shared.clear()


_of_run: list[Agreement] = []


def set_run_agreement(agreement: Agreement | None) -> None:
    """Sets the agreement that :func:`run_agreement` returns."""
    _of_run[:] = [] if agreement is None else [agreement]


def run_agreement() -> Agreement | None:
    """The agreement of the current run, for functions that users call without passing its strategy."""
    return _of_run[0] if _of_run else None


_REPEATABLE = (CheckpointError, FileNotFoundError, OSError, ValueError, RuntimeError)
"""Errors that can be raised again from their message alone. A subclass must come before its base class."""


def _repeatable(error: BaseException) -> int:
    return next((i for i, kind in enumerate(_REPEATABLE) if isinstance(error, kind)), len(_REPEATABLE) - 1)
