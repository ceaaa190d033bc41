"""The order in which units run. If it differs between ranks, all ranks raise an error instead of mixing up gathers.

All ranks keep the same tree of the orders that they have run. At a place where only one unit has ever followed, a rank
that runs this unit asks nobody: on a CPU the next units are gathered ahead, on an accelerator the host runs ahead
anyway. Where no unit or several have followed, the ranks agree first, so each unit of the first forward costs a
message. At the end of each forward one message compares the marks (a rolling hash) of the units that ran.

A rank that is about to leave the known order cannot know whether the others do, too. It therefore joins the gathers
that the others may have started, up to the next message, and then sends its event. Either the ranks differ and all
raise an error, or all left the order alike and the tree gets a fork.

Between CPUs a rank waits for the message at the end. On an accelerator a rank continues, because a gather that other
ranks do not join blocks only its stream, and receives the result before it sends the next message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engines.base import outside_inference_mode
from lightning_zero.engines.fsdp2 import private

if TYPE_CHECKING:
    from lightning_zero.engines.fsdp2.transport import Transport

_PRIME = 2**61 - 1
_END = -1
_MOST_PLACES = 1 << 14
"""Maximum size of the tree; beyond it (random layers) ranks agree on each unit."""


class _Place:
    """A place in the orders that all ranks have run."""

    def __init__(self, mark: int) -> None:
        self.mark = mark
        self.followers: dict[int, _Place] = {}
        self.is_fork = False
        """Whether user code has touched a parameter here, which ranks agree on."""

    def followed_by(self) -> int:
        """Return the only unit that has ever followed here; :data:`_END` if there is none, or more than one."""
        return next(iter(self.followers)) if len(self.followers) == 1 and not self.is_fork else _END


class Order:
    """Checks the order of units in one run.

    Args:
        transport: Sends the messages.
        units: The root is last.
        names: The units' names.
        num_ahead: Number of units that are gathered ahead.
        waits: Whether a gather that not all ranks join blocks this process.
    """

    def __init__(
        self, transport: Transport, units: Sequence[Any], names: Sequence[str], num_ahead: int, waits: bool
    ) -> None:
        self._transport, self._units, self._names = transport, units, names
        self._num_ahead, self._waits = num_ahead, waits
        self._start = self._place = _Place(1)
        self._num_places = 1
        self._is_running = False  # a unit has run since the last end
        self._unheard: tuple[dist.Work, Tensor] | None = None

    def runs(self, index: int) -> None:
        """Record, and if needed agree, that unit ``index`` is about to run in a forward."""
        if self._place.followed_by() != index:
            self._agree_on(index)
        self._move_to(index)
        self._is_running = True
        if self._num_ahead:
            self._gather_ahead(index)

    def _gather_ahead(self, index: int) -> None:
        units, place = [index], self._place
        while len(units) <= self._num_ahead and (following := place.followed_by()) != _END:
            units.append(following)
            place = place.followers[following]
        with private.outside_transforms(), torch.inference_mode(False):  # storage made inside could never be trained on
            for each in units:
                private.unshard(self._units[each], async_op=True)

    def touches(self, key: int, in_backward: bool) -> None:
        """Agree that user code inside a step needs the resharded tensors with this ``key``."""
        event = len(self._names) + key
        if in_backward:
            self._ask(event)
        else:
            self._agree_on(event)
            self._place.is_fork = True

    def ends(self) -> None:
        """Record the end of a forward, and compare its order across ranks."""
        self._is_running = False
        if self._waits or self._place.followed_by() != _END:
            self._agree_on(_END)
        else:
            self.recv()
            self._send(_END)
        self._move_to(_END)

    def close(self) -> None:
        """End the forward before a backward, perhaps inside that forward: backwards gather in an order of their own."""
        if self._is_running:
            self.ends()

    def restart(self) -> None:
        """Return to the root of the tree: the next unit is the first of a micro-batch."""
        self._place, self._is_running = self._start, False

    def recv(self) -> None:
        """Wait for the answer to the last message.

        Raises:
            ValueError: On all ranks, if they run different units, or if only some touch a parameter in a step.
        """
        if self._unheard is None:
            return
        (work, ends), self._unheard = self._unheard, None
        with private.outside_transforms(), outside_inference_mode():
            work.wait()
            left_out, highest, lowest, *marks = ends.tolist()  # on the CPU: no device waits
        if highest == -lowest and marks[0] == -marks[1]:
            return
        if highest >= len(self._names):
            raise ValueError(
                f"stage={self._transport.config.stage}: in a step, only some ranks read or write a parameter whose"
                " unit is not gathered, or ranks access different ones: do this on every rank, or in a hook between"
                " two steps."
            )
        found = {left_out, highest, -lowest} - {_END}
        refuse_different_units(self._transport, self._names, sorted(found))

    def _agree_on(self, event: int) -> None:
        place = self._place
        while (following := place.followed_by()) != _END:
            unit, place = self._units[following], place.followers[following]
            if not all(map(private.is_gathered, private.groups(unit))):
                with private.outside_transforms(), torch.inference_mode(False):
                    private.unshard(unit)
                    private.reshard(unit)  # user code may be about to open it
        self._ask(event)

    def _ask(self, event: int) -> None:
        self.recv()
        self._send(event)
        self.recv()

    def _send(self, event: int) -> None:
        mark, left_out = self._place.mark, self._place.followed_by()
        with private.outside_transforms(), outside_inference_mode():
            # MAX of x and of -x: they are opposite on all ranks only if x is the same on all.
            ends = torch.tensor([left_out, event, -event, mark, -mark], dtype=torch.int64, device="cpu")
            self._unheard = self._transport.send(ends, dist.ReduceOp.MAX), ends

    def _move_to(self, event: int) -> None:
        place = self._place.followers.get(event)
        if place is None:
            place = _Place((self._place.mark * 1_000_003 + event + 2) % _PRIME)
            if self._num_places < _MOST_PLACES:  # a count, never memory or time: all ranks must keep the same tree
                self._place.followers[event] = place
                self._num_places += 1
        self._place = place


def refuse_different_units(transport: Transport, names: Sequence[str], indices: Sequence[int]) -> None:
    """Raise ``ValueError`` for ranks that ran different units; ``names`` are those of all units, the root last."""
    found = [names[i] for i in indices]
    others = [name for name in names[:-1] if name not in found]
    raise ValueError(
        f"stage={transport.config.stage}: the units {', '.join(map(repr, found))} ran on some ranks only, or in another"
        " order, but all ranks must gather the same parameters together. Run them on every rank, or keep them out"
        f" of the units, as units={others!r} does. To generate texts of different lengths, call"
        " generate(..., synced_gpus=True)."
    )
