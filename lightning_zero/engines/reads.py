"""User code's reads of sharded tensors between steps: all ranks gather, or one is sent what it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.comm.reads import KEPT_BYTES, UNKNOWN, WRITE, Ahead, Changes, Holder, Reads


class Keyed(Holder, Protocol):
    """An engine's tensors, which other ranks may read."""

    def key_of(self, tensor: Any) -> int:
        """The tensor's number."""

    def assemble(self, key: int, parts: list[Tensor]) -> Tensor:
        """The whole tensor of everyone's rows, on the device."""


class Reader:
    """Finds out, before a tensor is gathered, whether all ranks read it; see :mod:`~lightning_zero.comm.reads`.

    Args:
        reads: Of the ranks; ``None`` where there is one.
        changes: Of this rank.
        rows: The engine's tensors.
        is_between: Whether no step is under way: inside one, ranks run the same code.
    """

    def __init__(
        self,
        reads: Reads | None,
        changes: Changes,
        rows: Keyed,
        is_between: Callable[[], bool],
    ) -> None:
        self._reads, self._changes, self._is_between = reads, changes, is_between
        self._rows = rows
        self.waits_before_step = False
        """Whether user code runs between a backward and its optimizer's step: ranks meet between the two."""
        self._ahead: tuple[Any, Collection[int], dict[int, list[Tensor]] | None] | None = None

    def key_of(self, tensor: Any) -> int:
        """The number of a tensor of the engine's."""
        return self._rows.key_of(tensor)

    def alone(self, tensors: Sequence[Any], origin: Callable[[Any], Any] = lambda tensor: tensor) -> dict[int, Tensor]:
        """The whole values of ``tensors`` by their ids, if not all ranks read them; empty, if the caller is to gather.

        ``origin`` tells which tensor of the engine's each of them is an alias of.

        Raises:
            RuntimeError: See :meth:`~lightning_zero.comm.reads.Reads.ask`.
        """
        if self._reads is None or not tensors or not self._is_between():
            return {}
        keys = {id(t): self._rows.key_of(origin(t)) for t in tensors}
        # What needs a gradient is gathered by another collective, each tensor as often as it is named
        how = [2 * keys[id(t)] + (torch.is_grad_enabled() and t.requires_grad) for t in tensors]
        how += [size for t in tensors if keys[id(t)] == UNKNOWN for size in t.shape]
        found = self._found(tuple(dict.fromkeys(keys.values())), how)
        if found is None:
            return {}
        wholes = {key: self._rows.assemble(key, found[key]) for key in set(keys.values())}
        return {id(t): wholes[keys[id(t)]] for t in tensors}

    def _found(self, keys: tuple[int, ...], how: Sequence[int]) -> dict[int, list[Tensor]] | None:
        assert self._reads is not None
        if self._ahead is not None:
            then, known, found = self._ahead
            if then == self._changes.begun and all(key in known for key in keys):
                return found
        return self._reads.ask(keys, how)

    def step_is_next(self) -> None:
        """A backward has left gradients for the optimizer."""
        meets = self.waits_before_step and self._reads is not None
        self._changes.ahead = Ahead.MEETING if meets else Ahead.STEP
        if meets:
            self._changes.mark()

    def step_begins(self) -> None:
        """Gradients or parameters are about to change: ranks whose user code still reads them are waited for."""
        if self._changes.ahead is Ahead.MEETING:
            if self._reads is not None and self._is_between():
                self._reads.meet()
            self._changes.forget()
        self._changes.ahead = Ahead.STEP

    def step_ends(self) -> None:
        """The optimizer has stepped, or has not for an overflow."""
        self._changes.ahead = Ahead.MESSAGES

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Gradients and parameters change inside it."""
        self.step_begins()
        try:
            with self._changes.under_way():
                yield
        finally:
            self.step_ends()

    def begin_ahead(self, tensors: Sequence[Any], origin: Callable[[Any], Any] = lambda tensor: tensor) -> None:
        """``tensors`` are about to be read one by one: asks for all of them, until :meth:`end_ahead`. Those for which
        ``origin`` has nothing are not of the engine's."""
        self._ahead = None
        tensors = [known for known in map(origin, tensors) if known is not None]
        if self._reads is not None and tensors and self._is_between():
            keys = tuple(dict.fromkeys(map(self._rows.key_of, tensors)))
            self._ahead = self._changes.begun, frozenset(keys), self._reads.ask(keys)

    def end_ahead(self) -> None:
        """See :meth:`begin_ahead`."""
        self._ahead = None

    @contextmanager
    def writing(self, tensors: Iterable[Any], before: Callable[[], None]) -> Iterator[None]:
        """User code writes to ``tensors`` between steps, some of which other ranks may still want to read as they were.
        ``before`` is called first."""
        before()
        keys = {key for key in map(self._rows.key_of, tensors) if key > UNKNOWN}
        if self._changes.ahead is not Ahead.MEETING:  # no rank reads gradients alone
            keys = {key for key in keys if not self._rows.is_gradient(key)}
        if not keys:
            yield
        elif self._reads is None or not self._is_between():
            with self._changes.under_way():
                yield
        else:
            nbytes = sum(self._rows.room(key, 0).nbytes for key in keys)  # of the rank that has most: alike on all
            if self._changes.kept_bytes + nbytes > KEPT_BYTES:
                self._reads.ask((WRITE,))
                self._changes.forget()
                change = self._changes.under_way()
            else:
                rows = {key: part for key in keys if (part := self._rows.rows(key)) is not None}
                change = self._changes.of(rows, nbytes)
            with change:
                yield

    def require_all(self, key: int) -> None:
        """All ranks do what has this ``key``, which cannot be done for one of them.

        Raises:
            RuntimeError: If they do not.
        """
        if self._reads is not None and self._is_between():
            self._reads.ask((key,))


class ReadAlone(torch.autograd.Function):
    """A value that a rank has read alone, of a tensor that may require a gradient: there is none to be had."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise RuntimeError(
            "backward through a parameter that not all ranks have read: gradients are averaged over all of them, so"
            " compute it on every rank."
        )


def leaf(value: Tensor) -> Tensor:
    """``value`` for code that may expect a graph."""
    return ReadAlone.apply(torch.empty(0, requires_grad=True), value)
