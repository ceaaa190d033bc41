"""The module's parameters as the user made them, beside DeepSpeed's forms of them."""

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
        named: By name, in the module's order, which is alike on all ranks.
        shapes: Whole ones.
        dtypes: The user's own: DeepSpeed may compute in another.
        strides: The user's own.
        odd: Those that no flat takes (see :mod:`~lightning_zero.engines.deepspeed.engine`).
        held: All others. In order, because ranks gather in it.
        managed: Masters and gradients. ``None`` before an optimizer is attached, if there is none, and at the end: then
            parameters are read and written, and nothing is stepped.
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
        self._own: dict[Tensor, set[str]] = {}  # names of attributes before DeepSpeed's start
        self._added: dict[Tensor, set[str]] = {}  # and of those that came with it

    def _take_built(self) -> None:
        """Broadcasts rank 0's values; parameters that were built sharded (see ``build``) have them already."""
        with torch.no_grad():
            for p in self.odd:
                private.make_whole(p)
            for p in self.named.values():
                private.keep_dtype(p)
        here = [p for p in self.named.values() if not private.is_partitioned(p)]
        broadcast_coalesced([*here, *self.module.buffers()])

    @property
    def attached(self) -> Managed:
        """``managed``, where an optimizer must be attached."""
        assert self.managed is not None
        return self.managed

    def before_start(self) -> None:
        """Takes the attributes of now for the user's."""
        self._own = {p: private.own_attributes(p) for p in self.named.values()}

    def after_start(self) -> None:
        """Takes those that have come since for DeepSpeed's and ours; later ones are the user's again."""
        self._added = {p: set(vars(p)) - own for p, own in self._own.items()}

    def attributes(self, p: Tensor) -> dict[str, Any]:
        """Those that the user has put on ``p``, before the run or in it."""
        names = self._own[p] if p in self._own else private.own_attributes(p)
        if p in self._added:
            names = names | {name for name in set(vars(p)) - self._added[p] if not private.is_late(name)}
        return {name: value for name, value in vars(p).items() if name in names}


def _stride(p: Any) -> tuple[int, ...]:
    return torch.empty(private.whole_shape(p), device="meta").stride() if private.is_partitioned(p) else p.stride()


def _odd_parameters(shapes: Mapping[Any, torch.Size]) -> list[Any]:
    """Those that cannot lie in a flat with the others."""
    count: dict[torch.dtype, int] = {}
    for p, shape in shapes.items():
        count[p.dtype] = count.get(p.dtype, 0) + shape.numel()
    main = max(count, key=lambda dtype: count[dtype])
    return [p for p, shape in shapes.items() if p.dtype != main or len(shape) == 0 or shape.numel() == 0]
