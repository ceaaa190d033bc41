"""The module's parameters, and what the engine does at the moment: state that its parts share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

import torch
from torch import Tensor, nn

from lightning_zero.engines.deepspeed import private
from lightning_zero.private.torch import own_parameters


class Phase(Enum):
    """What the engine does at the moment. Between steps and in a step, user code's first touch gathers a parameter."""

    BETWEEN = auto()
    """User code runs between steps: a parameter is full from its first touch until the window ends, and DeepSpeed's own
    hooks do nothing."""
    STEP = auto()
    """Inside ``DeepSpeedEngine.run``: at stage 3 a parameter that user code touches is gathered in place, until the
    step ends."""
    BACKWARD = auto()
    """Inside ``DeepSpeedEngine.backward``, as in a step. A user's own backward may run inside a step."""


class Parameters:
    """The parameters of ``module`` before they are sharded.

    Attributes:
        phase: What the engine does at the moment.
        named: Parameters by name, in the module's order, which is the same on all ranks.
        held: Parameters that DeepSpeed shards, in the order in which ranks gather them; must not become a set.
        replicated: All others (see :mod:`~lightning_zero.engines.deepspeed.engine`).
        shards: Masters and gradients. ``None`` before optimizers are attached, without optimizers, and at the end of
            the run: then parameters are read and written, but nothing is stepped.
    """

    def __init__(self, module: nn.Module, stage3: bool) -> None:
        self.module, self.stage3 = module, stage3
        self.named = dict(module.named_parameters())
        self._dtype = _main_dtype(self.named.values())
        self.held = dict.fromkeys(p for p in self.named.values() if p.dtype == self._dtype and p.numel())
        self.replicated = [p for p in self.named.values() if p not in self.held]
        self.shards: private.Shards | None = None
        self.phase = Phase.BETWEEN

    def is_between(self) -> bool:
        """Whether user code runs between steps."""
        return self.phase is Phase.BETWEEN

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Sets :attr:`phase` inside the context."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def refuse_training_replicated(self) -> None:
        """Raises ``ValueError`` if a parameter is trained that cannot be sharded."""
        for name, p in self.named.items():
            if p.requires_grad and p not in self.held:
                raise ValueError(
                    f"parameter {name!r} of dtype {p.dtype} and shape {tuple(p.shape)} cannot be trained with"
                    f" engine='deepspeed', whose gradients share buffers of one dtype, {self._dtype}: cast the"
                    " parameter, freeze it if it is empty, or use engine='fsdp2'."
                )

    @property
    def attached(self) -> private.Shards:
        """Returns ``shards``, for callers that run only with an optimizer attached."""
        assert self.shards is not None
        return self.shards

    @contextmanager
    def without_others(self, root: nn.Module) -> Iterator[None]:
        """Removes all parameters but the held ones from ``root`` inside the context, so that DeepSpeed does not shard
        them: replicated parameters, and those that a hook has added (averaged weights)."""
        places = [
            (m, name, p)
            for m in root.modules()
            for name, p in own_parameters(m).items()
            if p is not None and p not in self.held
        ]
        for m, name, _ in places:
            own_parameters(m)[name] = None
        try:
            yield
        finally:
            for m, name, p in places:
                own_parameters(m)[name] = p


def _main_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """The dtype of most elements of the trained parameters; of all parameters if none is trained."""
    params = list(params)
    count: dict[torch.dtype, int] = {}
    for p in [p for p in params if p.requires_grad] or params:
        count[p.dtype] = count.get(p.dtype, 0) + p.numel()
    return max(count, key=lambda dtype: count[dtype])
