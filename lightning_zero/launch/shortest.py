"""``uneven="shortest"``: a training epoch ends on all ranks with the shortest of their loaders.

The run equals one under DDP whose loaders were cut to that length by hand. Loaders with a length agree on it when an
epoch begins, and the Trainer uses it. In addition, ranks exchange one message of the step sync per batch, so loaders
without a length, or with a wrong one, end on all ranks with the same batch. Without a length Lightning fetches one
batch ahead, so it still recognises the last batch when it trains on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader

if TYPE_CHECKING:
    from typing_extensions import Self

    from lightning_zero.launch.step_sync import StepSync


class ShortestLoader(CombinedLoader):
    """The training loaders of this rank, cut to the shortest of all ranks."""

    _sync: StepSync
    _trainer: Any
    _shortest: float = float("inf")

    def __iter__(self) -> Self:
        """Begins an epoch, for which ranks agree on a length (collective)."""
        super().__iter__()
        self._shortest = float("inf")
        length = sized_len(self)
        self._shortest = self._sync.shortest(self._trainer, float("inf") if length is None else length)
        return self

    def __len__(self) -> int:
        return min(super().__len__(), self._shortest)  # type: ignore[return-value]

    def __next__(self) -> Any:
        """Returns the next batch if all ranks have one (collective)."""
        try:
            fetched = super().__next__()
        except StopIteration:
            fetched = None
        if self._sync.any_ran_dry(fetched is None) or fetched is None:
            raise StopIteration
        return fetched


def cut(given: Any, trainer: Any, sync: StepSync) -> CombinedLoader:
    """Returns the user's training loaders as one loader that ends with the shortest of all ranks."""
    loader = given if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
    kind: Any = type("ShortestLoader", (ShortestLoader, type(loader)), {})
    made: CombinedLoader = kind.__new__(kind)
    vars(made).update(vars(loader), _sync=sync, _trainer=trainer)  # a copy: the user's loader is not changed
    return made
