"""The optimizers that may step on a part of a parameter.

An *element-wise* optimizer updates every element from that element's own history, so that a step on parts equals the
step on the whole. No trial can prove it: settings in parameter groups, the size of a tensor or the number of steps may
switch another computation on. So it is known of PyTorch's own classes, by reading them, and of what a user declares.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engines.optimizer_family import holds_parameters_in
from lightning_zero.private import torch_optim
from lightning_zero.private.torch import DisableTorchFunction

KNOWN_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop ASGD".split()
)
KNOWN_WHOLE = frozenset(
    getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon", "SparseAdam") if hasattr(torch.optim, name)
)
"""PyTorch's own that look across elements: nobody needs to be told of them."""
_KNOWN = KNOWN_ELEMENTWISE | KNOWN_WHOLE


def is_known(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is exactly one of PyTorch's own, its ``step`` included: no subclass, nothing patched."""
    return type(optimizer) in _KNOWN and not torch_optim.is_step_replaced(optimizer)


def is_declared(optimizer: Optimizer, declared: Collection[str]) -> bool:
    """Whether its class is among ``declared``, by name or with its module in front."""
    own = type(optimizer)
    return own.__name__ in declared or f"{own.__module__}.{own.__qualname__}" in declared


def is_elementwise(optimizer: Optimizer, declared: Collection[str] = ()) -> bool:
    """Whether stepping on parts of a parameter is known to equal stepping on the whole of it; see the module's text."""
    if type(optimizer) in KNOWN_ELEMENTWISE:
        return is_known(optimizer)
    return is_declared(optimizer, declared)


def note_on_full_steps(optimizers: Collection[Optimizer], declared: Collection[str]) -> str:
    """A line for the user on those that step on full tensors: how much that is, and how to declare them; or nothing.
    Their parameters must be full, or look so."""
    full = [o for o in optimizers if not is_elementwise(o, declared)]
    if not full:
        return ""
    names = sorted({type(o).__name__ for o in full})
    params = {p for o in full for group in o.param_groups for p in group["params"]}
    size = f"{sum(p.numel() * p.element_size() for p in params) / 2**30:.3g} GiB"
    unknown = sorted({type(o).__name__ for o in full if not is_known(o)})
    advice = (
        f" If an element's update depends on nothing but that element's own history, elementwise_optimizers={unknown}"
        " has it step on shards."
    )
    return (
        f"{', '.join(names)} steps on full tensors, as under DDP: each rank gathers parameters and gradients as the"
        f" step touches them ({size} each), and keeps full states ({size} for each state of a parameter's shape)."
        f"{advice if unknown else ''}"
    )


def keys_beside_elements(optimizer: Optimizer) -> frozenset[str]:
    """State keys of an element-wise optimizer under which it keeps tensors of another shape than its parameter's, such
    as a counter of shape ``(1,)``: beside a part of one element their shape does not tell. PyTorch's own have only
    0-dim ones; those that were declared are tried out.

    Raises:
        ValueError: For one that cannot be tried with the settings of its first group, or that keeps parameters where
            no part of them can stand.
    """
    if type(optimizer) in KNOWN_ELEMENTWISE:
        return frozenset()
    if (attribute := holds_parameters_in(optimizer)) is not None:
        name = type(optimizer).__name__
        raise ValueError(
            f"elementwise_optimizers={[name]}: a {name} keeps parameters in its attribute {attribute!r}, where their"
            " shards cannot take their place; leave it out, and it steps on full tensors."
        )
    with DisableTorchFunction():
        p = torch.ones(5, requires_grad=True)
        p.grad = torch.ones(5)
        try:
            tried = _like(optimizer, [p])
            tried.step()
        except Exception as error:
            name = type(optimizer).__name__
            raise ValueError(
                f"elementwise_optimizers={[name]}: a {name} with the settings of this one could not be tried on a small"
                f" tensor ({type(error).__name__}: {error}), so which of its states are sharded cannot be told; leave"
                " it out, and it steps on full tensors."
            ) from error
        return frozenset(key for key, v in tried.state[p].items() if isinstance(v, Tensor) and v.shape != p.shape)


def _like(optimizer: Optimizer, tensors: list[Tensor]) -> Optimizer:
    accepted = inspect.signature(type(optimizer).__init__).parameters
    first: dict[str, Any] = {**optimizer.defaults, **(optimizer.param_groups[0] if optimizer.param_groups else {})}
    settings = {k: v for k, v in first.items() if k in accepted and k != "params"}
    return type(optimizer)(tensors, **settings)
