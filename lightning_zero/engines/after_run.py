"""State of a module and its optimizers after their run: full or still sharded. The next run finds that state, also with
another strategy object."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.checkpoint import later
from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.agree import READS, Agreement
from lightning_zero.comm.shards import as_shard, gathered, local
from lightning_zero.engines.optimizer_family import family, states
from lightning_zero.engines.residency import needs_no_values
from lightning_zero.engines.torch_functions import tensors_in
from lightning_zero.private.torch import DisableTorchFunction, DisableTorchFunctionSubclass, set_data


class AfterRun(Enum):
    """State of a module's parameters after its run."""

    WHOLE = auto()
    """Every rank holds full parameters in host memory."""
    SHARDED = auto()
    """Every rank holds its shards. The next run unshards the module first."""


class Sharded(Protocol):
    """Can unshard its module: an engine, or the shards that ``configure_model`` has built."""

    def restore(self, whole: bool, *, when_touched: bool = False) -> None:
        """See :meth:`~lightning_zero.engines.base.Engine.restore`."""


class _Left:
    """Attribute of a module that holds its :class:`Sharded` object. Shards reference their module, so a reference from
    anywhere else would keep both alive forever. Copies and pickles of the module hold an empty one."""

    def __init__(self, shards: Sharded | None = None) -> None:
        self.shards = shards

    def __reduce__(self) -> Any:
        return _Left, ()


_KEY = "_lightning_zero_left"
_LEFT_SHARDED: WeakSet[nn.Module] = WeakSet()


def leave(module: nn.Module, shards: Sharded, after: AfterRun) -> None:
    """Records the state of ``module`` for its next run."""
    if after is not AfterRun.WHOLE:
        vars(module)[_KEY] = _Left(shards)
        _LEFT_SHARDED.add(module)


def is_left_sharded(module: nn.Module) -> bool:
    """Whether an earlier run has left ``module`` sharded."""
    return module in _LEFT_SHARDED


def make_whole(module: nn.Module, when_touched: bool = False) -> None:
    """Unshards ``module`` if an earlier run has left it sharded (collective). With ``when_touched`` an engine that can
    leaves each parameter sharded until user code touches it."""
    if module not in _LEFT_SHARDED:
        return
    _LEFT_SHARDED.discard(module)
    left: _Left = vars(module).pop(_KEY)
    assert left.shards is not None
    left.shards.restore(True, when_touched=when_touched)


def make_owners_whole(module: nn.Module) -> None:
    """Unshards other modules that were left sharded and that share layers with ``module`` (collective)."""
    layers = set(module.modules())
    for other in list(_LEFT_SHARDED):
        if other is not module and not layers.isdisjoint(other.modules()):
            make_whole(other)


def where_memory_allows(module_bytes: int, num_processes: int, room_bytes: int) -> tuple[AfterRun, str]:
    """Returns ``WHOLE`` if each of a host's ``num_processes`` can hold the full module in ``room_bytes``, else
    ``SHARDED``, and a sentence for the user about that.

    ``room_bytes`` must be equal on all ranks, so that all ranks take the same decision.
    """
    if module_bytes < room_bytes:
        return AfterRun.WHOLE, ""
    return AfterRun.SHARDED, (
        "after_fit='auto': the module stays sharded, because its full parameters"
        f" ({module_bytes * num_processes / 2**30:.1f} GiB for the processes of one host) do not fit into"
        " host memory."
    )


# -- states of optimizers ---------------------------------------------------------------------------------------------

READ_SECONDS = 30.0
"""Time that a read of a state waits for the other ranks."""
_reads: list[Agreement] = []


class LeftState(Tensor):
    """Optimizer state after the run: a shard until user code computes with it, copies it or pickles it. The tensor then
    becomes an ordinary full tensor in host memory on all ranks (collective)."""

    @property
    def shard(self) -> Any:
        """The shard; of a parameter perhaps the tensor that a checkpoint has put in its place."""
        return later.left(self)

    @staticmethod
    def of(shard: DTensor) -> LeftState:
        """Creates a tensor without memory, of the full shape of ``shard``."""
        made: Any = _without_memory(shard)
        later.leave(made, shard)
        made.__class__ = LeftState
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            if not needs_no_values(func) and not _changes_nothing(func, args, kwargs or {}):
                for value in tensors_in((*args, *(kwargs or {}).values())):
                    if isinstance(value, LeftState):
                        value.make_full()
            return func(*args, **(kwargs or {}))

    def make_full(self) -> None:
        """Gathers the shards into a plain tensor (collective).

        Raises:
            RuntimeError: If not all ranks read the tensor within :data:`READ_SECONDS`.
        """
        for agreement in _reads:
            agreement.gather(None, "a read of a parameter or optimizer state that a run has left sharded")
        with torch.no_grad(), DisableTorchFunction():
            value = gathered(self.shard) if isinstance(self.shard, DTensor) else self.shard
            later.become(self, torch.empty(self.shape, dtype=self.dtype, device="cpu").copy_(value))


class LeftParameter(LeftState, nn.Parameter):
    """Parameter that the previous run has left sharded, before the next run shards it again: see :class:`LeftState`."""

    def __deepcopy__(self, memo: Any) -> Any:
        self.make_full()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.make_full()
        return self.__reduce_ex__(protocol)


def leave_parameter(p: nn.Parameter, shard: DTensor) -> None:
    """Leaves ``p`` sharded until user code touches it. A parameter of a class of its own becomes full (collective)."""
    if type(p) is nn.Parameter:
        set_data(p, _without_memory(shard))
        later.leave(p, shard)
        p.__class__ = LeftParameter
    else:
        set_data(p, gathered(shard).cpu())


def _without_memory(shard: DTensor) -> Tensor:
    made = torch.empty(shard.shape, dtype=shard.dtype, device="cpu")
    made.untyped_storage().resize_(0)
    return made


_CASTS = (Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.cpu)


def _changes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call sets or returns the tensor itself, as in ``module.to(dtype)``."""
    if func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return args[0] is args[1]
    if func not in _CASTS:
        return False
    one = torch.empty((), dtype=args[0].dtype, device="cpu")
    return func(one, *args[1:], **kwargs) is one


def begin_reads(agreement: Agreement) -> None:
    """Has later reads of sharded states check that all ranks of ``agreement`` take part (collective)."""
    reads = agreement.with_kind(READS)
    reads.timeout_seconds = min(READ_SECONDS, agreement.timeout_seconds)
    _reads[:] = [reads]


def leave_states(optimizers: Iterable[Optimizer], full: bool) -> None:
    """Moves sharded states to host memory: as full tensors if ``full`` (collective), else as :class:`LeftState`, which
    becomes full when user code touches it."""
    for entry in _entries(optimizers):
        for key, value in entry.items():
            if isinstance(value, DTensor):
                is_all = full or value.device_mesh.size() == 1
                entry[key] = gathered(value).cpu() if is_all else LeftState.of(as_shard(local(value).cpu(), value))


def has_left_states(optimizer: Optimizer) -> bool:
    """Whether an earlier run has left any state of ``optimizer`` sharded."""
    return any(isinstance(value, LeftState) for entry in _entries([optimizer]) for value in entry.values())


def left_shards(state: Any) -> Any:
    """Returns ``state``, an ``optimizer.state_dict()``, with each :class:`LeftState` replaced by its shard."""
    with DisableTorchFunction():
        return map_tensors(lambda path, t: t.shard if isinstance(t, LeftState) else t, state)


def _entries(optimizers: Iterable[Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        for state in states(family(optimizer)):
            yield from (entry for entry in state.values() if isinstance(entry, dict))
