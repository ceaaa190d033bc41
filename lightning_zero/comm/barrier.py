"""Barriers of the ranks' main threads, in which one rank may request a collective that all ranks must join.

Code written for DDP reads parameters on rank 0 alone (``if trainer.is_global_zero: torch.save(net.state_dict())``). A
gather is collective, so all ranks must join it. Ranks exchange *rounds* of one small message each: a rank sends the key
of the collective that it needs, or reports that its user code is done. All ranks then serve the highest key. A rank
that is done repeats that report in each round until all ranks are done. Ranks that need the same key get it in one
round.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_zero.comm.agree import READS, Agreement
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.private.torch import DisableTorchFunction

_DONE = 0
FORWARD = 0
"""Key of a forward without gradients that all ranks are about to run. It is the lowest key, so reads are served
first."""


class Served(NamedTuple):
    """The outcome of a round."""

    key: int
    """The key that all ranks serve now; -1 if all ranks are done."""
    by_all: bool
    """Whether all ranks requested this key."""


class Barrier:
    """Rounds of all ranks of a run; see the module's docstring.

    Args:
        agreement: The run's agreement, with more than one rank.
        peer_memory: Connections between all ranks, if there are any.
    """

    def __init__(self, agreement: Agreement, peer_memory: PeerMemory | None = None) -> None:
        self._agreement, self._peer_memory = agreement, peer_memory
        self._process = os.getpid()

    def ask(self, key: int, what: Callable[[], str], serve: Callable[[int], object]) -> bool:
        """Runs rounds until ``key`` is served, for a call that all ranks are about to make (collective).

        ``serve`` gives this rank's part of the keys that come before. Returns whether all ranks requested ``key``: then
        no rank has served it yet.
        """
        while (served := self.round(key, what)).key != key:
            serve(served.key)
        return served.by_all

    def end(self, serve: Callable[[int], object]) -> None:
        """Runs rounds until all ranks are done (collective)."""
        while (served := self.round(None, lambda: "the end of user code")).key >= 0:
            serve(served.key)

    def round(self, key: int | None, what: Callable[[], str]) -> Served:
        """Runs one round (collective), in which this rank requests ``key``, or is done (``None``).

        Args:
            what: Returns a name of the rank's call, for an error message.

        Raises:
            RuntimeError: If not all ranks make the call within ``timeout_seconds``, or if this is a child process of
                the rank.
        """
        if os.getpid() != self._process:  # a fork shares this rank's sockets and would take messages meant for it
            raise RuntimeError(
                "a parameter of the sharded module is read or written in a process that this rank has started, for"
                " example a DataLoader worker (num_workers=). Other ranks cannot send their rows to such a process. Use"
                " num_workers=0, or read the parameter in the rank itself (on_after_batch_transfer, training_step), or"
                " give the process a copy that was made before."
            )
        mine = _DONE if key is None else key + 1
        ends = torch.tensor([mine, -mine], device="cpu")  # one MAX gives the highest key and the negated lowest one
        try:
            with DisableTorchFunction():
                self._agreement.all_reduce(ends, dist.ReduceOp.MAX, READS, self._peer_memory).wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{what()} on rank {self._agreement.rank}: not all ranks made this call or answered it within"
                f" timeout_seconds={self._agreement.timeout_seconds:g}. They are in other calls, or have ended"
                f" ({error}). Make the call on every rank."
            ) from error
        high, low = ends.tolist()  # a tensor in host memory, so this does not synchronize with a device
        return Served(high - 1, high == -low)
