"""``uneven="shortest"``: an epoch of training ends on all ranks with the shortest of their loaders.

As under DDP with loaders that were cut to that length by hand. The length, where loaders have one, is agreed on when an
epoch begins: the Trainer counts with it. Beyond that ranks exchange one message of the step sync for each batch:
loaders without a length, or with a wrong one, end on all ranks with the same batch. Lightning fetches a batch ahead
where it knows no length, so that the last batch is known as such when it is trained on.
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
        """An epoch begins (collective)."""
        super().__iter__()
        self._shortest = float("inf")
        length = sized_len(self)
        self._shortest = self._sync.shortest(self._trainer, float("inf") if length is None else length)
        return self

    def __len__(self) -> int:
        return min(super().__len__(), self._shortest)  # type: ignore[return-value]

    def __next__(self) -> Any:
        """The next batch, if all ranks have one (collective)."""
        try:
            fetched = super().__next__()
        except StopIteration:
            fetched = None
        if self._sync.any_ran_dry(fetched is None) or fetched is None:
            raise StopIteration
        return fetched


def cut(given: Any, trainer: Any, sync: StepSync) -> CombinedLoader:
    """What the user has ``given`` for training, as Lightning combines it, with that end."""
    loader = given if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
    kind: Any = type("ShortestLoader", (ShortestLoader, type(loader)), {})
    made: CombinedLoader = kind.__new__(kind)
    vars(made).update(vars(loader), _sync=sync, _trainer=trainer)  # the user's own stays as it is
    return made
