"""Stage 3: checks that ranks gather the same parameters and reduce the same gradients, in the same order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.agree import IN_STEP, Agreement
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay

_BUCKETS = 2**40
"""Numbers from this one upwards denote buckets of gradients; smaller ones denote modules and parameters."""
_BUCKETS_DIFFER = (
    "stage=3: ranks ran the same modules but used different parameters of them, so that their gradients came in"
    " different buckets. Set deepspeed.reduce_bucket_numel={}, which fits all gradients in one bucket, or use stage=2."
)


class Order:
    """Records the order in which this rank gathers and reduces.

    The ranks' marks are compared at the end of each window. CPU ranks also compare what comes next before each gather
    and reduction, so that all raise before messages are mixed up or a rank waits for ever. On an accelerator each of
    these messages would block the host, so only marks are compared.

    Args:
        params: All parameters of the module.
        agreement: Channel to all ranks; ``None`` disables the checks.
        on_cpu: Whether ranks agree on each gather and bucket.
        under_way: The engine's current activities: between steps nothing is recorded.

    Attributes:
        mark: A hash of all gathers and buckets since the last comparison, in order.
    """

    def __init__(self, params: Parameters, agreement: Agreement | None, on_cpu: bool, under_way: UnderWay) -> None:
        self._params, self._under_way = params, under_way
        self._is_followed = params.stage3 and agreement is not None
        self._agreement = agreement if on_cpu else None
        self.mark = 0

    def follow_buckets(self, engine: Any) -> None:
        """Starts recording the buckets of DeepSpeed's ``engine``."""
        if self._is_followed:
            private.before_buckets(engine, self._reduces)

    def gathers(self, unit: Any = None) -> None:
        """Records that ``unit``, a module or a parameter, is gathered next (collective on CPUs).

        ``None`` follows the last unit of a forward."""
        if self._is_followed and not (self._under_way.is_between() or Phase.WHOLE in self._under_way):
            self._next(_number_of(unit))

    def _reduces(self, numbers: list[int]) -> None:
        """Records that the gradients of these parameters are reduced next."""
        self._next(_BUCKETS + hash(tuple(sorted(numbers))) % _BUCKETS)

    def _next(self, number: int) -> None:
        self.mark = hash((self.mark, number)) % _BUCKETS
        if self._agreement is not None:
            ends = torch.tensor([number, -number], device="cpu")
            self._agreement.all_reduce(ends, dist.ReduceOp.MAX, IN_STEP).wait()
            high, low = ends.tolist()
            if high != -low:
                self._refuse({high, -low})

    def _refuse(self, numbers: set[int]) -> None:
        params = self._params
        if max(numbers) >= _BUCKETS:
            raise ValueError(_BUCKETS_DIFFER.format(sum(shape.numel() for shape in params.shapes.values())))
        units = [*params.module.named_modules(), *((n, p) for n, p in params.named.items() if p in params.held)]
        names = [n for n, u in units if n and _number_of(u) in numbers - {-1}]
        raise ValueError(
            f"stage=3: the units {', '.join(map(repr, names))} ran on some ranks only, or in another order, but all"
            " ranks must gather the same parameters together. Run them on every rank, or use stage=2."
        )

    def compare(self, largest: int, smallest: int) -> None:
        """Raises ``ValueError`` if the marks differ between ranks: ``largest`` is not ``smallest``."""
        self.mark = 0
        if largest != smallest:
            raise ValueError(
                "stage=3: ranks ran modules in different orders, or used different parameters of them, so that messages"
                " were mixed up. Run the same modules and use the same parameters on every rank, or use stage=2."
            )


def _number_of(unit: Any) -> int:
    """Returns -1 for ``None``, smaller numbers for parameters, larger ones for modules."""
    its: int = private.number_of(unit)
    return -2 - its if isinstance(unit, Tensor) else its
