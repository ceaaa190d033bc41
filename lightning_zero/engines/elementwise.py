"""Optimizers that may step on shards of parameters.

An *element-wise* optimizer updates every element from that element's own history, so a step on shards equals the step
on full tensors. No trial can prove this property: settings in parameter groups, the size of a tensor or the number of
steps may enable another computation. It is therefore assumed only for PyTorch's classes, whose code was read, and for
classes that the user declares.
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


def keys_besides_elements(optimizer: Optimizer) -> frozenset[str]:
    """State keys under which an element-wise optimizer keeps tensors of another shape than the parameter's, such as a
    counter of shape ``(1,)``. The shape alone would not tell such a tensor from the state of a one-element shard.
    PyTorch's optimizers have only 0-dim ones; declared optimizers are tried on a small tensor.

    Raises:
        ValueError: If the trial fails with the settings of the first group, or if the optimizer keeps parameters in an
            attribute, where shards cannot replace them.
    """
    if type(optimizer) in KNOWN_ELEMENTWISE:
        return frozenset()
    if (attribute := holds_parameters_in(optimizer)) is not None:
        name = type(optimizer).__name__
        raise ValueError(
            f"elementwise_optimizers={[name]}: a {name} keeps parameters in its attribute {attribute!r}, where"
            " shards cannot replace them; leave it out, and it steps on full tensors."
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
                f"elementwise_optimizers={[name]}: a trial of {name} with these settings on a small tensor failed"
                f" ({type(error).__name__}: {error}), so it is unknown which of its states to shard; leave it out, and"
                " it steps on full tensors."
            ) from error
        return frozenset(key for key, v in tried.state[p].items() if isinstance(v, Tensor) and v.shape != p.shape)


def _like(optimizer: Optimizer, tensors: list[Tensor]) -> Optimizer:
    accepted = inspect.signature(type(optimizer).__init__).parameters
    first: dict[str, Any] = {**optimizer.defaults, **(optimizer.param_groups[0] if optimizer.param_groups else {})}
    settings = {k: v for k, v in first.items() if k in accepted and k != "params"}
    return type(optimizer)(tensors, **settings)
