"""``p.grad = x``: user code replaces the engine's gradient with its own.

Under DDP the gradient is then ``x`` itself, which may be local to this rank until user code reduces it over the ranks.
Here, too, ``x`` stays unsharded until the engine reads gradients, to step or to clip; then each rank keeps its rows of
``x``. If a backward adds to ``x``, the sum is averaged. At most :data:`KEPT_BYTES` of assigned gradients stay
unsharded, and always the latest; older ones are sharded at once.

While gradients are accumulated, ``x`` replaces this rank's local gradient, which the next reduction averages.

Reading ``p.grad`` returns a plain tensor; the rows of all ranks are gathered when user code touches the tensor (see
:mod:`~lightning_zero.engines.residency`). The same tensor is returned as long as the engine's gradient is the same.
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
from lightning_zero.engines.residency import Resharded, Residency, store_rows
from lightning_zero.private.torch import DisableTorchFunction, in_backward, users_of

KEPT_BYTES = 32 << 20
"""Limit per rank for assigned gradients that stay unsharded."""

_MEANS = (
    "p.grad is read or assigned between the micro-batches of an accumulation: at stage {stage} it is reduced after each"
    " micro-batch, so p.grad is the mean over all ranks, whereas DDP has this rank's local gradient. Logged norms"
    " differ from DDP's, and so does the step if gradients are clipped or changed per micro-batch: do this in"
    " on_before_optimizer_step, or use stage=1."
)


class _Read:
    """The full tensor that user code gets for a sharded gradient, while that gradient exists."""

    def __init__(self, grad: DTensor, key: int, residency: Residency) -> None:
        self.grad: DTensor | None = grad
        self._key, self._residency = key, residency
        with DisableTorchFunction():
            self.full: Any = torch.empty(grad.shape, dtype=grad.dtype, device=mesh_device(grad))
        self.close()

    @property
    def is_open(self) -> bool:
        return type(self.full) is Tensor

    def close(self) -> None:
        """Free the memory of the full tensor unless somebody else holds it."""
        frees = not self.is_held  # on a line of its own: an argument `self.full` would count as a reference
        Resharded.close(self.full, self._key, self._residency, frees)

    def keep(self) -> None:
        """Leave the full tensor to user code, with its present values."""
        if not self.is_open:
            self.full.become_plain()

    @property
    def is_held(self) -> bool:
        """Whether user code holds a reference to the full tensor."""
        return sys.getrefcount(self.full) > 2  # one is self.full, one the argument of getrefcount


class AssignedGradients:
    """Gradients as user code reads and assigns them, for one run.

    Args:
        is_accumulating: Whether the current gradients will be reduced with those of a later backward.
        is_backward: Whether the engine's backward is running.
    """

    residency: Residency
    """Gathers the gradients that user code touches."""

    def __init__(
        self,
        stage: int = 1,
        is_accumulating: Callable[[], bool] = lambda: False,
        is_backward: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stage, self._is_accumulating, self._is_backward = stage, is_accumulating, is_backward
        self._has_warned = False
        self._nbytes = 0  # total of self._whole
        self._full: dict[int, tuple[private.ShardedParam, Tensor]] = {}  # by id of the shard
        self._read: dict[int, _Read] = {}  # by id of the shard
        self._own_rows: Any = WeakIdKeyDictionary()  # used as a set: sharded gradients cut from assigned ones

    # -- p.grad --------------------------------------------------------------------------------------------------

    def read(self, known: private.ShardedParam, key: int) -> Tensor | None:
        """Return ``p.grad``; ``key`` is that of the gradients of the parameter's unit."""
        with DisableTorchFunction():
            grad = self.grad_of(known)
        if grad is None:
            return None
        self.noticed()
        return self._full_of(known, grad, key) if isinstance(grad, DTensor) else grad

    def write(self, known: private.ShardedParam, value: Tensor | None) -> None:
        """Perform ``p.grad = value``; ``None`` also stands for ``del p.grad``.

        Raises:
            ValueError: If the shapes of ``value`` and ``p`` differ.
        """
        read = self._read.get(id(known.sharded_param))
        if read is not None and value is read.full:
            return
        if value is not None:
            self.noticed()
        if read is not None and read.is_held:  # user code keeps the old gradient and its values
            if not read.is_open and read.grad is known.sharded_param.grad:
                self.residency.touch([read.full])
            del self._read[id(known.sharded_param)]
            read.keep()
        elif read is not None:  # free this step's gradient before the next step's exists
            read.grad = None
            read.close()
        with DisableTorchFunction():
            self.assign(known, value)

    def end(self) -> None:
        """End the run: tensors that were read become plain; touching one whose values are freed raises."""
        for read in self._read.values():
            with DisableTorchFunction():
                is_there = read.full.untyped_storage().nbytes() or not read.full.numel()
            if is_there:
                read.keep()
            else:
                read.full.residency = None
        self._read.clear()

    def noticed(self) -> None:
        """Warn or raise where user code reads or assigns a gradient that differs from DDP's."""
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
            self.residency.close(key)  # this gradient is not in the open window
        if read is not None and read.grad is not grad:
            if read.is_held:  # belongs to the previous gradient and keeps its values
                read.keep()
                read = None
            else:
                read.grad = grad
                read.close()
        if read is None:
            read = self._read[id(known.sharded_param)] = _Read(grad, key, self.residency)
        return read.full

    def before_collective(self, tensors: Iterable[Any]) -> None:
        """Check ``tensors``, on which user code is about to call a collective.

        Raises:
            ValueError: If one is an assigned gradient of which this rank has kept only its own rows.
        """
        given = {id(tensor) for tensor in tensors}
        reads = (read for read in self._read.values() if read.grad is not None)
        if any(id(read.full) in given and read.grad in self._own_rows for read in reads):
            raise ValueError(
                "a collective was called on an assigned p.grad that is already sharded: each rank has kept only its"
                " rows of the tensor that it assigned. Reduce first, then assign:"
                " `torch.distributed.all_reduce(g)`, `p.grad = g`."
            )

    def sharded(self, group: private.Group) -> Iterator[tuple[private.ShardedParam, DTensor]]:
        """Yield each parameter of ``group`` that has a sharded gradient, with that gradient."""
        for p in group.fsdp_params:
            if isinstance(p.sharded_param.grad, DTensor):
                yield p, p.sharded_param.grad

    def open(self, group: private.Group, values: list[Tensor], key: int) -> None:
        """Fill the full gradients of ``group``; ``values`` are in the order of :meth:`sharded`."""
        for (p, grad), value in zip(self.sharded(group), values, strict=True):
            self._full_of(p, grad, key).open(value)

    def close(self, group: private.Group) -> None:
        """Store each rank's rows of the full gradients in the sharded ones, and free the full ones."""
        for read in self._open_reads(group):
            assert read.grad is not None
            store_rows(read.full, read.grad)
            read.close()

    def are_held(self, group: private.Group) -> bool:
        """Whether user code holds a full gradient of ``group``, or a view of one."""
        return any(read.is_held or users_of(read.full.untyped_storage()) > 1 for read in self._open_reads(group))

    def _open_reads(self, group: private.Group) -> list[_Read]:
        found = ((grad, self._read.get(id(p.sharded_param))) for p, grad in self.sharded(group))
        return [read for grad, read in found if read is not None and read.grad is grad and read.is_open]

    # -- gradients that are assigned -----------------------------------------------------------------------------

    def grad_of(self, known: private.ShardedParam) -> Tensor | None:
        """Return the current gradient: assigned, sharded or this rank's unreduced one.

        If a backward called by user code inside a step has added to an existing gradient, the existing one is gathered
        and joins the next reduction (collective).
        """
        _, full = self._full.get(id(known.sharded_param), (None, None))
        if private.has_grad(known) and not self._is_backward():
            before = known.sharded_param.grad if full is None else self._take(id(known.sharded_param))[1]
            if before is not None:
                known.sharded_param.grad = None
                with DisableTorchFunction():
                    private.add_full_grad(known, gathered(before))
            full = None
        return private.grad_of(known) if full is None else full

    def assign(self, known: private.ShardedParam, value: Tensor | None) -> None:
        """Set the gradient as :meth:`write` does, without the checks for a tensor that was read."""
        if value is not None:
            require_shape("grad", known.sharded_param, value)
        if id(known.sharded_param) in self._full:
            self._take(id(known.sharded_param))
        is_own = private.has_grad(known) or self._is_accumulating()
        private.drop_full_grad(known)
        if value is None or isinstance(value, DTensor):
            known.sharded_param.grad = value
            return
        known.sharded_param.grad = None
        if is_own:
            private.set_full_grad(known, value)
            return
        self._full[id(known.sharded_param)] = known, value
        self._nbytes += value.nbytes
        while len(self._full) > 1 and self._nbytes > KEPT_BYTES:
            self._settle_first()

    def join_backward(self) -> None:
        """Let the next backward add to assigned gradients; sums stay local to this rank until reduced."""
        for key, (known, value) in list(self._full.items()):
            if known.sharded_param.requires_grad:
                self._take(key)
                private.set_full_grad(known, value)
        self.settle()

    def settle(self) -> None:
        """Shard all assigned gradients: each rank keeps its rows."""
        while self._full:
            self._settle_first()

    def _take(self, key: int) -> tuple[private.ShardedParam, Tensor]:
        known, value = self._full.pop(key)
        self._nbytes -= value.nbytes
        return known, value

    def _settle_first(self) -> None:
        known, value = self._take(next(iter(self._full)))
        with torch.no_grad(), DisableTorchFunction():
            known.sharded_param.grad = grad = shard_like(value, known.sharded_param)
            self._own_rows[grad] = True
