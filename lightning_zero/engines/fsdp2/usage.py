"""Which units and parameters the ranks have used: what makes unused parameters equal DDP's.

A rank without a gradient where another has one would send a shorter message than the other expects. So every reduction
covers all trainable parameters of its unit, zeros where this rank has no gradient. At the end of a *window* (the
micro-batches of one synchronized backward) one small message tells which parameters no rank has used; their gradients
become ``None`` again, as under DDP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm import direct
from lightning_zero.comm.agree import all_reduce_mean
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.base import different_units
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.units import UnitPlan


class Usage:
    """The account of one window on this rank, and the agreements of all ranks about it.

    Args:
        sharded: Sharded parameters, in the same order on all ranks.
        replicated: Parameters that every rank holds whole.
        group: Of all ranks, for agreements; ``None`` where there is nobody to agree with or nothing to agree on.
        timeout_seconds: How long an agreement waits; ``None`` leaves peer memory unused.

    Attributes:
        ran: 1 for each unit that ran on this rank in this window, the root left out.
    """

    def __init__(
        self,
        config: ZeroConfig,
        plan: UnitPlan,
        sharded: Iterable[Tensor],
        replicated: Iterable[Tensor],
        group: dist.ProcessGroup | None,
        repair: str,
    ) -> None:
        self._config, self._plan, self._repair = config, plan, repair
        self._replicated = list(replicated)
        self._index = {p: i for i, p in enumerate([*sharded, *self._replicated])}
        self._group = group
        self._peer_memory: PeerMemory | None = None
        self._open()

    def _open(self) -> None:
        self._used: set[Tensor] = set()
        self._zeroed: list[Tensor] = []  # parameters whose gradient is zeros that this rank has put there
        self.ran = [0] * (len(self._plan.units) - 1)

    # -- agreements ----------------------------------------------------------------------------------------------

    @property
    def can_agree(self) -> bool:
        return self._group is not None

    def speak_through_memory(self, timeout_seconds: float) -> None:
        """Agreements between ranks of one host go through their memory from now on (collective)."""
        if self._group is not None:
            self._peer_memory = PeerMemory(self._group, timeout_seconds)

    def begin_agreement(self, message: Tensor, op: Any) -> dist.Work:
        """``message`` holds the result on all ranks when the returned work has been waited for."""
        assert self._group is not None
        return direct.all_reduce(message, op, self._group, self._peer_memory)

    def agree(self, message: Tensor, op: Any) -> list[int]:
        """What all ranks agree on; on the host, so no device waits."""
        self.begin_agreement(message, op).wait()
        numbers: list[int] = message.tolist()
        return numbers

    def close(self) -> None:
        if self._peer_memory is not None:
            self._peer_memory.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._peer_memory = self._group = None

    # -- the window ----------------------------------------------------------------------------------------------

    def complete(self, params: Iterable[private.ShardedParam]) -> None:
        """Gives every parameter of a unit that is about to be reduced a gradient, and notes which it had."""
        for p in params:
            if private.has_grad(p):
                self._used.add(p.sharded_param)
            else:
                if p.sharded_param.grad is None:
                    self._zeroed.append(p.sharded_param)
                private.zero_grad(p)

    def reduce_replicated(self) -> None:
        """Averages the gradients of replicated parameters; after this each of them has one."""
        trainable = [p for p in self._replicated if p.requires_grad]
        for p in trainable:
            if p.grad is None:
                self._zeroed.append(p)
                p.grad = torch.zeros_like(p)
            else:
                self._used.add(p)
        grads = [p.grad for p in trainable if p.grad is not None]
        if grads:
            all_reduce_mean(grads)

    def ranks_ran_different_units(self) -> bool:
        """Asked before a backward whose reductions would otherwise be matched with another unit's."""
        if not (self.can_agree and self._config.find_unused_parameters and self.ran):
            return False
        ran = torch.tensor(self.ran, dtype=torch.int32)
        return bool(self._partly(self.agree(ran, dist.ReduceOp.SUM)))

    def close_window(self, requires_same_units: bool) -> None:
        """The agreement after a synchronized backward: gradients that no rank has become ``None``.

        Raises:
            ValueError: On all ranks, if these ran different units although ``requires_same_units``.
        """
        if self._config.find_unused_parameters:
            used = torch.zeros(len(self._index), dtype=torch.int32)
            if self._used:
                used[[self._index[p] for p in self._used]] = 1
            votes = torch.cat([torch.tensor(self.ran, dtype=torch.int32), used])
            if self.can_agree:
                self.begin_agreement(votes, dist.ReduceOp.SUM).wait()
            ran, used = votes.split([len(self.ran), len(self._index)])
            if requires_same_units and (partly := self._partly(ran.tolist())):
                raise self.different_units(partly)
            if self._zeroed:
                counts = used[[self._index[p] for p in self._zeroed]].tolist()
                for p, count in zip(self._zeroed, counts, strict=True):
                    if not count:
                        p.grad = None
        self._open()

    def _partly(self, counts: list[int]) -> list[int]:
        """The units that some ranks ran, but not all."""
        world_size = dist.get_world_size()
        return [unit for unit, count in enumerate(counts) if 0 < count < world_size]

    def different_units(self, indices: Iterable[int]) -> ValueError:
        """The error that names the units at ``indices``."""
        names = [self._plan.units[i].name for i in indices]
        others = [u.name for u in self._plan.units[:-1] if u.name not in names]
        return different_units(
            self._config.stage or 0, names, f"or keep them out of the units, as units={others!r} does{self._repair}"
        )

    def name_of(self, unit: int) -> str:
        return self._plan.units[unit].name
