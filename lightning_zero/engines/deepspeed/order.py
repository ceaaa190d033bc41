"""Stage 3: ranks must gather the same parameters and reduce the same gradients, in one order."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agree import IN_STEP, Agreement
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay

_BUCKETS = -(2**40)
"""Numbers from here downwards stand for buckets of gradients."""


class Order:
    """Ranks tell each other what comes next, before it could be mixed up: an error on all of them, in place of a
    collective that never ends or that mixes two tensors.

    Args:
        params: All of the module's.
        agreement: Of all ranks; ``None`` does without.
        on_cpu: Whether gathers are agreed on, too: on an accelerator each message would hold the host up.
        under_way: Says when nothing is gathered.

    Attributes:
        is_followed: Whether gathers are agreed on.
    """

    def __init__(self, params: Parameters, agreement: Agreement | None, on_cpu: bool, under_way: UnderWay) -> None:
        self._params, self._agreement, self._under_way = params, agreement, under_way
        self._trained: Collection[Tensor] = ()
        self.is_followed = params.stage3 and agreement is not None and on_cpu

    def follow(self, engine: Any, trained: Collection[Tensor] | None) -> None:
        """Ranks agree before each gather of DeepSpeed's ``engine``; ``trained`` have gradients, with an optimizer."""
        if not self._params.stage3:
            return
        if self.is_followed:
            private.before_gathers(engine, self.require_same)
        if trained is not None and self._agreement is not None:
            self._trained = trained
            private.before_buckets(engine, self._require_same_bucket)

    def require_same(self, unit: Any = None) -> None:
        """All ranks gather ``unit`` next, a module or a parameter; ``None`` after the last one (collective)."""
        if self._under_way.is_between() or Phase.WHOLE in self._under_way:
            return

        def number_of(unit: Any) -> int:  # none: -1, parameters: below
            its: int = private.number_of(unit)
            return -2 - its if isinstance(unit, Tensor) else its

        said = self._say_to_all(number_of(unit))
        if len(said) > 1:
            params = self._params
            units = [*params.module.named_modules(), *((n, p) for n, p in params.named.items() if p in params.held)]
            names = [n for n, u in units if n and number_of(u) in said - {-1}]
            raise ValueError(
                f"stage=3: the units {', '.join(map(repr, names))} ran on some ranks only, or in another order, but all"
                " ranks must gather the same parameters together. Run them on every rank, or use stage=2."
            )

    def _require_same_bucket(self, numbers: list[int]) -> None:
        """All ranks reduce these parameters' gradients next."""
        self._say_to_all(_BUCKETS - hash(tuple(sorted(numbers))) % 2**40)

    def _say_to_all(self, number: int) -> set[int]:
        """The largest and the smallest number that a rank has said, between the hosts; not about buckets."""
        assert self._agreement is not None
        # One message for both kinds: a rank at a gather and one at a bucket must meet here, and be told
        ends = torch.tensor([number, -number], device="cpu")
        self._agreement.all_reduce(ends, dist.ReduceOp.MAX, IN_STEP).wait()
        high, low = ends.tolist()
        said = {high, -low}
        if len(said) > 1 and min(said) <= _BUCKETS:
            numel = sum(self._params.shapes[p].numel() for p in self._trained)
            raise ValueError(
                "stage=3: in this backward ranks used different parameters of modules that all of them ran, so their"
                " gradients would come in different buckets. With deepspeed.reduce_bucket_numel="
                f"{numel} all of them fit into one; or use stage=2."
            )
        return said
