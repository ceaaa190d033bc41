"""Barriers of the ranks' main threads, in which one rank may request a collective that all ranks must join.

Code written for DDP reads parameters on rank 0 alone (``if trainer.is_global_zero: torch.save(net.state_dict())``). A
gather is collective, so all ranks must join it. They exchange *rounds* of one small message each: a rank sends the key
of what it needs, or reports that its user code is done. All ranks then serve the highest key. A rank that is done
sends that report in each round until all ranks are done. Ranks that need the same key get it in one round.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_zero.comm.agree import READS, Agreement
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.private.torch import DisableTorchFunction

_DONE = 0
FORWARD = 0
"""The key of a forward without gradients that all ranks are about to run; it comes after all reads."""


class Served(NamedTuple):
    """The outcome of a round."""

    key: int
    """That all ranks serve now; -1: all are done."""
    by_all: bool
    """Whether all ranks want it."""


class Meeting:
    """Rounds of all ranks of a run.

    Args:
        agreement: Of the run, of several ranks.
        peer_memory: Among all ranks, where there are such connections.
    """

    def __init__(self, agreement: Agreement, peer_memory: PeerMemory | None = None) -> None:
        self._agreement, self._peer_memory = agreement, peer_memory
        self._process = os.getpid()

    def ask(self, key: int, what: Callable[[], str], serve: Callable[[int], object]) -> bool:
        """Rounds until ``key`` is served, for what all ranks are about to do (collective); ``serve`` gives this rank's
        part of the keys before. Whether all ranks want it: then nobody has served it yet."""
        while (served := self.round(key, what)).key != key:
            serve(served.key)
        return served.by_all

    def end(self, serve: Callable[[int], object]) -> None:
        """Rounds until all ranks are done (collective)."""
        while (served := self.round(None, lambda: "the end of user code")).key >= 0:
            serve(served.key)

    def round(self, key: int | None, what: Callable[[], str]) -> Served:
        """One round (collective), in which this rank wants ``key``, or is done (``None``).

        Args:
            what: Names the rank's call, for an error.

        Raises:
            RuntimeError: If not all ranks come within ``timeout_seconds``, or in another process than the rank's.
        """
        if os.getpid() != self._process:  # a fork has this rank's connections, on which messages to it arrive
            raise RuntimeError(
                "a parameter of the sharded module is read or written in a process that this rank has started, as"
                " num_workers= of a DataLoader does, where other ranks cannot send their parts of it. Use"
                " num_workers=0, or read it in the rank itself (on_after_batch_transfer, training_step), or hand the"
                " process a copy that was made before."
            )
        mine = _DONE if key is None else key + 1
        ends = torch.tensor([mine, -mine], device="cpu")
        try:
            with DisableTorchFunction():
                self._agreement.all_reduce(ends, dist.ReduceOp.MAX, READS, self._peer_memory).wait()
        except RuntimeError as error:
            hook = hook_above()
            raise RuntimeError(
                f"{what()}{f' in {hook}' if hook else ''} on rank {self._agreement.rank}: not all ranks have come to it"
                f" or answered within timeout_seconds={self._agreement.timeout_seconds:g}, as they are in calls of"
                f" their own or have ended ({error}). Make it on every rank."
            ) from error
        high, low = ends.tolist()  # on the host: no device waits
        return Served(high - 1, high == -low)


def hook_above() -> str | None:
    """The user's hook or step that is running, with its class where that is known."""
    frame: Any = sys._getframe(1)
    found = None
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if name.startswith("on_") and not module.startswith(("lightning.", "lightning_zero.", "pytorch_lightning.")):
            owner = frame.f_locals.get("self")
            found = f"{type(owner).__name__}.{name}" if owner is not None else name
        frame = frame.f_back
    return found
