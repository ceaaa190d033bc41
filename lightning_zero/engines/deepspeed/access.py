"""Reads and writes of user code while DeepSpeed holds the parameters: the engine's side of the view."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.comm.agree import all_reduce_mean
from lightning_zero.comm.meeting import FORWARD, Meeting, hook_above
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.optimizer_step import parameters
from lightning_zero.engines.deepspeed.order import Order
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay
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
_FORWARD, _WRITE, _BATCH, _READS = range(FORWARD, FORWARD + 4)
"""The keys of what all ranks must do together: a forward or a write in a hook, a batch of a loop without gradients.
Those of reads, which are served, follow."""
_ON_ALL = (
    "{} on some ranks only, where engine='deepspeed' needs all of them: do it on every rank, or use engine='fsdp2'."
)
_BATCHES = "a batch of validation, test or prediction"


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
        meeting: Of the ranks; ``None`` where there is one, or no run.
        is_accumulating: Whether gradients of a backward wait for those of a later one.
    """

    def __init__(
        self,
        params: Parameters,
        under_way: UnderWay,
        order: Order,
        backward: Callable[[Callable[[], None]], None],
        meeting: Meeting | None,
        is_accumulating: Callable[[], bool],
    ) -> None:
        self._is_accumulating, self._has_warned = is_accumulating, False
        self._meeting, self._num_changes = meeting, 0
        self._numbers = {p: number for number, p in enumerate(params.held)}
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
        return self._num_changes if self._stage3 else 0

    def changed(self) -> None:
        """Parameters have changed: by a step, or a write of user code."""
        self._num_changes += 1

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
            if self.is_away(p):
                self._ask(_READS + self._numbers[p], lambda: f"a read of parameter {self._name(p)!r}")
            return private.gathered_copy(p)

    def _name(self, p: Tensor) -> str:
        return next(name for name, other in self._params.named.items() if other is p)

    def _ask(self, key: int, what: Callable[[], str]) -> bool:
        """Before a collective call between steps, which other ranks may not be about to make; whether all are."""
        if self._meeting is None or not self._under_way.is_between():
            return True
        return self._meeting.ask(key, what, self._serve)

    def _serve(self, key: int) -> None:
        """This rank's part of what another one reads; nothing of what all must do in a hook."""
        if key == _BATCH:  # the other one cannot go on, so neither can this
            raise RuntimeError(_ON_ALL.format(_BATCHES))
        if key < _READS:
            return
        kind, number = divmod(key - _READS, len(self._numbers))
        p = list(self._numbers)[number]
        with DisableTorchFunction(), torch.no_grad():
            if kind == 0:
                private.gathered_copy(p)
            else:
                self._assembled_grad(p)

    def _together(self, key: int, what: str) -> None:
        if not self._ask(key, lambda: what):
            hook = hook_above()
            raise RuntimeError(_ON_ALL.format(f"{what} in {hook}" if hook else what))

    def before_forward(self) -> None:
        """DeepSpeed is about to gather for a forward in a hook."""
        self._together(_FORWARD, "a forward")

    def before_batch(self) -> None:
        """DeepSpeed is about to gather for a batch of a loop without gradients."""
        if self._stage3:
            self._together(_BATCH, _BATCHES)

    def meet(self) -> None:
        """User code is over on this rank: serves those where it is not (collective)."""
        if self._meeting is not None and self._under_way.is_between():
            with DisableTorchFunction(), torch.no_grad():
                self._meeting.end(self._serve)

    def shape_of(self, p: Any) -> torch.Size:
        return self._params.shapes[p]

    def written(self, p: Any, value: Tensor | None) -> None:
        """User code wrote to ``p``: ``value`` is to be it, or (``None``) ``p`` holds it already."""
        if self._stage3:
            self._together(_WRITE, "a write to a parameter")
        self.changed()
        with DisableTorchFunction(), torch.no_grad():
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
            key = _READS + len(self._numbers) + self._numbers[p]
            self._ask(key, lambda: f"a read of the gradient of parameter {self._name(p)!r}")
            with DisableTorchFunction(), torch.no_grad():
                self._seen[p] = self._assembled_grad(p), False
        return self._seen[p][0]

    def _assembled_grad(self, p: Any) -> Tensor:
        managed = self._params.attached
        return managed.assemble(p, managed.shards.grad(p)).to(dtype=p.dtype, device=p.device)

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
