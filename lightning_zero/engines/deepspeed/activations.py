"""Activation checkpointing under DeepSpeed's stage 3.

``activation_checkpointing`` uses PyTorch's ``checkpoint``. DeepSpeed's own empties a unit's inputs in place when it
moves them to host memory: a module that uses them again (a residual around the unit, a mask shared by all blocks)
would compute with empty tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.private.torch import pytree


class InsideBackward:
    """Recomputes a module in the backward with a graph of its own (a reentrant checkpoint).

    The nodes of that graph tell stage 3 when to gather. A module recomputed for the first graph would have its
    parameters resharded between their use and their gradient.

    A reentrant checkpoint tracks only tensors that are arguments or results, and needs one that requires a gradient.
    A term that the module stores beside its output (a router's auxiliary loss) would get no gradient.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._has_looked = False

    def __call__(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``forward``, and calls ``forward`` again in the backward.

        Raises:
            ValueError: In the first forward, if the module stores tensors on itself.
        """
        if self._has_looked:
            return _inside_backward(forward, args, kwargs)
        before = _kept(self._module)  # keeps the tensors alive: a new one must not reuse the id of a freed one
        results = _inside_backward(forward, args, kwargs)
        old = {id(tensor) for _, tensor in before}
        if new := list(dict.fromkeys(name for name, tensor in _kept(self._module) if id(tensor) not in old)):
            raise ValueError(
                f"activation_checkpointing of {self._name!r} with engine='deepspeed' at stage 3: its forward stores"
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
    """Returns the floating-point tensors in attributes (or lists in attributes) of ``module`` and its submodules."""
    return [
        (f"{name}.{attribute}" if name else attribute, tensor)
        for name, each in module.named_modules()
        for attribute, value in vars(each).items()
        if not attribute.startswith("_")
        for tensor in pytree.tree_leaves(value)
        if type(tensor) is torch.Tensor and tensor.is_floating_point()
    ]
