"""The order in which units run. Ranks that run them in another order get an error in place of mixed-up gathers.

All ranks keep the same tree of the orders that they have run. Where one unit alone has followed so far, a rank that
runs it asks nobody: on a CPU the next ones are gathered ahead, on an accelerator the host runs ahead by itself. Where
none or several have followed, the ranks agree first, so each unit of the first forward takes a message. At the end of
each forward one message compares the marks of what has run, a rolling hash.

A rank that is about to run something else than what has always followed cannot know whether the others do. It gathers
what they may be gathering, up to the next message, and then says what it runs: an error on all ranks, or, where all
have come to do the same, a fork in the tree.

Between CPUs a rank waits for the message at the end. On an accelerator it goes on, as gathers that the others do not
join only wait on their stream, and hears of it before it sends the next message.
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
"""Of the tree; beyond that (random layers) ranks agree on each unit."""


class _Place:
    """A place in the orders that all ranks have run."""

    def __init__(self, mark: int) -> None:
        self.mark = mark
        self.followers: dict[int, _Place] = {}
        self.is_fork = False
        """Whether user code has touched a parameter here, which ranks agree on."""

    def followed_by(self) -> int:
        """The unit that has always followed; :data:`_END` where there is none, or another one as well."""
        return next(iter(self.followers)) if len(self.followers) == 1 and not self.is_fork else _END


class Order:
    """Of one run.

    Args:
        transport: Carries the messages.
        units: The root last.
        names: Of the units.
        num_ahead: So many units are gathered ahead.
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
        """This rank is about to run unit ``index`` in a forward."""
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
        """User code inside a step needs what has this ``key``, and is not there."""
        event = len(self._names) + key
        if in_backward:
            self._ask(event)
        else:
            self._agree_on(event)
            self._place.is_fork = True

    def ends(self) -> None:
        """A forward is over."""
        self._is_running = False
        if self._waits or self._place.followed_by() != _END:
            self._agree_on(_END)
        else:
            self.hear()
            self._say(_END)
        self._move_to(_END)

    def close(self) -> None:
        """A backward is about to begin, maybe inside the forward, and gathers in an order of its own."""
        if self._is_running:
            self.ends()

    def start_anew(self) -> None:
        """The next unit is the first of a micro-batch."""
        self._place, self._is_running = self._start, False

    def hear(self) -> None:
        """Waits for what the others have said.

        Raises:
            ValueError: On all ranks, when they run different units, or some alone touch a parameter in a step.
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
                f"stage={self._transport.config.stage}: some ranks only read or write, in a step, a parameter whose"
                " unit is not gathered there, or others than the rest do: do it on every rank, or in a hook between"
                " two steps."
            )
        found = {left_out, highest, -lowest} - {_END}
        refuse_different_units(self._transport, self._names, sorted(found))

    def _agree_on(self, event: int) -> None:
        place = self._place
        while (following := place.followed_by()) != _END:
            unit, place = self._units[following], place.followers[following]
            with private.outside_transforms(), torch.inference_mode(False):
                private.unshard(unit)
                if private.reshards_after_forward(unit):
                    private.reshard(unit)
        self._ask(event)

    def _ask(self, event: int) -> None:
        self.hear()
        self._say(event)
        self.hear()

    def _say(self, event: int) -> None:
        mark, left_out = self._place.mark, self._place.followed_by()
        with private.outside_transforms(), outside_inference_mode():
            ends = torch.tensor([left_out, event, -event, mark, -mark], dtype=torch.int64, device="cpu")
            self._unheard = self._transport.send(ends, dist.ReduceOp.MAX), ends

    def _move_to(self, event: int) -> None:
        place = self._place.followers.get(event)
        if place is None:
            place = _Place((self._place.mark * 1_000_003 + event + 2) % _PRIME)
            if self._num_places < _MOST_PLACES:
                self._place.followers[event] = place
                self._num_places += 1
        self._place = place


def refuse_different_units(transport: Transport, names: Sequence[str], indices: Sequence[int]) -> None:
    """Raises the ``ValueError`` of ranks that ran different units; ``names`` are of all of them, the root last."""
    found = [names[i] for i in indices]
    others = [name for name in names[:-1] if name not in found]
    raise ValueError(
        f"stage={transport.config.stage}: the units {', '.join(map(repr, found))} ran on some ranks only, or in another"
        " order, but all ranks must gather the same parameters together. Run them on every rank, or keep them out"
        f" of the units, as units={others!r} does{transport.advice}. Texts of different lengths need generate(...,"
        " synced_gpus=True)."
    )
