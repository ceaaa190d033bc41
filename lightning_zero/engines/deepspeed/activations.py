"""Recomputation of activations beside DeepSpeed's stage 3.

DeepSpeed's own empties a unit's inputs in place when it moves them to host memory, so a module that uses them again (a
residual around the unit, a mask that all blocks share) would compute with nothing: ``activation_checkpointing`` is
PyTorch's ``checkpoint``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.private.torch import pytree


class InsideBackward:
    """With a graph of its own, whose nodes tell stage 3 when to gather: recomputed for the first graph, parameters
    would be given back between their use and their gradient.

    That kind of checkpoint only knows tensors that are arguments or results themselves, and needs one that requires a
    gradient. A term that the module keeps beside its output (a router's auxiliary loss) would have none.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._has_looked = False

    def __call__(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``forward``, and again in the backward.

        Raises:
            ValueError: In the first forward, where the module keeps terms.
        """
        if self._has_looked:
            return _inside_backward(forward, args, kwargs)
        before = _kept(self._module)  # held: a new tensor must not have the id of one that is gone
        results = _inside_backward(forward, args, kwargs)
        old = {id(tensor) for _, tensor in before}
        if new := list(dict.fromkeys(name for name, tensor in _kept(self._module) if id(tensor) not in old)):
            raise ValueError(
                f"activation_checkpointing of {self._name!r} with engine='deepspeed' at stage 3: its forward keeps"
                f" tensors in {', '.join(map(repr, new[:3]))}, which would reach the loss without gradients. Use"
                " engine='fsdp2' or stage=2, return them, or recompute other modules: activation_checkpointing=[...]."
            )
        self._has_looked = True
        return results


def _inside_backward(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, inside = pytree.tree_flatten((args, kwargs))
    shape: Any = None

    def run(_: torch.Tensor, *leaves: Any) -> tuple[Any, ...]:
        nonlocal shape
        its_args, its_kwargs = pytree.tree_unflatten(leaves, inside)
        results, shape = pytree.tree_flatten(forward(*its_args, **its_kwargs))
        return tuple(results)

    results = checkpoint(run, torch.zeros((), requires_grad=True), *leaves, use_reentrant=True)
    return pytree.tree_unflatten(results, shape)


def _kept(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Floating-point tensors in attributes of ``module`` and of those inside it, or in lists there."""
    return [
        (f"{name}.{attribute}" if name else attribute, tensor)
        for name, each in module.named_modules()
        for attribute, value in vars(each).items()
        if not attribute.startswith("_")
        for tensor in pytree.tree_leaves(value)
        if type(tensor) is torch.Tensor and tensor.is_floating_point()
    ]
