"""Reads and writes of user code while DeepSpeed holds the parameters: the engine's side of the view."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.agree import all_reduce_mean
from lightning_zero.comm.reads import WRITE, Changes
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.optimizer_step import parameters
from lightning_zero.engines.deepspeed.order import Order
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay
from lightning_zero.engines.deepspeed.rows import GRADIENT
from lightning_zero.engines.reads import Reader
from lightning_zero.private.torch import DisableTorchFunction, in_backward

_NONE = (
    "p.grad is None between the micro-batches of an accumulation: DeepSpeed keeps gradients for itself until the last"
    " one. Look at them in on_before_optimizer_step, or use engine='fsdp2'."
)
_NOT_YET = (
    "p.grad is assigned between the micro-batches of an accumulation, when DeepSpeed keeps gradients for itself: do it"
    " in on_before_optimizer_step, or use engine='fsdp2'."
)
_OUTSIDE = (
    "loss.backward() outside of training_step: at stages 2 and 3 DeepSpeed takes gradients for the step as they come."
    " Do it in training_step, or use engine='fsdp2' (or stage=1)."
)


class Access:
    """The :class:`~lightning_zero.engines.deepspeed.view.Holder` of a run.

    Two accounts are kept, because user code writes to whole tensors and steps happen on pieces: parameters that were
    written to, whose masters are behind until :meth:`adopt`; and whole gradients that were handed out, whose pieces are
    behind until :meth:`flush_grads`. Nothing may read a master or a piece of a gradient before its account is settled
    (:meth:`settle` does both). Ranks must read and write the same ones: gathering for it is collective.

    Args:
        params: All of the module's.
        under_way: The engine's current activities.
        order: Told before a parameter is gathered.
        backward: The engine's own, for a backward that user code starts inside a step.
        changes: Told of writes.
        reader: Asked before parameters are gathered between steps.
        is_accumulating: Whether gradients of a backward wait for those of a later one.
    """

    def __init__(
        self,
        params: Parameters,
        under_way: UnderWay,
        order: Order,
        backward: Callable[[Callable[[], None]], None],
        changes: Changes,
        reader: Reader,
        is_accumulating: Callable[[], bool],
    ) -> None:
        self._is_accumulating, self._has_warned = is_accumulating, False
        self._changes, self._reader = changes, reader
        self._params, self._under_way, self._order, self._backward = params, under_way, order, backward
        self._held, self._stage3 = params.held, params.stage3  # asked for at each call of a tensor's
        self._seen: dict[Tensor, tuple[Tensor, bool]] = {}  # whole gradients, and whether user code has assigned them
        self._dirty: dict[Tensor, None] = {}  # in order, because ranks gather in it

    # -- states --------------------------------------------------------------------------------------------------

    def holds(self, p: Any) -> bool:
        return p in self._held

    def is_away(self, p: Any) -> bool:
        return self._stage3 and private.is_partitioned(p)

    def is_lost_soon(self, p: Any) -> bool:
        """Whether a use in a step has to :meth:`fetch` it: no module that runs has it for its own backward."""
        return self._stage3 and (private.is_partitioned(p) or private.is_ahead(p))

    def num_changes(self) -> int:
        """Of parameters that may be away."""
        return self._changes.done if self._stage3 else 0

    def in_step(self) -> bool:
        return Phase.STEP in self._under_way

    def in_users_backward(self) -> bool:
        """Whether ``LightningModule.backward`` runs outside of autograd."""
        return Phase.BACKWARD in self._under_way and not in_backward()

    def busy(self) -> bool:
        return Phase.BACKWARD in self._under_way or Phase.WHOLE in self._under_way

    def refuse_outside_step(self) -> None:
        """Raises ``ValueError`` for a gradient that no step of ours has asked for."""
        if not self.busy():
            raise ValueError(_OUTSIDE)

    # -- parameters ----------------------------------------------------------------------------------------------

    def fetch(self, p: Any) -> None:
        with DisableTorchFunction(), torch.no_grad():
            if self._order.is_followed:
                self._order.require_same(p)
            private.fetch(p)

    def fetch_given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before DeepSpeed's of ``module``, in a step: parameters among its arguments belong to the caller, who
        has them whole in its backward until their gradients are there; ``module`` would release them before."""
        if self.in_step() and not self.busy():
            for value in (*args, *kwargs.values()):
                for p in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(p, nn.Parameter) and self.holds(p) and self.is_lost_soon(p):
                        self.fetch(p)

    def keep_all(self) -> None:
        """A backward of the user's own begins inside the step: another one passes through the same parameters, or
        through those that it read beside, in no module's order."""
        if self._stage3:
            with DisableTorchFunction(), torch.no_grad():
                for p in self._held:
                    private.keep(p)

    def whole(self, p: Any) -> Tensor:
        with DisableTorchFunction(), torch.no_grad():
            return private.gathered_copy(p)

    def alone(self, params: Sequence[Any]) -> dict[int, Tensor]:
        """The whole values of ``params`` by id, if not all ranks read them; empty if all ranks read the same."""
        return self._reader.alone(params)

    def shape_of(self, p: Any) -> torch.Size:
        return self._params.shapes[p]

    def written(self, p: Any, value: Tensor | None) -> None:
        """User code wrote to ``p``: ``value`` is to be it, or (``None``) ``p`` holds it already."""
        if self._stage3:
            self._reader.require_all(WRITE)
        with self._changes.under_way(), DisableTorchFunction(), torch.no_grad():
            if self._stage3:
                private.store(p, p.detach().clone() if value is None else value)
                if self.in_step():  # it may be used again before DeepSpeed fetches it
                    private.fetch(p)
            elif value is not None and value.data_ptr() != p.data_ptr():
                p.detach().copy_(value)
        if self._params.managed is not None and p in self._params.managed:
            self._dirty[p] = None

    def adopt(self) -> None:
        """Copies user code's writes to parameters into the masters."""
        if self._dirty and self._params.managed is not None:
            with DisableTorchFunction(), torch.no_grad():
                for p in self._dirty:
                    self._params.managed.shards.adopt(p)
            self._dirty.clear()

    # -- gradients -----------------------------------------------------------------------------------------------

    def see_grad(self, p: Any) -> Tensor | None:
        managed = self._params.managed
        if managed is None or p not in managed.with_grad:
            if managed is not None and p in managed and self._is_accumulating() and not self._has_warned:
                self._has_warned = True
                if dist.get_rank() == 0:
                    warnings.warn(_NONE, stacklevel=2)
            return None
        if p not in self._seen:
            self._reader.require_all(GRADIENT - self._reader.key_of(p))
            with DisableTorchFunction(), torch.no_grad():
                grad = managed.assemble(p, managed.shards.grad(p)).to(dtype=p.dtype, device=p.device)
            self._seen[p] = grad, False
        return self._seen[p][0]

    def set_grad(self, p: Any, value: Tensor | None) -> None:
        managed = self._params.managed
        if value is not None and managed is not None and p in managed and self._is_accumulating():
            with DisableTorchFunction():
                if p.grad is None:
                    raise ValueError(_NOT_YET)
                p.grad = value
            return
        with DisableTorchFunction():
            p.grad = None
        self._seen.pop(p, None)
        if managed is None or p not in managed:
            return
        if value is None:
            managed.with_grad.discard(p)
            return
        self._seen[p] = value, True  # whole until it is flushed: maybe this rank's own, which user code will reduce
        managed.with_grad.add(p)

    def flush_grads(self, averages: bool = False) -> None:
        """Copies user code's writes to gradients into DeepSpeed's pieces.

        Args:
            averages: A backward adds to them, so what was assigned is averaged over the ranks, as DDP averages the sum.
        """
        managed = self._params.managed
        if averages and managed is not None:
            assigned = {p: grad.detach().clone() for p, (grad, is_assigned) in self._seen.items() if is_assigned}
            with DisableTorchFunction():
                all_reduce_mean(list(assigned.values()))
            self._seen.update((p, (grad, True)) for p, grad in assigned.items())
        if self._seen and managed is not None:
            with DisableTorchFunction(), torch.no_grad():
                for p, (grad, is_assigned) in self._seen.items():
                    piece, new = managed.shards.grad(p), managed.cut(p, grad)
                    if is_assigned:
                        piece.copy_(new)
                    else:  # no version tells of p.grad.data.mul_(2); what is as it was keeps the piece's precision
                        new = new.to(piece.device)
                        piece.copy_(torch.where(new == piece.to(new.dtype), piece, new.to(piece.dtype)))
        self._seen.clear()

    def zero_grad_of(self, optimizer: Optimizer) -> Callable[..., None]:
        """``optimizer.zero_grad``, as its pieces need it."""

        def zero_grad(set_to_none: bool = True) -> None:
            managed = self._params.attached
            with DisableTorchFunction():
                for p in parameters(optimizer):
                    self._seen.pop(p, None)
                    if p not in managed:
                        if set_to_none:
                            p.grad = None
                        elif p.grad is not None:
                            p.grad.detach_().zero_()
                        continue
                    p.grad = None
                    if set_to_none:
                        managed.with_grad.discard(p)
                    elif p in managed.with_grad:
                        managed.shards.grad(p).zero_()

        return zero_grad

    def settle(self) -> None:
        """Makes all writes of user code count; called before each step of an optimizer."""
        self.flush_grads()
        self.adopt()

    def user_backward(self, run: Callable[[], None]) -> None:
        """A plain ``loss.backward()`` in a step of manual optimization."""
        if self._params.managed is None or not self.in_step() or self.busy():
            run()
        else:
            self._backward(run)
