"""Chooses the shard units of a module: the groups of parameters that are gathered together.

A *unit* is a module whose parameters are gathered by one collective before its ``forward`` and whose gradients are
reduced by one collective after its backward. Parameters outside all units belong to the *root* unit, which is gathered
for the whole step. Parameters that ``fully_shard`` cannot shard (0-dim, empty, non-contiguous, complex, of another
dtype than their unit's) are *replicated*: full on every rank, with gradients averaged as under DDP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from lightning_zero.engines.materialize import in_order_of_construction

STACKS = (nn.ModuleList, nn.Sequential)
"""Containers whose children run one after the other. Children of a ``ModuleDict`` are mostly alternatives (a head per
task), of which ranks may run different ones: they stay in the unit around them, as collectives must match."""
LAYERS = (nn.Embedding, nn.Linear)
LARGE_NUMEL = 2**24
"""A layer of :data:`LAYERS` outside all blocks with at least this many elements is a unit of its own. In the root an
embedding or a head would stay gathered for the whole step, and its gradient would wait for the end of the backward."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Kept full under mixed precision: autocast runs them in fp32, and their kernels refuse low-precision weights with fp32
statistics."""
ROOT = "(root)"


@dataclass
class Unit:
    """One group of parameters that are gathered together."""

    name: str
    """Name of the module in the LightningModule; ``"(root)"`` for the root unit."""
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    """Sharded parameters by full name."""


@dataclass
class UnitPlan:
    """Assignment of parameters: each is listed exactly once, in a unit of ``units`` or in ``replicated``."""

    units: list[Unit]
    """Inner units before outer ones. The root is last, and present even if it has no parameters."""
    replicated: dict[str, nn.Parameter]
    """Parameters kept full on every rank, by full name."""


def plan_units(
    module: nn.Module,
    patterns: Sequence[str] | None = None,
    min_unit_numel: int = 0,
    keep_full: Collection[type[nn.Module]] = (),
) -> UnitPlan:
    """Assigns the parameters of ``module`` to shard units.

    Args:
        module: A module with plain parameters, not yet sharded.
        patterns: Class names of units, or patterns on their names, level by level. ``None`` chooses repeated blocks and
            large layers; with an empty sequence all parameters belong to the root.
        min_unit_numel: Automatic units with fewer elements are merged into the unit around them.
        keep_full: Module classes whose parameters are replicated (BatchNorm under mixed precision).

    Raises:
        ValueError: When a pattern matches no module that holds parameters.
    """
    if patterns is None:
        chosen = [m for m in _automatic(module, min_unit_numel) if m is not module]
    else:
        chosen = matching(module, patterns)
    names = {m: name for name, m in module.named_modules()}
    owners = _owners(module, set(chosen))
    # Removing a unit moves its parameters to the unit around it, which may then share them: repeat until stable.
    while shared := {m for m in chosen if _shares_parameters(m, owners)}:
        chosen = [m for m in chosen if m not in shared]
        owners = _owners(module, set(chosen))

    units = {m: Unit(names[m], m) for m in chosen}
    units[module] = Unit(ROOT, module)
    for name, parameter in module.named_parameters():
        (owner,) = owners[parameter]
        units[owner or module].parameters[name] = parameter
    full = _parameters_of(module, keep_full)
    replicated: dict[str, nn.Parameter] = {}
    for unit in units.values():
        for name in _unsplittable(unit.parameters, full):
            replicated[name] = unit.parameters.pop(name)
    # Inner units first, as fully_shard asks; in the order in which modules are materialized, so that each is sharded
    # before the next one gets memory.
    ordered = [units[m] for m, _ in in_order_of_construction(module) if m in units]
    return UnitPlan([u for u in ordered if u.parameters or u.module is module], replicated)


def _automatic(module: nn.Module, min_unit_numel: int) -> Iterator[nn.Module]:
    """Yields large layers, and repeated blocks: classes in ``_no_split_modules`` of Hugging Face models, children of
    stacks."""
    no_split = {name for m in module.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    seen: set[nn.Module] = set()

    def visit(parent: nn.Module) -> Iterator[nn.Module]:
        children = [c for c in parent.children() if c not in seen]
        seen.update(children)
        kinds = Counter(type(c) for c in children)
        for child in children:
            named = type(child).__name__ in no_split
            block = isinstance(parent, STACKS) and (kinds[type(child)] > 1 or not _has_stack(child))
            numel = sum(p.numel() for p in child.parameters())
            large = isinstance(child, LAYERS) and not isinstance(parent, nn.ModuleDict) and numel >= LARGE_NUMEL
            if (
                (named or ((block or large) and not _has_own_methods(child)))
                and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
                and numel >= max(min_unit_numel, 1)
            ):
                yield child
            else:
                yield from visit(child)

    yield from visit(module)


def _has_stack(module: nn.Module) -> bool:
    """Whether ``module`` contains repeated blocks: two children of one class in a stack, themselves with children."""
    for inner in module.modules():
        if isinstance(inner, STACKS):
            kinds = Counter(type(c) for c in inner.children() if next(c.children(), None) is not None)
            if any(n > 1 for n in kinds.values()):
                return True
    return False


def _has_own_methods(module: nn.Module) -> bool:
    """Whether the class has public methods other than ``forward`` and the initializer for the meta device. A direct
    call of such a method bypasses the unit's hooks, so the unit's parameters would not be gathered."""
    for cls in type(module).__mro__:
        if cls.__module__.split(".")[0] == "torch":
            return False
        for name, value in vars(cls).items():
            if not name.startswith("_") and name not in ("forward", "reset_parameters") and callable(value):
                return True
    return False


def matching(module: nn.Module, patterns: Sequence[str], setting: str = "units") -> list[nn.Module]:
    """Returns the submodules of ``module`` that hold parameters and match ``patterns``, the value of ``setting``.

    Raises:
        ValueError: When a pattern matches no module that holds parameters.
    """
    chosen: dict[nn.Module, None] = {}
    for pattern in patterns:
        found = [
            m
            for name, m in module.named_modules()
            if m is not module and (type(m).__name__ == pattern or _matches(name, pattern))
        ]
        usable = [m for m in found if not isinstance(m, (nn.ModuleList, nn.ModuleDict)) and _holds_parameters(m)]
        if not usable:
            reason = "matches only containers or modules without parameters" if found else "matches no module"
            classes = sorted({type(m).__name__ for m in module.modules() if _holds_parameters(m)})
            raise ValueError(
                f"{setting}={list(patterns)!r}: {pattern!r} {reason}. Use a class name ({', '.join(classes)}) or a"
                " pattern on module names such as 'blocks.*'."
            )
        chosen.update(dict.fromkeys(usable))
    return list(chosen)


def _matches(name: str, pattern: str) -> bool:
    """Matches level by level, like file names: ``blocks.*`` matches the blocks, not the modules inside them."""
    levels, wanted = name.split("."), pattern.split(".")
    return len(levels) == len(wanted) and all(map(fnmatchcase, levels, wanted))


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _owners(module: nn.Module, chosen: set[nn.Module]) -> dict[nn.Parameter, set[nn.Module | None]]:
    """Parameter -> the innermost units whose subtree registers it (``None`` means the root)."""
    owners: dict[nn.Parameter, set[nn.Module | None]] = {}
    seen: set[tuple[nn.Module, nn.Module | None]] = set()

    def visit(m: nn.Module, unit: nn.Module | None) -> None:
        unit = m if m in chosen else unit
        if (m, unit) in seen:
            return
        seen.add((m, unit))
        for parameter in m.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(unit)
        for child in m.children():
            visit(child, unit)

    visit(module, None)
    return owners


def _shares_parameters(unit: nn.Module, owners: dict[nn.Parameter, set[nn.Module | None]]) -> bool:
    """Whether ``unit`` shares a tied parameter with another unit. Then it cannot be a unit: the parameter belongs to
    the innermost unit around all modules that use it."""
    return any(len(users) > 1 and unit in users for users in owners.values())


def _parameters_of(module: nn.Module, classes: Collection[type[nn.Module]]) -> set[nn.Parameter]:
    found = (m for m in module.modules() if isinstance(m, tuple(classes))) if classes else ()
    return {p for m in found for p in m.parameters(recurse=False)}


def _unsplittable(parameters: dict[str, nn.Parameter], full: set[nn.Parameter]) -> list[str]:
    """Names of the parameters that cannot be sharded with this unit."""
    numel: Counter[torch.dtype] = Counter()
    for p in parameters.values():
        if p.requires_grad and not p.is_complex():
            numel[p.dtype] += p.numel()
    main = numel.most_common(1)[0][0] if numel else None
    return [
        name
        for name, p in parameters.items()
        if p.dim() == 0
        or p.numel() == 0
        or not p.is_contiguous()
        or p in full
        or (p.requires_grad and p.dtype != main)
        or p.is_complex()
    ]
