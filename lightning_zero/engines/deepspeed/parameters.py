"""The user's view of the module's parameters: shapes, dtypes and attributes before DeepSpeed changes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm.agree import broadcast_coalesced
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.optimizer_step import Managed


class Parameters:
    """Takes over the parameters of ``module`` with rank 0's values (collective).

    Attributes:
        named: Parameters by name, in the module's order, which is the same on all ranks.
        shapes: Full shapes.
        dtypes: The user's dtypes; DeepSpeed may compute in another.
        strides: The user's strides.
        odd: Parameters that cannot be sharded (see :mod:`~lightning_zero.engines.deepspeed.engine`).
        held: All other parameters, in the order in which ranks gather them; must not become a set.
        managed: Masters and gradients. ``None`` before optimizers are attached, without optimizers, and at the end of
            the run: then parameters are read and written, but nothing is stepped.
    """

    def __init__(self, module: nn.Module, stage3: bool) -> None:
        self.module, self.stage3 = module, stage3
        self.named = dict(module.named_parameters())
        self.shapes: dict[Tensor, torch.Size] = {p: private.whole_shape(p) for p in self.named.values()}
        self.dtypes: dict[Tensor, torch.dtype] = {p: p.dtype for p in self.named.values()}
        self.odd = _odd_parameters(self.shapes)
        self._take_built()
        self.strides: dict[Tensor, Any] = {p: _stride(p) for p in self.named.values()}
        self.held = dict.fromkeys(p for p in self.named.values() if p not in set(self.odd))
        self.managed: Managed | None = None
        self._own: dict[Tensor, set[str]] = {}  # names of attributes set before DeepSpeed's start
        self._added: dict[Tensor, set[str]] = {}  # names of attributes set during DeepSpeed's start

    def _take_built(self) -> None:
        """Broadcasts rank 0's values. Parameters that were built sharded (see ``build``) have them already."""
        with torch.no_grad():
            for p in self.odd:
                private.make_whole(p)
            for p in self.named.values():
                private.keep_dtype(p)
        here = [p for p in self.named.values() if not private.is_partitioned(p)]
        broadcast_coalesced([*here, *self.module.buffers()])

    @property
    def attached(self) -> Managed:
        """Returns ``managed``, for callers that run only with an optimizer attached."""
        assert self.managed is not None
        return self.managed

    def before_start(self) -> None:
        """Records the current attributes as the user's."""
        self._own = {p: private.own_attributes(p) for p in self.named.values()}

    def after_start(self) -> None:
        """Records attributes set since :meth:`before_start` as DeepSpeed's and ours; later ones are the user's."""
        self._added = {p: set(vars(p)) - own for p, own in self._own.items()}

    def attributes(self, p: Tensor) -> dict[str, Any]:
        """Returns the attributes that user code has set on ``p``, before or during the run."""
        names = self._own[p] if p in self._own else private.own_attributes(p)
        if p in self._added:
            names = names | {name for name in set(vars(p)) - self._added[p] if not private.is_late(name)}
        return {name: value for name, value in vars(p).items() if name in names}


def _stride(p: Any) -> tuple[int, ...]:
    return torch.empty(private.whole_shape(p), device="meta").stride() if private.is_partitioned(p) else p.stride()


def _odd_parameters(shapes: Mapping[Any, torch.Size]) -> list[Any]:
    """Returns the parameters that cannot share a flat with the others: 0-dim, empty, or of a minority dtype."""
    count: dict[torch.dtype, int] = {}
    for p, shape in shapes.items():
        count[p.dtype] = count.get(p.dtype, 0) + shape.numel()
    main = max(count, key=lambda dtype: count[dtype])
    return [p for p, shape in shapes.items() if p.dtype != main or len(shape) == 0 or shape.numel() == 0]
