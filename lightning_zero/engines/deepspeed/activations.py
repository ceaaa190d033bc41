"""Activation checkpointing of a module's units, whose inputs wait in host memory.

PyTorch's ``checkpoint`` and ``save_on_cpu`` do it. DeepSpeed's own function empties a unit's inputs in place when it
moves them to host memory, so a module that uses them again (a residual around the unit, a mask that all blocks share)
would compute with nothing; modules written for it may still call it, and are given its settings.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.units import ROOT, plan_units
from lightning_zero.private.torch import pytree


class Recomputed:
    """The units of ``module`` compute their activations again in the backward, until :meth:`close`.

    Args:
        module: Not yet sharded.
        units, min_unit_numel: As in ``ZeroConfig``.
        on_cpu: The units' inputs, which are kept, wait in host memory.
        gathers: Parameters are gathered for each use (stage 3); losses that need ``create_graph`` are then impossible.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[str] | None, min_unit_numel: int, on_cpu: bool, gathers: bool
    ) -> None:
        if any(map(private.is_managed, module.parameters())):
            min_unit_numel = 0  # sharded by zero.Init: they look empty
        plan = plan_units(module, units, min_unit_numel)
        self._units = [unit.module for unit in plan.units if unit.name != ROOT and unit.module is not module]
        if not self._units:
            raise ValueError(
                "deepspeed.activation_checkpointing=True, but the module has no unit to checkpoint: name its blocks in"
                " units=[...]."
            )
        self._before = [vars(unit).get("forward") for unit in self._units]
        for unit in self._units:
            unit.forward = _recomputing(unit.forward, on_cpu, gathers)

    def __len__(self) -> int:
        return len(self._units)

    def close(self) -> None:
        """The units keep their activations again."""
        for unit, forward in zip(self._units, self._before, strict=True):
            if forward is None:
                vars(unit).pop("forward", None)
            else:
                unit.forward = forward
        self._units, self._before = [], []


def _recomputing(forward: Any, on_cpu: bool, gathers: bool) -> Any:
    recompute = _inside_backward if gathers else _on_unpacking

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The hooks get the inputs, which checkpoint itself saves; it drops the tensors that forward would save.
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if on_cpu else nullcontext():
            return recompute(forward, args, kwargs)

    return call


def _on_unpacking(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """When the first tensor is needed again; any kind of arguments, ``torch.autograd.grad`` too."""
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _inside_backward(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
