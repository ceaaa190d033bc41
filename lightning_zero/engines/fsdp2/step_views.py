"""Views of gathered parameters that user code takes inside a step and may hold for longer than the parameters are
gathered. A unit's own forward takes views as well and drops them, so the view's mode is put on only where somebody else
than the graph still has one when the unit is dropped; :mod:`.lent_views` says what a holder is given then."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.identity import Identity
from lightning_zero.engines.fsdp2.lent_views import LentViews
from lightning_zero.private.torch import DisableTorchFunction


class StepViews:
    """Follows the views that are taken in steps.

    Args:
        lent: Keeps them.
        drops: Parameters go within the step, as their unit has run.
    """

    def __init__(self, lent: LentViews, identity: Identity, drops: bool) -> None:
        self._lent, self._identity, self._drops = lent, identity, drops

    def follow(self, group: private.Group) -> None:
        """From here on views of what ``group`` gathers are looked for when it is dropped."""
        if self._drops:
            private.before_reshard(group, self._dropped)

    def take(self, p: Tensor, view: Any) -> None:
        """``view`` is of the gathered ``p``; or several are."""
        self._lent.take(p, view, private.Home(self._identity.group_of[id(p)], self._identity.own[id(p)]))

    def _dropped(self, group: private.Group) -> None:
        with DisableTorchFunction():
            is_held = self._lent.dropped(group)
        if is_held:
            self._lent.watch()
