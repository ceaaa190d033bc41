"""How activations are recomputed beside DeepSpeed's stage 3, and the settings of DeepSpeed's own function for that.

DeepSpeed's own empties a unit's inputs in place when it moves them to host memory, so a module that uses them again (a
residual around the unit, a mask that all blocks share) would compute with nothing: ``activation_checkpointing`` is
PyTorch's ``checkpoint``. Modules written for DeepSpeed's may still call it, and are given its settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lightning_zero.private.torch import pytree


def inside_backward(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With a graph of its own, whose nodes tell stage 3 when to gather: recomputed for the first graph, parameters
    would be given back between their use and their gradient.

    That kind of checkpoint only knows tensors that are arguments or results themselves, and needs one that requires a
    gradient.
    """
    leaves, inside = pytree.tree_flatten((args, kwargs))
    shape: Any = None

    def run(_: torch.Tensor, *leaves: Any) -> tuple[Any, ...]:
        nonlocal shape
        its_args, its_kwargs = pytree.tree_unflatten(leaves, inside)
        results, shape = pytree.tree_flatten(forward(*its_args, **its_kwargs))
        return tuple(results)

    results = checkpoint(run, torch.zeros((), requires_grad=True), *leaves, use_reentrant=True)
    return pytree.tree_unflatten(results, shape)


def configure_deepspeeds_own(config: Mapping[str, Any]) -> None:
    """Gives ``deepspeed.checkpointing.checkpoint``, where a module calls it, the section of ``config``."""
    section = config.get("activation_checkpointing")
    if not section:
        return
    import deepspeed

    deepspeed.checkpointing.configure(
        None,
        partition_activations=bool(section.get("partition_activations", False)),
        contiguous_checkpointing=bool(section.get("contiguous_memory_optimization", False)),
        num_checkpoints=section.get("number_checkpoints"),
        checkpoint_in_cpu=bool(section.get("cpu_checkpointing", False)),
        synchronize=bool(section.get("synchronize_checkpoint_boundary", False)),
        profile=bool(section.get("profile", False)),
    )
