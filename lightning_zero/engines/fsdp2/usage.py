"""Tracks which parameters and units are used between two agreements; the rest are DDP's unused parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm.agree import all_reduce_mean
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.order import refuse_different_units
from lightning_zero.engines.fsdp2.transport import Transport

_PRIME = 2**31 - 1  # the largest int32


class Usage:
    """This rank's record of one window (the time between two agreements), and the agreement at its end.

    A rank that lacks a gradient which another rank has would send a shorter message. Every reduction therefore covers
    all trainable parameters, with zeros for missing gradients; afterwards parameters that no rank used have none.

    Args:
        parameters: Sharded and replicated parameters, in an order that all ranks share.
        names: Names of the units, the root last.
    """

    def __init__(self, transport: Transport, parameters: Iterable[Tensor], names: Sequence[str]) -> None:
        self._transport, self._names = transport, names
        self._order = {p: i for i, p in enumerate(parameters)}
        self.start_window()

    def start_window(self) -> None:
        self._used: set[Tensor] = set()
        self._zeroed: list[Tensor] = []  # parameters that had no gradient and got zeros
        self._marks = [0] * (len(self._names) - 1)
        self._num_reduced = 0

    def reduces(self, index: int) -> None:
        """Record that unit ``index``, not the root, is about to reduce its gradients inside the backward.

        The unit's mark is a rolling hash of its positions among all reductions: equal on ranks that reduce in the same
        order, and almost never on others.
        """
        self._num_reduced += 1
        self._marks[index] = (self._marks[index] * 31 + self._num_reduced) % _PRIME or 1

    def complete(self, params: Sequence[private.ShardedParam]) -> None:
        """Give each of ``params`` a gradient to reduce, all of one dtype."""
        for p in params:
            if private.has_grad(p):
                self._used.add(p.sharded_param)
            else:
                if p.sharded_param.grad is None:
                    self._zeroed.append(p.sharded_param)
                private.zero_grad(p)
        private.accumulate_alike(params)

    def reduce_replicated(self, replicated: Iterable[Any]) -> None:
        """Average the gradients of parameters that every rank holds in full (collective)."""
        trainable = [p for p in replicated if p.requires_grad]
        for p in trainable:
            if p.grad is None:
                self._zeroed.append(p)
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in trainable if p.grad is not None]
        if grads:
            all_reduce_mean(grads)

    def send(self, late: Iterable[private.ShardedParam], replicated: Iterable[Any]) -> tuple[dist.Work | None, Tensor]:
        """Send the record of this window in one message from host memory, while the last gradients are reduced.

        ``late`` are still to be completed, ``replicated`` to be reduced. Returns the arguments of :meth:`recv`.
        """
        used = self._used.union(
            (p.sharded_param for p in late if private.has_grad(p)),
            (p for p in replicated if p.requires_grad and p.grad is not None),
        )
        flags = torch.zeros(len(self._order), dtype=torch.int32, device="cpu")
        if used:
            flags[[self._order[p] for p in used]] = 1
        marks = torch.tensor(self._marks, dtype=torch.int32, device="cpu")
        votes = torch.cat([flags, marks, -marks])  # under MAX the last two show whether marks differ
        return self._transport.agree(votes, dist.ReduceOp.MAX) if self._transport.agrees else None, votes

    def recv(self, work: dist.Work | None, votes: Tensor) -> None:
        """Receive the records (see :meth:`send`); set gradients of parameters that no rank used back to ``None``.

        Raises:
            ValueError: On all ranks, if their units reduced in different orders, so that messages were mixed up.
        """
        if work is not None:
            work.wait()
        used, marks = votes.tensor_split([len(self._order)])
        self._require_same_units(*marks.chunk(2))
        if self._zeroed:
            for p, count in zip(self._zeroed, used[[self._order[p] for p in self._zeroed]].tolist(), strict=True):
                if not count:
                    p.grad = None

    def _require_same_units(self, latest: Tensor, negated_earliest: Tensor) -> None:
        if not torch.equal(latest, -negated_earliest):
            differ = (latest != -negated_earliest).nonzero().flatten()
            refuse_different_units(self._transport, self._names, differ.tolist())


class LastUnit:
    """Keeps the unit that ran last gathered: its backward comes first and would gather it again at once.

    Attributes:
        ran: The unit that ran last with gradients.
    """

    def __init__(self) -> None:
        self.ran: nn.Module | None = None
        self._stays: nn.Module | None = None

    def keep_until_backward(self) -> None:
        """From the next forward on, keep only this unit gathered after a forward. All ranks have the same last unit."""
        if self.ran is self._stays:
            return
        if self._stays is not None:
            private.set_reshard_after_forward(self._stays, True)
        if self.ran is not None:
            private.set_reshard_after_forward(self.ran, False)
        self._stays = self.ran
