"""Exchanges beside the engines' own: many tensors in one message, and small agreements.

All functions are collective over ``group`` and do nothing when it holds one rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_zero.comm import direct, tree
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.errors import CheckpointError

_Result = TypeVar("_Result")
BUCKET_BYTES = 64 * 2**20
"""Tensors are joined up to this size, so that the copies never take more than a small part of the memory."""


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[Tensor], src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Rank ``src``'s values of ``tensors`` (any dtypes and shapes, one device) become every rank's, in place."""
    if dist.get_world_size(group) == 1:
        return
    for bucket in _buckets([t for t in tensors if t.numel()]):
        if len(bucket) == 1 and bucket[0].is_contiguous():  # it may be a large one, of which no copies are needed
            dist.broadcast(bucket[0].detach().view(-1).view(torch.uint8), src, group=group)
            if dist.get_rank(group) != src and not bucket[0].is_inference():
                increment_version(bucket[0])
            continue
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


class Channel:
    """The gloo group of everything that ranks agree upon, so that none of it meets an engine's messages. Its
    constructor is collective.

    One for all: connections lie along a tree, few per rank (:mod:`~lightning_zero.comm.tree`). What may be under way at
    the same time differs in its tag, threads included. Collectives of gloo's own have no place here: they count calls,
    and some connect rank 0 to all.

    Attributes:
        lost: A call on this rank has failed, or was left in the middle: gloo's connections do not recover.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.lost = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Messages are under way inside."""
        try:
            yield
        except BaseException:
            self.lost = True
            raise


class Agreement:
    """Agreements of all ranks on a :class:`Channel`.

    The constructor is collective, and so is each method; on one rank :meth:`gather`, :meth:`raise_if_any_failed` and
    :meth:`decide` return at once.

    Args:
        timeout_seconds: How long a call waits for the other ranks before it raises.
        alone: This process agrees with itself, even inside a process group.
        channel: One that there is already; ``None`` makes one.
        run: Counts the runs that use the channel: what an earlier one has left under way is never met again.
        kind: Of messages, one of those below :data:`KINDS`; agreements that may be under way together differ in it.
    """

    def __init__(
        self,
        timeout_seconds: float = 1800.0,
        alone: bool = False,
        channel: Channel | None = None,
        run: int = 0,
        kind: int = 0,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        several = not alone and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self.channel = (channel or Channel(timeout_seconds)) if several else None
        self.run, self._kind = run, kind
        self._latest: dict[int, dist.Work] = {}  # by kind
        # Connects now: a rank that later makes a call alone would first wait for the connection, and fail late
        self.gather(None, "the strategy's set-up")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The channel's; ``None`` on one rank."""
        return None if self.channel is None else self.channel.group

    def beside(self, kind: int) -> Agreement:
        """Another one on the same channel, for another thread."""
        if self.channel is None:
            return Agreement(self.timeout_seconds, alone=True)
        return Agreement(self.timeout_seconds, channel=self.channel, run=self.run, kind=kind)

    def gather(
        self, value: Any, call: str = "a checkpoint's agreement", error: BaseException | None = None
    ) -> list[Any]:
        """Every rank's ``value`` (picklable, small), by rank.

        Raises:
            BaseException: On every rank if any rank has an ``error``; on that rank its own, on the others the closest
                of :data:`_REPEATABLE`, with the message of the first rank that has one.
            RuntimeError: When a rank does not make the call within ``timeout_seconds``, naming ``call``; on every rank
                when another rank makes a different call.
        """
        everyones = [(call, None, value)]
        if self.channel is not None:
            # A number and a text, not the exception: one that cannot be pickled would fail on its own rank alone.
            failure = None if error is None else (_repeatable(error), str(error))
            content = pickle.dumps((call, failure, value))  # an error here is the caller's
            try:
                with self._calling(call):
                    gathered = tree.gather(content, self.channel.group, self._tag(self._kind), self.timeout_seconds)
            except RuntimeError as lost:
                raise (error or lost) from lost
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
        """An error on one rank inside is an error on all, as in :meth:`gather`."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        self.gather(None, error=error)

    def decide(self, make: Callable[[], Any], decide: Callable[[list[Any]], list[Any]], call: str) -> Any:
        """This rank's part of what ``decide`` says on rank 0, given what ``make`` has made on every rank; both lists
        are by rank, and of anything picklable. Large ones are held by rank 0 alone.

        Raises:
            Exception: What ``make`` or ``decide`` has raised on any rank, as :meth:`gather`.
        """
        errors: list[Exception] = []

        def tried(function: Callable[[], _Result], otherwise: _Result) -> _Result:
            try:
                return function()
            except Exception as error:  # raised below, on all ranks, which expect messages until then
                errors.append(error)
                return otherwise

        def decided(values: list[bytes]) -> list[bytes]:
            nothing = [b""] * len(values)
            if not all(values):
                return nothing
            return tried(lambda: [pickle.dumps(part) for part in decide([pickle.loads(v) for v in values])], nothing)

        value = tried(lambda: pickle.dumps(make()), b"")
        if self.channel is None:
            (part,) = decided([value])
        else:
            with self._calling(call):
                part = tree.deal(value, decided, self.channel.group, self._tag(self._kind), self.timeout_seconds)
        self.gather(None, call, errors[0] if errors else None)
        return pickle.loads(part)

    def all_reduce(self, message: Tensor, op: Any, kind: int, peer_memory: PeerMemory | None = None) -> dist.Work:
        """``message`` (a few numbers, in host memory) becomes its sum or maximum over the ranks, as ``op`` says, when
        this has been waited for; the calls of its kind that began before are then complete, too."""
        assert self.channel is not None
        with self.channel.in_use():
            work = direct.all_reduce(message, op, self.channel.group, peer_memory, self._tag(kind))
        self._latest[kind] = direct.Begun(self._heard(self._latest.get(kind), work))
        return self._latest[kind]

    def _heard(self, before: dist.Work | None, work: dist.Work) -> Iterator[None]:
        assert self.channel is not None
        with self.channel.in_use():
            if before is not None:  # a rank passes messages on while it waits: in one order on all of them
                before.wait()
            work.wait()
        yield

    def _tag(self, kind: int) -> int:
        """Of this run's messages of ``kind``."""
        return tree.FIRST_TAG + KINDS + self.run * KINDS + kind

    @contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        """Messages of ``call``, which all ranks make."""
        assert self.channel is not None
        try:
            if self.channel.lost:
                raise RuntimeError("an earlier call has failed")
            with self.channel.in_use():
                yield
        except Exception as error:  # gloo raises RuntimeError, or a DistBackendError where the peer is gone
            raise RuntimeError(
                f"{call} on rank {self.rank}: not all ranks made this call within timeout_seconds="
                f"{self.timeout_seconds:g} ({error}). It is collective: make it on every rank,"
                " outside of `if trainer.is_global_zero` and @rank_zero_only."
            ) from error


KINDS = 8
"""Tags of a run: what may be under way at the same time."""
OF_RUN, IN_STEP, STEP_SYNC, IN_BACKGROUND, READS = range(5)
"""The main thread's agreements; the engine's; the step sync's, which travel ahead; those of a save in the background;
meetings (see :mod:`~lightning_zero.comm.meeting`).
"""


class _Shared:
    """The agreements of a default process group, by their ``timeout_seconds``, and how often they were asked for."""

    def __init__(self) -> None:
        self.agreements: dict[float, Agreement] = {}
        self.asked = 0


_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()


def shared_agreement(timeout_seconds: float) -> Agreement:
    """The agreement of a run that begins in this default process group. Collective.

    All runs with this ``timeout_seconds`` share one channel: a group holds three threads and its sockets until the
    process group ends, and a strategy must not close its own at the end of its run, because a trainer saves after
    ``fit`` as well. It is replaced when a call on it has failed on any rank: ranks that were elsewhere then, in an
    error of their own perhaps, do not know, so all of them ask each other at the store. Never does garbage collection
    decide. Only for the main thread, on which all ranks make the same calls.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Agreement(timeout_seconds)
    world = dist.group.WORLD
    assert world is not None
    shared = _shared.setdefault(world, _Shared())
    shared.asked += 1
    before = shared.agreements.get(timeout_seconds)
    channel = before.channel if before is not None else None
    # Those of other time limits are as they are: each has a channel of its own
    if channel is not None and channel.lost:
        tree.forget_missing()
    if channel is not None and _any_lost(world, channel.lost, shared.asked, timeout_seconds):
        channel = None
    made = Agreement(timeout_seconds, channel=channel or Channel(timeout_seconds), run=shared.asked)
    shared.agreements[timeout_seconds] = made
    return made


def forget_shared() -> None:
    """The process group has ended: the channels that its runs shared end with it, their threads and sockets too."""
    _shared.clear()


def _any_lost(world: dist.ProcessGroup, lost: bool, asked: int, timeout_seconds: float) -> bool:
    """Whether ``lost`` holds on any rank (collective): a few words with the store of the process group, each rank's,
    because the channel itself cannot be asked.

    Raises:
        RuntimeError: When a rank does not come within ``timeout_seconds``.
    """
    store, name = world.get_group_store(), f"lightning_zero/channel_{asked}"
    if lost:
        store.add(f"{name}/lost", 1)
    if store.add(f"{name}/here", 1) == dist.get_world_size():
        store.set(f"{name}/all", "lost" if store.add(f"{name}/lost", 0) else "all well")
    try:
        store.wait([f"{name}/all"], timedelta(seconds=timeout_seconds))
    except Exception as error:  # DistStoreError
        raise RuntimeError(
            f"the strategy's set-up on rank {dist.get_rank()}: not all ranks made this call within timeout_seconds="
            f"{timeout_seconds:g}, or one has ended: begin each run on every rank."
        ) from error
    return bool(store.get(f"{name}/all") == b"lost")


_of_run: list[Agreement] = []


def set_run_agreement(agreement: Agreement | None) -> None:
    """Sets the answer of :func:`run_agreement`."""
    _of_run[:] = [] if agreement is None else [agreement]


def run_agreement() -> Agreement | None:
    """The agreement of the run that is in progress, for functions that users call without naming its strategy."""
    return _of_run[0] if _of_run else None


_REPEATABLE = (CheckpointError, FileNotFoundError, OSError, ValueError, RuntimeError)
"""Errors that can be made again from their message; a subclass stands before its base class."""


def _repeatable(error: BaseException) -> int:
    return next((i for i, kind in enumerate(_REPEATABLE) if isinstance(error, kind)), len(_REPEATABLE) - 1)
