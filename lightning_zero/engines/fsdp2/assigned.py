"""``p.grad = x``: a gradient that user code puts in place of the engine's.

Under DDP the gradient is then ``x`` itself: it may be this rank's own until user code has reduced it over the ranks.
Here, too, it stays whole until the engine looks at gradients, to step or to clip; each rank then keeps its rows of it.
A backward that adds to it is averaged with it. Of what is assigned at most
:data:`~lightning_zero.comm.reads.KEPT_BYTES` and the latest stay whole; rows of the others are kept at once, and a
collective of user code on such a gradient raises.

While gradients are accumulated, ``x`` takes the place of this rank's own, which the next reduction averages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.comm.reads import KEPT_BYTES
from lightning_zero.comm.shards import gathered, shard_like
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.refusals import refuse_gradients_in_backward
from lightning_zero.private.torch import DisableTorchFunction, in_backward

_MEANS = (
    "p.grad is read or assigned between the micro-batches of an accumulation: at stage {stage} it is reduced after each"
    " of them, so it is the mean over all ranks here, where DDP has this rank's own. Norms in a log differ by that, and"
    " so does the step if gradients are clipped or otherwise changed per micro-batch: do it in"
    " on_before_optimizer_step, or use stage=1."
)


class AssignedGradients:
    """Of one run.

    Args:
        is_accumulating: Whether the gradients of now will be reduced with those of a later backward.
        is_backward: Whether the engine's backward is under way.
        given: Called with a gradient that user code reads or assigns, and its shard.
    """

    def __init__(
        self,
        stage: int = 1,
        is_accumulating: Callable[[], bool] = lambda: False,
        is_backward: Callable[[], bool] = lambda: False,
        given: Callable[[Tensor, DTensor], None] = lambda grad, shard: None,
    ) -> None:
        self._stage, self._is_accumulating, self._is_backward, self._given = stage, is_accumulating, is_backward, given
        self._has_warned = False
        self._nbytes = 0  # of what is whole
        self._whole: dict[int, tuple[private.ShardedParam, Tensor]] = {}  # by id of the shard
        self._own_rows: Any = WeakIdKeyDictionary()  # a set: sharded gradients that came of whole ones

    def noticed(self, shard: DTensor, grad: Tensor) -> None:
        """User code reads or assigns ``p.grad``.

        Raises:
            ValueError: In ``LightningModule.backward``, which may be overridden: gradients are complete only after it.
        """
        self._given(grad, shard)
        if self._stage > 1 and not self._has_warned and self._is_accumulating():
            self._has_warned = True
            if dist.get_world_size() > 1 and dist.get_rank() == 0:
                warnings.warn(_MEANS.format(stage=self._stage), stacklevel=2)
        if self._is_backward() and not in_backward():
            refuse_gradients_in_backward()

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
        """``p.grad = value``; ``None`` also for ``del p.grad``.

        Raises:
            ValueError: If it has another shape than ``p``.
        """
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
            grad = shard_like(value, known.sharded_param)
            known.sharded_param.grad = grad
            self._own_rows[grad] = True

    def require_whole(self, grads: list[DTensor]) -> None:
        """Before a collective of user code on ``grads``, or on parameters.

        Raises:
            ValueError: If one was assigned, and only this rank's rows of it are left.
        """
        if any(grad in self._own_rows for grad in grads):
            raise ValueError(
                "a collective on p.grad, which was assigned and is sharded by now: each rank has kept its rows of what"
                " it had assigned. Reduce first, then assign: `torch.distributed.all_reduce(g)`, `p.grad = g`."
            )


def require_shape(attribute: str, target: Tensor, value: Tensor) -> None:
    """Raises ``ValueError`` if ``value`` cannot take the place of ``target.<attribute>``."""
    if value.shape != target.shape:
        raise ValueError(
            f"assigning a tensor of shape {tuple(value.shape)} to .{attribute} of a sharded parameter of shape"
            f" {tuple(target.shape)}: shapes must agree during a run; change the module before the run starts."
        )
