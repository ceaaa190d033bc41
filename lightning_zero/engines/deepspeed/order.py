"""Stage 3: checks that ranks gather the same parameters and reduce the same gradients, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from lightning_zero.comm.agree import IN_STEP, Agreement
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.parameters import Parameters

_A_BUCKET = "a bucket of gradients"
_BUCKETS_DIFFER = (
    "stage=3: ranks ran the same modules but used different parameters of them, so that their gradients came in"
    " different buckets. Set reduce_bucket_size={} in deepspeed_config, which fits all gradients in one bucket, and"
    " leave out reduce_scatter, or use stage=2."
)


class Order:
    """Keeps one rolling hash of the order in which this rank gathers and reduces.

    The ranks' hashes are compared at the end of each window. CPU ranks also compare them before each gather and
    reduction, so that all raise before messages are mixed up or a rank waits for ever. On an accelerator each of these
    messages would block the host.

    Args:
        params: All parameters of the module.
        agreement: Channel to all ranks; ``None`` disables the checks.
        on_cpu: Whether ranks agree on each gather and bucket.

    Attributes:
        mark: The hash of all gathers and buckets since the last comparison.
    """

    def __init__(self, params: Parameters, agreement: Agreement | None, on_cpu: bool) -> None:
        self._params = params
        self._names = {id(unit): name for name, unit in (*params.module.named_modules(), *params.named.items())}
        self._is_followed = params.stage3 and agreement is not None
        self._agreement = agreement if on_cpu else None
        self.mark = 0

    def follow_buckets(self, engine: Any) -> None:
        """Starts recording the buckets of DeepSpeed's ``engine``."""
        if self._is_followed:
            private.before_buckets(engine, self._reduces)

    def gathers(self, unit: Any = None) -> None:
        """Records that ``unit``, a module or a parameter, is gathered next in a step (collective on CPUs).

        ``None`` follows the last unit of a forward."""
        if self._is_followed and not self._params.is_between():
            self._next(self._names.get(id(unit), ""))

    def _reduces(self, bucket: Sequence[Any]) -> None:
        """Records that the gradients of the parameters in ``bucket`` are reduced next."""
        self._next(_A_BUCKET, *(self._names.get(id(p), "") for p in bucket))

    def _next(self, event: str, *names: str) -> None:
        self.mark = crc32(repr((event, names)).encode(), self.mark)
        if self._agreement is not None:
            ends = torch.tensor([self.mark, -self.mark], device="cpu")
            self._agreement.all_reduce(ends, dist.ReduceOp.MAX, IN_STEP).wait()
            if ends.sum():
                self._refuse(set(self._agreement.gather(event, "an error about the order of gathers")))

    def _refuse(self, events: set[str]) -> None:
        if _A_BUCKET in events:
            numel = sum(p.numel() for p in self._params.named.values())
            raise ValueError(_BUCKETS_DIFFER.format(numel))
        raise ValueError(
            f"stage=3: the units {', '.join(map(repr, sorted(events - {''})))} ran on some ranks only, or in another"
            " order, but all ranks must gather the same parameters together. Run them on every rank, or use stage=2."
        )

    def compare(self, largest: int, smallest: int) -> None:
        """Raises ``ValueError`` if the marks differ between ranks: ``largest`` is not ``smallest``."""
        self.mark = 0
        if largest != smallest:
            raise ValueError(
                "stage=3: ranks ran modules in different orders, or used different parameters of them, so that messages"
                " were mixed up. Run the same modules and use the same parameters on every rank, or use stage=2."
            )
