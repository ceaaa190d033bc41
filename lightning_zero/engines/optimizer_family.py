"""A module's parameters and their states in an optimizer, wherever it keeps them.

``param_groups`` and ``state`` are what PyTorch knows of. Others keep more: an optimizer around another one (Lookahead,
SAM) has that one's groups and states, and many keep lists of parameters or dicts by parameter in attributes of their
own. Whoever hands an optimizer other tensors for a while has to exchange them in all of these places.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_PUBLIC = ("param_groups", "state", "defaults")
_DEPTH = 4
"""Depth to which an attribute's lists, tuples and dicts are searched for parameters and optimizers."""


def family(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer`` and those it is made around, outermost first."""
    members: list[Any] = [optimizer]
    for member in members:
        for name, value in vars(member).items():
            if name not in _PUBLIC:
                members += [found for found in _optimizers(value, _DEPTH) if not any(found is m for m in members)]
    return members


def own_methods(optimizer: Optimizer) -> list[str]:
    """Public methods that its class adds to PyTorch's, such as ``eval`` and ``train`` of a schedule-free one."""
    classes = [c for c in type(optimizer).__mro__ if issubclass(c, Optimizer) and c is not Optimizer]
    found = {name for c in classes for name, value in vars(c).items() if inspect.isfunction(value)}
    return sorted(name for name in found if not name.startswith("_") and not hasattr(Optimizer, name))


def _optimizers(value: Any, depth: int) -> Iterator[Any]:
    if _is_optimizer(value):
        yield value
    elif depth and isinstance(value, (list, tuple)) and not _is_of_tensors(value):
        for inner in value:
            yield from _optimizers(inner, depth - 1)
    elif depth and isinstance(value, dict) and not _is_of_tensors(value):
        for inner in value.values():
            yield from _optimizers(inner, depth - 1)


def _is_optimizer(value: Any) -> bool:
    """PyTorch's class, or what answers to the same names."""
    if isinstance(value, Optimizer):
        return True
    if isinstance(value, (type, Tensor, nn.Module)):
        return False
    return all(hasattr(value, name) for name in ("param_groups", "state", "step", "zero_grad"))


def _is_of_tensors(values: Any) -> bool:
    """By its first element: attributes that hold thousands of tensors hold nothing else."""
    return isinstance(next(iter(values), None), Tensor)


def parameter_lists(members: list[Optimizer]) -> list[list[Tensor]]:
    """The lists in all members' groups, each once; members may share them."""
    lists = (group["params"] for member in members for group in member.param_groups)
    return list({id(each): each for each in lists}.values())


def states(members: list[Optimizer]) -> list[dict[Any, Any]]:
    """All members' states, each once; members may share them."""
    return list({id(member.state): member.state for member in members}.values())


def exchange(members: list[Optimizer], instead: Mapping[int, Tensor], hidden: bool) -> None:
    """Puts ``instead[id(p)]`` where a member holds ``p``, in place; values of states stay as they are.

    Args:
        hidden: Also in attributes beside ``param_groups`` and ``state``.
    """
    for params in parameter_lists(members):
        params[:] = [instead.get(id(p), p) for p in params]
    if not hidden:
        return
    own = {id(each) for each in (*members, *states(members), *(member.param_groups for member in members))}
    for member in members:
        for name, value in list(vars(member).items()):
            if name in _PUBLIC or id(value) in own:
                continue
            new = _exchanged(value, instead, own, _DEPTH)
            if new is not value:
                vars(member)[name] = new


def _exchanged(value: Any, instead: Mapping[int, Tensor], own: set[int], depth: int) -> Any:
    """``value`` itself with its lists and dicts changed in place, or what has to stand in its place."""
    if isinstance(value, Tensor):
        return instead.get(id(value), value)
    if not depth or id(value) in own:
        return value
    if type(value) is list:
        for i, inner in enumerate(value):
            new = _exchanged(inner, instead, own, depth - 1)
            if new is not inner:
                value[i] = new
    elif isinstance(value, dict):
        for key, inner in value.items():
            new = _exchanged(inner, instead, own, depth - 1)
            if new is not inner:
                value[key] = new
        if any(id(key) in instead for key in value):
            items = [(instead.get(id(key), key), inner) for key, inner in value.items()]
            value.clear()
            value.update(items)
    elif type(value) is tuple:
        changed = tuple(_exchanged(inner, instead, own, depth - 1) for inner in value)
        return value if all(a is b for a, b in zip(changed, value, strict=True)) else changed
    elif type(value) is set and any(id(inner) in instead for inner in value):
        changed_set = {instead.get(id(inner), inner) for inner in value}
        value.clear()
        value.update(changed_set)
    return value
