"""An optimizer and the optimizers that it wraps (Lookahead, SAM), with all their states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_PUBLIC = ("param_groups", "state", "defaults")
_DEPTH = 4
"""Depth to which an attribute's lists, tuples, sets and dicts are searched."""


def family(optimizer: Optimizer) -> list[Optimizer]:
    """Returns ``optimizer`` and the optimizers that it wraps, outermost first."""
    members: list[Any] = [optimizer]
    for member in members:
        for _, value in _attributes(member):
            found = filter(_is_optimizer, _leaves(value, _DEPTH, skips_tensors=True))
            members += [each for each in found if not any(each is m for m in members)]
    return members


def states(members: list[Optimizer]) -> list[dict[Any, Any]]:
    """Returns the states of all members, each once: members may share them."""
    return list({id(member.state): member.state for member in members}.values())


def holds_parameters_in(optimizer: Optimizer) -> str | None:
    """Returns the name of an attribute, other than ``param_groups`` and ``state``, in which ``optimizer`` keeps
    parameters or another optimizer; ``None`` if there is none."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in _attributes(optimizer):
        if any(id(leaf) in own or _is_optimizer(leaf) for leaf in _leaves(value, _DEPTH)):
            return name
    return None


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(optimizer).items() if name not in _PUBLIC)


def _leaves(value: Any, depth: int, skips_tensors: bool = False) -> Iterator[Any]:
    """Yields the objects in lists, tuples, sets and dicts, including keys of dicts. ``skips_tensors`` leaves out a
    container that begins with a tensor: attributes that hold thousands of tensors hold nothing else."""
    if not isinstance(value, (list, tuple, set, dict)):
        yield value
    elif depth and not (skips_tensors and isinstance(next(iter(value), None), Tensor)):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _leaves(inner, depth - 1, skips_tensors)


def _is_optimizer(value: Any) -> bool:
    """Whether ``value`` is a PyTorch optimizer, or another object with an optimizer's attributes."""
    if isinstance(value, Optimizer):
        return True
    if isinstance(value, (type, Tensor, nn.Module)):
        return False
    return all(hasattr(value, name) for name in ("param_groups", "state", "step", "zero_grad"))
