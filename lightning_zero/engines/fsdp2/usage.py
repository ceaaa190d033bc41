"""Which parameters and units were used between two agreements: what DDP calls unused parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm.agree import all_reduce_mean
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.transport import Transport, refuse_different_units


class Usage:
    """This rank's account of one window (what lies between two agreements), and the agreement at its end.

    A rank without a gradient where another has one would send a shorter message. Every reduction therefore covers all
    trainable parameters, zeros where there is nothing; a parameter that no rank used has no gradient afterwards.

    Args:
        parameters: Sharded and replicated ones, in an order that all ranks share.
        names: Of the units, the root last.

    Attributes:
        ran: 1 for each unit that ran on this rank in this window, the root left out.
    """

    def __init__(self, transport: Transport, parameters: Iterable[Tensor], names: Sequence[str]) -> None:
        self._transport, self._names = transport, names
        self._order = {p: i for i, p in enumerate(parameters)}
        self.start_window()

    def start_window(self) -> None:
        self._used: set[Tensor] = set()
        self._zeroed: list[Tensor] = []  # given zeros where they had no gradient
        self.ran = [0] * (len(self._names) - 1)

    def complete(self, params: Iterable[private.ShardedParam]) -> None:
        """Every one of ``params`` has a gradient to reduce."""
        for p in params:
            if private.has_grad(p):
                self._used.add(p.sharded_param)
            else:
                if p.sharded_param.grad is None:
                    self._zeroed.append(p.sharded_param)
                private.zero_grad(p)

    def reduce_replicated(self, replicated: Iterable[Any]) -> None:
        """Averages the gradients of parameters that every rank holds whole (collective)."""
        trainable = [p for p in replicated if p.requires_grad]
        for p in trainable:
            if p.grad is None:
                self._zeroed.append(p)
                p.grad = torch.zeros_like(p)
            else:
                self._used.add(p)
        grads = [p.grad for p in trainable if p.grad is not None]
        if grads:
            all_reduce_mean(grads)

    def agree(self) -> None:
        """Gradients of parameters that nobody used become ``None`` again: one message, in host memory.

        Raises:
            ValueError: On all ranks, when they ran different units and had to run the same.
        """
        used = torch.zeros(len(self._order), dtype=torch.int32)
        if self._used:
            used[[self._order[p] for p in self._used]] = 1
        votes = torch.cat([torch.tensor(self.ran, dtype=torch.int32), used])
        if self._transport.agrees:
            self._transport.agree(votes, dist.ReduceOp.SUM).wait()
        ran, used = votes.split([len(self.ran), len(self._order)])
        if not self._transport.gathers_up_front:
            self._require_same_units(ran)
        if self._zeroed:
            for p, count in zip(self._zeroed, used[[self._order[p] for p in self._zeroed]].tolist(), strict=True):
                if not count:
                    p.grad = None

    def _require_same_units(self, ran: Tensor) -> None:
        world_size = self._transport.mesh.size()
        partly = [unit for unit, count in enumerate(ran.tolist()) if 0 < count < world_size]
        if partly:
            refuse_different_units(self._transport, self._names, partly)


class LastUnit:
    """The unit whose backward comes first, because it ran last in the forward before: it need not be gathered again.

    Attributes:
        ran: The unit that ran last with gradients.
    """

    def __init__(self) -> None:
        self.ran: nn.Module | None = None
        self._stays: nn.Module | None = None

    def keep_until_backward(self) -> None:
        """From the next forward on it stays gathered after it, and no other one. All ranks run the same units."""
        if self.ran is self._stays:
            return
        if self._stays is not None:
            private.set_reshard_after_forward(self._stays, True)
        if self.ran is not None:
            private.set_reshard_after_forward(self.ran, False)
        self._stays = self.ran
