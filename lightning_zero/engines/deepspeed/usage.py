"""The parameters used between two agreements; DDP speaks of the others as unused parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agree import IN_STEP, Agreement, all_reduce_mean
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.private.torch import DisableTorchFunction


class Usage:
    """This rank's account of one window, the time between two agreements: the micro-batches of one step.

    DeepSpeed has zeros or the step before's gradient where a parameter was not used. Every reduction therefore covers
    all trainable parameters, zeros where there is nothing; those that no rank used have no gradient afterwards.

    Attributes:
        trained: Parameters that required a gradient when DeepSpeed laid its flats out.
        window_open: Between the first backward of a window and its agreement. Meanwhile gradients are half summed, so
            DeepSpeed cannot be started anew.
    """

    def __init__(self, params: Parameters, config: ZeroConfig, agreement: Agreement | None) -> None:
        self._params, self._config, self._agreement = params, config, agreement
        self._order: dict[Tensor, int] = {}
        self._touched: set[Tensor] = set()  # since the last agreement
        self._touched_now: set[Tensor] = set()  # in this backward
        self._handles: list[Any] = []
        self.trained: set[Tensor] = set()
        self.window_open = False

    def follow(self, trainable: Iterable[Tensor]) -> None:
        """From here to :meth:`close` the uses of ``trainable`` and of odd parameters are seen."""
        self._order = {p: i for i, p in enumerate([*trainable, *self._params.odd])}
        self.trained = {p for p in self._order if p.requires_grad}
        self._handles = [p.register_post_accumulate_grad_hook(self._touch) for p in self._order if p.requires_grad]

    def _touch(self, p: Tensor) -> None:
        self._touched_now.add(p)

    def close(self) -> None:
        """Takes the hooks back."""
        for handle in self._handles:
            handle.remove()

    def unfrozen(self) -> str | None:
        """A parameter that was frozen when DeepSpeed laid its flats out, and is no longer."""
        if self._params.managed is None:
            return None
        with DisableTorchFunction():
            named = self._params.named.items()
            return next((n for n, p in named if p.requires_grad and p not in self.trained), None)

    # -- one backward --------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Forgets a backward that did not end."""
        self._touched_now.clear()

    @property
    def _fills(self) -> bool:
        """Whether parameters without a gradient on this rank take part in reductions, with zeros."""
        return self._config.find_unused_parameters and dist.get_world_size() > 1

    def complete(self, sync: bool) -> None:
        """All gradients of this backward are there; some are not yet reduced. Called before DeepSpeed ends its
        backward, which reduces the last bucket: zeros that came later would be in no bucket on this rank."""
        managed = self._params.attached
        if self._fills and (sync or self._config.stage > 1):
            stage3 = self._params.stage3
            here = self._touched_now if stage3 else {p for p in managed.shards.pieces if p.grad is not None}
            missing = [p for p in managed.shards.pieces if p.requires_grad and p not in here]
            managed.shards.add_late(missing)

    def end_backward(self) -> None:
        """Adds the parameters that this backward has touched to those of the window."""
        self._touched |= self._touched_now

    # -- the end of a window -------------------------------------------------------------------------------------

    def end_window(self) -> None:
        """Averages odd gradients, then agrees (collective): in this order, because the agreement says which of the
        zeros that were averaged are no gradients at all."""
        self._agree_on_used(self._reduce_odd())
        self.window_open = False

    def _reduce_odd(self) -> set[Tensor]:
        """Averages the gradients of odd parameters; those that had none here have zeros now, and are returned."""
        trainable = [p for p in self._params.odd if p.requires_grad]
        filled = {p for p in trainable if p.grad is None}
        for p in filled:
            p.grad = torch.zeros_like(p)
        grads = [p.grad for p in trainable if p.grad is not None]
        if grads:
            all_reduce_mean(grads)
        return filled

    def _agree_on_used(self, filled: set[Tensor]) -> None:
        """One message on the CPU: which parameters any rank used since the last agreement."""
        managed = self._params.attached
        used = torch.zeros(len(self._order), dtype=torch.int32, device="cpu")
        used[[self._order[p] for p in self._touched]] = 1
        if not self._config.find_unused_parameters:
            used[[i for p, i in self._order.items() if p.requires_grad]] = 1
        if self._agreement is not None:
            self._agreement.all_reduce(used, dist.ReduceOp.MAX, IN_STEP).wait()
        for (p, _), count in zip(self._order.items(), used.tolist(), strict=True):
            if count and p in managed:
                managed.with_grad.add(p)
            elif p in filled and not count:  # what had a gradient before keeps it
                p.grad = None
        self._touched.clear()
