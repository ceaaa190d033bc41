"""The settings ``activation_checkpointing`` and ``compile``: chosen modules run a changed forward.

It recomputes activations in the backward (PyTorch's ``checkpoint``), is compiled like a call of ``block.compile()``, or
both: first checkpoint, then compile, then shard. Only a module's ``forward`` is changed: its hooks, including those of
``fully_shard`` and of this package, run once around it.

Modules keep their class, their names in a ``state_dict`` and their attributes. Copies and pickles are ordinary modules,
because the only attribute set here is one that torch itself leaves out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_zero.config import ActivationCheckpointingConfig, CompileConfig
from lightning_zero.engines.units import LAYERS, matching
from lightning_zero.private.torch import (
    KEPT_WITHOUT_HOOKS,
    call_with_hooks,
    compiled_call,
    set_compiled_call,
    version_of,
)

Forward = Callable[..., Any]
_aten = torch.ops.aten
_MATRIX_PRODUCTS = frozenset([_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default])
_UNCOUNTED = frozenset([_aten.unsafe_chunk.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default])
"""Operators that return views with separate version counters: a write to such a view changes a matrix product that was
kept, and autograd does not detect it."""
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")


class Forwards:
    """Modules that recompute their activations or are compiled, between :meth:`begin` and :meth:`undo`.

    Units that the user has compiled stay as they are.

    Args:
        recomputes: The modules to recompute, and the tensors to keep.
        compiles: Whether and how to compile ``units``.
        module: The module, not yet sharded.
        units: The shard units except the root's; they are recomputed unless ``recomputes`` names other modules.
        device: The device that computes.
        before: Called in the backward with a module whose activations are about to be recomputed.

    Raises:
        ValueError: On all ranks, if there is nothing to recompute or the user has compiled a module to recompute.
    """

    def __init__(
        self,
        recomputes: ActivationCheckpointingConfig,
        compiles: CompileConfig,
        module: nn.Module,
        units: Sequence[nn.Module],
        device: torch.device,
        before: Callable[[nn.Module], None] = lambda module: None,
    ) -> None:
        self._forwards: dict[nn.Module, Forward] = {}
        recomputed = [m for m in recomputed_modules(recomputes, module, units) if m is not module]
        names = {m: name for name, m in module.named_modules()}
        if by_hand := [names[m] for m in recomputed if compiled_call(m) is not None]:
            raise ValueError(
                f"activation_checkpointing={recomputes.target!r} of {by_hand[0]!r}, which you have compiled: use"
                " compile='units' instead of your own compile(), or name other modules."
            )
        for m in recomputed:
            self._forwards[m] = _recomputing(m, _keeps_products(recomputes, m), partial(before, m))
        for unit in units if compiles.target == "units" else ():
            if compiled_call(unit) is None:  # equal blocks share their forward's code, and so the compiled graphs
                self._forwards[unit] = _compiled(self._forwards.get(unit, unit.forward), compiles)
        if recomputes.offload and device.type != "cpu":
            on_host = OnHost(device)
            self._forwards |= {m: _within(on_host, self._forwards[m]) for m in recomputed}

    def begin(self) -> None:
        """Changes the forwards of the modules."""
        for m, forward in self._forwards.items():
            set_compiled_call(m, _with_hooks(m, forward))

    def undo(self) -> None:
        """Gives the modules their own forwards back."""
        for m in self._forwards:
            set_compiled_call(m, None)
        self._forwards = {}


def _keeps_products(config: ActivationCheckpointingConfig, module: nn.Module) -> bool:
    has_cells = any(isinstance(m, (nn.RNNBase, nn.RNNCellBase)) for m in module.modules())  # they use _UNCOUNTED
    return config.target == "selective" and not has_cells


def _compiled(forward: Forward, config: CompileConfig) -> Forward:
    return torch.compile(
        forward,
        backend=config.backend or "inductor",
        mode=config.mode,
        dynamic=config.dynamic,
        fullgraph=config.fullgraph,
    )


def _with_hooks(module: nn.Module, forward: Forward) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        return call_with_hooks(module, forward, *args, **kwargs)

    return call


def _within(on_host: OnHost, forward: Forward) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        with on_host:  # checkpoint saves only the inputs
            return forward(*args, **kwargs)

    return call


class OnHost(saved_tensors_hooks):
    """Context in which tensors saved for the backward are kept in pinned host memory instead of on ``device``.

    Copies run on a stream of their own, beside the computation, which never waits for the copies to the host. Unlike
    with PyTorch's ``save_on_cpu``, a later write to a saved tensor could therefore reach its copy; so such a write is
    an error in the backward, as it is without hooks. Parameters, ``DTensor`` and sparse tensors stay on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        super().__init__(self._keep, self._bring)

    def _keep(self, tensor: Tensor) -> Any:
        if isinstance(tensor, (nn.Parameter, DTensor)) or tensor.device.type == "cpu" or tensor.is_sparse:
            return tensor
        kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            kept.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        versions = tensor.detach()
        versions.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # keeps the counter, not the memory
        return kept, versions, version_of(tensor)

    def _bring(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        value, versions, version = kept
        if version_of(versions) != version:
            raise RuntimeError(
                "an input of a recomputed module was written to in place after the module had run: write to a copy of"
                " it, or do not recompute that module (activation_checkpointing.units)."
            )
        with self._module.stream(self._stream):
            tensor: Tensor = value.to(versions.device, non_blocking=True)
        self._module.current_stream().wait_stream(self._stream)
        tensor.record_stream(self._module.current_stream())
        return tensor


def recomputed_modules(
    config: ActivationCheckpointingConfig, module: nn.Module, units: Sequence[nn.Module]
) -> Sequence[nn.Module]:
    """Returns the modules that ``config`` names, or else ``units``; none if ``config`` is off. Single layers are left
    out if there are others, because they save hardly more than their input.

    Raises:
        ValueError: If there is nothing to recompute.
    """
    if not config.is_on:
        return []
    if config.units is not None:
        return matching(module, config.units, "activation_checkpointing.units")
    if not [unit for unit in units if unit is not module]:
        raise ValueError(
            f"activation_checkpointing={config.target!r}, but the module has no unit to recompute: name its blocks, as"
            " activation_checkpointing=['Block'], or in units=[...]."
        )
    return [unit for unit in units if not isinstance(unit, LAYERS)] or units


def _recomputing(module: nn.Module, keeps_products: bool, before: Callable[[], None]) -> Forward:
    """Supports all kinds of arguments and ``torch.autograd.grad``: recomputes when the backward unpacks the first saved
    tensor."""
    forward = module.forward
    kept: dict[str, Any] = {"context_fn": costly_is_kept, **KEPT_WITHOUT_HOOKS} if keeps_products else {}

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(_from_the_same_state(module, forward, before), *args, use_reentrant=False, **kept, **kwargs)

    return recomputing


def _from_the_same_state(module: nn.Module, forward: Forward, before: Callable[[], None]) -> Forward:
    """Wraps ``forward`` for one forward and its recomputations. A recomputation calls ``before``, starts from the
    buffers of the forward and leaves the module's current buffers unchanged: otherwise batch norm would count each
    batch twice and spectral norm would compute other weights."""
    found: list[tuple[nn.Module, str, Tensor]] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if torch.compiler.is_compiling():  # a graph writes its buffers only in the forward
            return forward(*args, **kwargs)
        if found is None:
            found = [(m, name, buffer.detach().clone()) for m, name, buffer in _held_buffers(module)]
            return forward(*args, **kwargs)
        before()
        now = _held_buffers(module)
        try:
            # Replace buffers, never write to them: autograd may have saved the current ones.
            for m, name, buffer in found:
                setattr(m, name, buffer.clone())  # a retained graph is recomputed from `found` again
            return forward(*args, **kwargs)
        finally:  # checkpoint stops a recomputation early with an exception
            for m, name, buffer in now:
                setattr(m, name, buffer)

    return call


def _held_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [(m, name, buffer) for m in module.modules() for name, buffer in m.named_buffers(recurse=False)]


def costly_is_kept() -> Any:
    """A ``context_fn`` for ``checkpoint`` that keeps every second matrix product and all attention outputs, like
    torchtitan's selective checkpointing.

    Raises:
        ValueError: In the forward, if a kept product could be changed without detection.
    """
    products = {False: 0, True: 0}  # is_recompute -> count: forward and recomputation must keep the same products

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in _UNCOUNTED:
            raise ValueError(
                f"activation_checkpointing='selective' of code that calls torch.{func.overloadpacket.__name__}: a"
                " write to its results changes a matrix product that is kept. Use torch.chunk or torch.split, or"
                " activation_checkpointing='full'."
            )
        if func in _MATRIX_PRODUCTS:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        else:
            keeps = func.__name__.startswith(_ATTENTION)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
