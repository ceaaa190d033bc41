"""A module after its run: full or still sharded. The next run finds it, under any strategy object."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from lightning_zero.engines.base import Engine, OnWhole, unheard
from lightning_zero.engines.optimizer_step import whole_state_bytes


class AfterRun(Enum):
    """The state of a module when its run has ended."""

    WHOLE = auto()
    """Whole parameters in host memory, on every rank."""
    SHARDED = auto()
    """Shards on every rank. The next run makes the module whole first."""


class Sharded(Protocol):
    """Makes its module whole: an engine, or the shards that ``configure_model`` has built."""

    def restore(self, whole: bool, optimizers: list[Optimizer], on_whole: OnWhole = unheard) -> None:
        """As :meth:`~lightning_zero.engines.base.Engine.restore`."""


class _Left:
    """Keeps what can make a module whole, on that module: shards hold their module, so anything else that held them
    would keep both for ever. Copies and pickles of the module are without."""

    def __init__(self, shards: Sharded | None = None) -> None:
        self.shards = shards

    def __reduce__(self) -> Any:
        return _Left, ()


_KEY = "_lightning_zero_left"
_LEFT_SHARDED: WeakSet[nn.Module] = WeakSet()


def leave(module: nn.Module, shards: Sharded, after: AfterRun) -> None:
    """Notes the state of ``module`` for its next run."""
    if after is not AfterRun.WHOLE:
        vars(module)[_KEY] = _Left(shards)
        _LEFT_SHARDED.add(module)


def is_left_sharded(module: nn.Module) -> bool:
    """Whether an earlier run has left ``module`` sharded."""
    return module in _LEFT_SHARDED


def make_whole(module: nn.Module, on_whole: OnWhole = unheard) -> None:
    """``module`` is whole, also if an earlier run has left it sharded (collective); ``on_whole`` is told of each
    parameter in turn."""
    if module not in _LEFT_SHARDED:
        return
    _LEFT_SHARDED.discard(module)
    left: _Left = vars(module).pop(_KEY)
    assert left.shards is not None
    left.shards.restore(True, [], on_whole)


def make_owners_whole(module: nn.Module) -> None:
    """Other modules that earlier runs have left sharded are whole, if ``module`` has layers of theirs (collective)."""
    layers = set(module.modules())
    for other in list(_LEFT_SHARDED):
        if other is not module and not layers.isdisjoint(other.modules()):
            make_whole(other)


def where_memory_allows(
    engine: Engine, optimizers: Collection[Optimizer], num_processes: int, room_bytes: int
) -> tuple[AfterRun, str]:
    """``WHOLE`` if each of a host's ``num_processes`` can hold the whole module in ``room_bytes``, else ``SHARDED``;
    beside it a sentence on the parts that stay sharded. Optimizers' states become whole if they fit beside the module.

    ``room_bytes`` is the same on all ranks, so that all answer alike.
    """
    module_bytes = engine.whole_bytes
    if module_bytes >= room_bytes:
        return AfterRun.SHARDED, (
            "after_fit='auto': the module stays sharded, its whole parameters"
            f" ({module_bytes * num_processes / 2**30:.1f} GiB for the processes of one host) do not fit into"
            " host memory."
        )
    states_bytes = whole_state_bytes(optimizers)
    engine.states_whole_after_fit = module_bytes + states_bytes < room_bytes
    if engine.states_whole_after_fit:
        return AfterRun.WHOLE, ""
    return AfterRun.WHOLE, (
        "after_fit='auto': the optimizers' states stay sharded, as whole ones"
        f" ({states_bytes * num_processes / 2**30:.1f} GiB for the processes of one host) do not fit into"
        " host memory beside the module."
    )
