"""``optimizer.state`` during a run: whole states, put together when user code looks at them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.private.torch import DisableTorchFunction


class LentStates(defaultdict[Tensor, dict[str, Any]]):
    """A parameter's state lies in DeepSpeed's flats until it is read here (collective); the next step cuts it up again,
    with what was written to it. Nothing is put together that nobody reads.

    Args:
        home: The parameters that have a state in the flats, in an order that all ranks share.
        whole: Puts one of them together (collective).
        forget: Drops the one in the flats.
        kept: States that stand beside the parameters themselves.
    """

    def __init__(
        self,
        home: Callable[[], Collection[Tensor]],
        whole: Callable[[Tensor], dict[str, Any]],
        forget: Callable[[Tensor], object],
        kept: Mapping[Tensor, dict[str, Any]],
    ) -> None:
        super().__init__(dict, raw(kept))
        self._home, self._whole, self._forget = home, whole, forget
        self.lent: set[Tensor] = set()
        """Those that came from the flats."""

    def __missing__(self, p: Tensor) -> dict[str, Any]:
        if p not in self._home():
            return super().__missing__(p)
        with torch.no_grad(), DisableTorchFunction():
            state = self._whole(p)
        self[p] = state
        self.lent.add(p)
        return state

    def _lend_all(self) -> None:
        for p in self._home():
            self[p]

    def take(self, p: Tensor) -> dict[str, Any]:
        """The state that stands here goes; the flats keep theirs."""
        self.lent.discard(p)
        state: dict[str, Any] = dict.pop(self, p)
        return state

    # -- as a dict of everything ---------------------------------------------------------------------------------

    def __contains__(self, p: object) -> bool:
        return super().__contains__(p) or p in self._home()

    def get(self, p: Tensor, default: Any = None) -> Any:
        return self[p] if p in self._home() else super().get(p, default)

    def pop(self, p: Tensor, *default: Any) -> Any:
        if p not in self:
            return super().pop(p, *default)
        self[p]
        self._forget(p)
        return self.take(p)

    def popitem(self) -> tuple[Tensor, dict[str, Any]]:
        if not self:
            return super().popitem()
        p = list(self)[-1]
        return p, self.pop(p)

    def setdefault(self, p: Tensor, default: Any = None) -> Any:
        return self[p] if p in self else super().setdefault(p, default)

    def __delitem__(self, p: Tensor) -> None:
        self.pop(p)

    def clear(self) -> None:
        for p in list(self._home()):
            self._forget(p)
        self.lent.clear()
        super().clear()

    def __iter__(self) -> Iterator[Tensor]:
        self._lend_all()
        return super().__iter__()

    def __len__(self) -> int:
        return len(raw(self).keys() | set(self._home()))

    def keys(self) -> Any:
        self._lend_all()
        return super().keys()

    def values(self) -> Any:
        self._lend_all()
        return super().values()

    def items(self) -> Any:
        self._lend_all()
        return super().items()

    def copy(self) -> Any:
        self._lend_all()
        return defaultdict(dict, raw(self))

    __copy__ = copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, raw(self.copy()))


def raw(states: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Those that stand in ``states``, without looking at more."""
    return dict(dict.items(states)) if isinstance(states, dict) else dict(states)
