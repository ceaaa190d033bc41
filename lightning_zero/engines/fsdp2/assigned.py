"""``p.grad = x``: a gradient that user code puts in place of the engine's.

Under DDP the gradient is then ``x`` itself: it may be this rank's own until user code has reduced it over the ranks.
Here, too, it stays whole until the engine looks at gradients, to step or to clip; each rank then keeps its rows of it.
A backward that adds to it is averaged with it. Of what is assigned at most :data:`KEPT_BYTES` and the latest stay
whole; rows of the others are kept at once.

While gradients are accumulated, ``x`` takes the place of this rank's own, which the next reduction averages.

``p.grad`` that is read is a plain tensor, of which the rows of all ranks are gathered when it is touched (see
:mod:`~lightning_zero.engines.residency`). It is the same one as long as the engine's gradient is.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.comm.shards import gathered, mesh_device, shard_like
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.refusals import refuse_gradients_in_backward, require_shape
from lightning_zero.engines.residency import Memories, Resharded, Residency, store_rows
from lightning_zero.private.torch import DisableTorchFunction, in_backward, users_of

KEPT_BYTES = 32 << 20
"""Of gradients that user code has assigned, on each rank."""

_MEANS = (
    "p.grad is read or assigned between the micro-batches of an accumulation: at stage {stage} it is reduced after each"
    " of them, so it is the mean over all ranks here, where DDP has this rank's own. Norms in a log differ by that, and"
    " so does the step if gradients are clipped or otherwise changed per micro-batch: do it in"
    " on_before_optimizer_step, or use stage=1."
)


class _Read:
    """The full tensor that stands for a gradient of the engine's, as long as that is there."""

    def __init__(self, grad: DTensor, full: Any) -> None:
        self.grad: DTensor | None = grad
        self.full = full

    @property
    def is_open(self) -> bool:
        return type(self.full) is Tensor

    @property
    def is_held(self) -> bool:
        """Whether user code has it."""
        return sys.getrefcount(self.full) > 2  # of this, and of the call


class AssignedGradients:
    """The user's side of the gradients, of one run.

    Args:
        is_accumulating: Whether the gradients of now will be reduced with those of a later backward.
        is_backward: Whether the engine's backward is under way.
    """

    residency: Residency
    """Opens what is touched."""

    def __init__(
        self,
        stage: int = 1,
        is_accumulating: Callable[[], bool] = lambda: False,
        is_backward: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stage, self._is_accumulating, self._is_backward = stage, is_accumulating, is_backward
        self._has_warned = False
        self._nbytes = 0  # of what is whole
        self._whole: dict[int, tuple[private.ShardedParam, Tensor]] = {}  # by id of the shard
        self._read: dict[int, _Read] = {}  # by id of the shard
        self._own_rows: Any = WeakIdKeyDictionary()  # a set: sharded gradients that came of whole ones

    # -- p.grad --------------------------------------------------------------------------------------------------

    def read(self, known: private.ShardedParam, key: int) -> Tensor | None:
        """``p.grad``, whose unit's gradients have this ``key``."""
        with DisableTorchFunction():
            grad = self.grad_of(known)
        if grad is None:
            return None
        self.noticed()
        return self._full_of(known, grad, key) if isinstance(grad, DTensor) else grad

    def write(self, known: private.ShardedParam, value: Tensor | None) -> None:
        """``p.grad = value``; ``None`` also for ``del p.grad``.

        Raises:
            ValueError: If it has another shape than ``p``.
        """
        read = self._read.get(id(known.sharded_param))
        if read is not None and value is read.full:
            return
        if value is not None:
            self.noticed()
        if read is not None and read.is_held:  # as it was when it went
            if not read.is_open and read.grad is known.sharded_param.grad:
                self.residency.touch([read.full])
            del self._read[id(known.sharded_param)]
            read.full.__class__ = Tensor
        elif read is not None:  # it would keep the gradient of this step beside that of the next
            read.grad = None
            _close(read)
        with DisableTorchFunction():
            self.assign(known, value)

    def end(self) -> None:
        """Of the run: what was read is a plain tensor, or an error where its values have gone."""
        for read in self._read.values():
            with DisableTorchFunction():
                is_there = read.full.untyped_storage().nbytes() or not read.full.numel()
                read.full.residency = None
            if is_there:
                read.full.__class__ = Tensor
        self._read.clear()

    def noticed(self) -> None:
        """User code reads or assigns a gradient."""
        if self._stage > 1 and not self._has_warned and self._is_accumulating():
            self._has_warned = True
            if dist.get_world_size() > 1 and dist.get_rank() == 0:
                warnings.warn(_MEANS.format(stage=self._stage), stacklevel=2)
        if self._is_backward() and not in_backward():
            refuse_gradients_in_backward()

    # -- gradients that are read ---------------------------------------------------------------------------------

    def _full_of(self, known: private.ShardedParam, grad: DTensor, key: int) -> Any:
        read = self._read.get(id(known.sharded_param))
        if read is None or read.grad is not grad:
            self.residency.close(key)  # without this one
        if read is not None and read.grad is not grad:
            if read.is_held:  # of before; it has the values that it had
                read.full.__class__ = Tensor
                read = None
            else:
                read.grad = grad
                _close(read)
        if read is None:
            with DisableTorchFunction():
                full: Any = torch.empty(grad.shape, dtype=grad.dtype, device=mesh_device(grad))
                full.untyped_storage().resize_(0)
            full.key, full.residency = key, self.residency
            full.__class__ = Resharded
            read = self._read[id(known.sharded_param)] = _Read(grad, full)
        return read.full

    def before_collective(self, tensors: Iterable[Any]) -> None:
        """User code is about to call a collective on ``tensors``.

        Raises:
            ValueError: If one is a gradient that was assigned, of which only this rank's rows are left.
        """
        given = {id(tensor) for tensor in tensors}
        reads = (read for read in self._read.values() if read.grad is not None)
        if any(id(read.full) in given and read.grad in self._own_rows for read in reads):
            raise ValueError(
                "a collective on p.grad, which was assigned and is sharded by now: each rank has kept its rows of what"
                " it had assigned. Reduce first, then assign: `torch.distributed.all_reduce(g)`, `p.grad = g`."
            )

    def sharded(self, group: private.Group) -> Iterator[tuple[private.ShardedParam, DTensor]]:
        """The parameters of ``group`` that have a gradient of the engine's, and that."""
        for p in group.fsdp_params:
            if isinstance(p.sharded_param.grad, DTensor):
                yield p, p.sharded_param.grad

    def open(self, group: private.Group, values: list[Tensor], key: int) -> None:
        """``values`` are those of :meth:`sharded`."""
        for (p, grad), value in zip(self.sharded(group), values, strict=True):
            full = self._full_of(p, grad, key)
            storage = full.untyped_storage()
            if not storage.nbytes():
                storage.resize_(full.numel() * full.element_size())
            full.__class__ = Tensor
            full.copy_(value)

    def close(self, group: private.Group, memories: Memories, key: int) -> None:
        """Each rank's rows become the engine's gradient."""
        for slot, (p, grad) in enumerate(self.sharded(group)):
            read = self._read.get(id(p.sharded_param))
            if read is None or read.grad is not grad or not read.is_open:
                continue
            store_rows(read.full, grad)
            if users_of(read.full.untyped_storage()) > 1:
                memories.keep(key, slot, read.full)
            _close(read)

    # -- gradients that are assigned -----------------------------------------------------------------------------

    def grad_of(self, known: private.ShardedParam) -> Tensor | None:
        """``p.grad``.

        Where a backward of the user's own inside a step has added to what was there, that takes part in the next
        reduction as well, as it is (collective).
        """
        whole = self.whole(known.sharded_param)
        if private.has_grad(known) and not self._is_backward():
            before = known.sharded_param.grad if whole is None else self._take(id(known.sharded_param))[1]
            if before is not None:
                known.sharded_param.grad = None
                with DisableTorchFunction():
                    private.add_whole_grad(known, gathered(before))
            whole = None
        return private.grad_of(known) if whole is None else whole

    def whole(self, shard: Any) -> Tensor | None:
        """The tensor that was assigned as the gradient of ``shard``, as long as it is whole."""
        found = self._whole.get(id(shard))
        return None if found is None else found[1]

    def assign(self, known: private.ShardedParam, value: Tensor | None) -> None:
        """As :meth:`write`."""
        if value is not None:
            require_shape("grad", known.sharded_param, value)
        if id(known.sharded_param) in self._whole:
            self._take(id(known.sharded_param))
        is_own = private.has_grad(known) or self._is_accumulating()
        private.drop_whole_grad(known)
        if value is None or isinstance(value, DTensor):
            known.sharded_param.grad = value
            return
        known.sharded_param.grad = None
        if is_own:
            private.set_whole_grad(known, value)
            return
        self._whole[id(known.sharded_param)] = known, value
        self._nbytes += value.nbytes
        while len(self._whole) > 1 and self._nbytes > KEPT_BYTES:
            self._settle_first()

    def join_backward(self) -> None:
        """A backward adds to what has been assigned: both are this rank's own until they are averaged together."""
        for key, (known, value) in list(self._whole.items()):
            if known.sharded_param.requires_grad:
                self._take(key)
                private.set_whole_grad(known, value)
        self.settle()

    def settle(self) -> None:
        """Each rank keeps its rows of what has been assigned."""
        while self._whole:
            self._settle_first()

    def _take(self, key: int) -> tuple[private.ShardedParam, Tensor]:
        known, value = self._whole.pop(key)
        self._nbytes -= value.nbytes
        return known, value

    def _settle_first(self) -> None:
        known, value = self._take(next(iter(self._whole)))
        with torch.no_grad(), DisableTorchFunction():
            known.sharded_param.grad = grad = shard_like(value, known.sharded_param)
            self._own_rows[grad] = True


def _close(read: _Read) -> None:
    """Gives the memory up that nobody else holds."""
    with DisableTorchFunction():
        storage = read.full.untyped_storage()
        if users_of(storage) == 1 and storage.resizable() and not read.is_held:
            storage.resize_(0)
    read.full.__class__ = Resharded
