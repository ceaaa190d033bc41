"""Optimizers that may step on shards of parameters.

An *element-wise* optimizer updates every element from that element's own history, so a step on shards equals the step
on full tensors. No trial can prove this property: settings in parameter groups, the size of a tensor or the number of
steps may enable another computation. It is therefore assumed only for PyTorch's classes, whose code was read, and for
classes that the user declares.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engines.optimizer_family import holds_parameters_in
from lightning_zero.private import torch_optim

KNOWN_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop ASGD".split()
)
KNOWN_NOT_ELEMENTWISE = frozenset(
    getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon", "SparseAdam") if hasattr(torch.optim, name)
)
"""PyTorch's optimizers that are not element-wise: users get no advice to declare them."""
_KNOWN = KNOWN_ELEMENTWISE | KNOWN_NOT_ELEMENTWISE


def is_known(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is of one of PyTorch's own classes: no subclass, and ``step`` is not replaced."""
    return type(optimizer) in _KNOWN and not torch_optim.is_step_replaced(optimizer)


def is_elementwise(optimizer: Optimizer, declared: Collection[str] = ()) -> bool:
    """Whether a step on shards is known to equal a step on full tensors; see the file's docstring. ``declared`` has
    names of classes."""
    if type(optimizer) in KNOWN_ELEMENTWISE:
        return is_known(optimizer)
    return type(optimizer).__name__ in declared


def note_on_full_steps(optimizers: Collection[Optimizer], declared: Collection[str]) -> str:
    """Returns a line for the user on optimizers that step on full tensors, or an empty string: their memory, and how to
    declare them. Their parameters must have their full shapes."""
    full = [o for o in optimizers if not is_elementwise(o, declared)]
    if not full:
        return ""
    names = sorted({type(o).__name__ for o in full})
    params = {p for o in full for group in o.param_groups for p in group["params"]}
    size = f"{sum(p.numel() * p.element_size() for p in params) / 2**30:.3g} GiB"
    unknown = sorted({type(o).__name__ for o in full if not is_known(o)})
    advice = (
        f" If an element's update depends only on that element's own history, set elementwise_optimizers={unknown} to"
        " step on shards."
    )
    return (
        f"{', '.join(names)} steps on full tensors, as under DDP: each rank gathers parameters and gradients as the"
        f" step touches them ({size} each), and keeps full states ({size} for each state of a parameter's shape)."
        f"{advice if unknown else ''}"
    )


def refuse_held_parameters(optimizer: Optimizer) -> None:
    """Raises ``ValueError`` if an element-wise optimizer keeps parameters in an attribute, where shards cannot replace
    them."""
    if type(optimizer) in KNOWN_ELEMENTWISE or (attribute := holds_parameters_in(optimizer)) is None:
        return
    name = type(optimizer).__name__
    raise ValueError(
        f"elementwise_optimizers={[name]}: a {name} keeps parameters in its attribute {attribute!r}, where shards"
        " cannot replace them; leave it out, and it steps on full tensors."
    )


def refuse_other_states(optimizer: Optimizer) -> None:
    """Raises ``ValueError`` if an element-wise optimizer keeps a tensor of another shape than its parameter's, such as
    a counter of shape ``(1,)``: its shape alone would not tell it from the state of a one-element shard."""
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                name = type(optimizer).__name__
                raise ValueError(
                    f"elementwise_optimizers={[name]}: a {name} keeps the state {key!r} of shape {tuple(value.shape)}"
                    f" for a shard of shape {tuple(p.shape)}, so which of its states to shard is unknown; leave it out,"
                    " and it steps on full tensors."
                )
