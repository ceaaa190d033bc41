"""Passes the module to ``deepspeed.initialize``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import ZeroConfig
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.ds_config import RunFacts, ds_config
from lightning_zero.engines.deepspeed.optimizer_step import Joined
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.private.torch import DisableTorchFunction, own_parameters


def start(
    root: nn.Module,
    params: Parameters,
    trainable: list[nn.Parameter],
    joined: Joined | None,
    config: ZeroConfig,
    device: torch.device,
    facts: Mapping[str, Any],
) -> Any:
    """Returns DeepSpeed's engine for ``root``; its flats hold ``trainable``, grouped as in ``joined`` (collective).

    Args:
        facts: The Trainer's settings, see :class:`RunFacts`.
    """
    numel = sum(shape.numel() for shape in params.shapes.values())
    run = RunFacts(world_size=dist.get_world_size(), device_type=device.type, numel=numel, **facts)
    not_its = {p for p in root.parameters() if p not in params.held}  # odd, or added in a hook (averaged weights)
    with private.environment(device), _without(not_its, params.module):
        deepspeed = private.prepare(device)
        private.count_modules_from_zero()
        if not any(map(private.is_managed, params.held)):
            private.count_parameters_from_zero()
        with DisableTorchFunction(), private.partial_offload(Joined):
            engine, *_ = deepspeed.initialize(
                model=root,
                optimizer=joined,
                model_parameters=trainable,
                config=ds_config(config, run),
                dist_init_required=False,
            )
    return engine


@contextmanager
def _without(hidden: Iterable[nn.Parameter], module: nn.Module) -> Iterator[None]:
    """Removes ``hidden`` from ``module`` inside the context, so that DeepSpeed does not shard them."""
    mine = set(hidden)
    places = [
        (m, name, p) for m in module.modules() for name, p in own_parameters(m).items() if p is not None and p in mine
    ]
    for m, name, _ in places:
        own_parameters(m)[name] = None
    try:
        yield
    finally:
        for m, name, p in places:
            own_parameters(m)[name] = p


def flat_groups(trainable: list[nn.Parameter], optimizers: list[Optimizer]) -> list[list[Tensor]]:
    """Splits ``trainable`` into lists that can be stepped separately: one per parameter group, or per set of groups
    that share parameters."""
    held: dict[Tensor, list[tuple[int, int]]] = {p: [] for p in trainable}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p in held:
                    held[p].append((i, j))
    groups: dict[tuple[tuple[int, int], ...], list[Tensor]] = {}
    for p, where in held.items():
        groups.setdefault(tuple(where), []).append(p)
    return list(groups.values())
