"""State of a module and its optimizers after their run: full or still sharded. The next run finds that state, also with
another strategy object."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.checkpoint import later
from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.agree import READS, Agreement
from lightning_zero.comm.shards import as_shard, gathered, local, to_host
from lightning_zero.engines.optimizer_family import family, states
from lightning_zero.engines.residency import needs_no_values
from lightning_zero.engines.torch_functions import tensors_in
from lightning_zero.private.torch import DisableTorchFunction, DisableTorchFunctionSubclass, set_data

# -- tensors that stay sharded -----------------------------------------------------------------------------------------

READ_SECONDS = 30.0
"""Time that a read of such a tensor waits for the other ranks."""
_reads: WeakKeyDictionary[Agreement, Agreement] = WeakKeyDictionary()
"""Agreement of the last run -> agreement on such reads. Only the process group keeps the first, whose threads must end
with the group."""


class LeftState(Tensor):
    """Optimizer state after the run: a shard until user code computes with it, copies it or pickles it. The tensor then
    becomes an ordinary full tensor on all ranks (collective)."""

    ordinary: type[Tensor] = Tensor
    """The class of the tensor once it is full."""

    @property
    def shard(self) -> Any:
        """The shard, or the function that gathers; of a parameter perhaps the tensor that a checkpoint has put in its
        place."""
        return later.left(self)

    @staticmethod
    def of(value: later.Value, like: Tensor) -> Tensor:
        """Creates a tensor without memory, with shape and dtype of ``like``."""
        made: Any = without_memory(like)
        later.leave(made, value)
        made.__class__ = LeftState
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if needs_no_values(func) or _changes_nothing(func, args, kwargs):
                return func(*args, **kwargs)
        for value in tensors_in((*args, *kwargs.values())):
            if isinstance(value, LeftState):
                value.make_full()
        return func(*args, **kwargs)

    def make_full(self) -> None:
        """Gathers the shards into a plain tensor (collective).

        Raises:
            RuntimeError: If not all ranks read the tensor within :data:`READ_SECONDS`.
        """
        for agreement in list(_reads.values()):
            agreement.gather(None, "a read of a sharded parameter or optimizer state")
        with torch.no_grad(), DisableTorchFunction():
            later.become(self, later.memory_for(self, self.device).copy_(later.full_value(self.shard)))


class _LeftParameter(LeftState):
    """Parameter after the run; a base class beside the parameter's own class."""

    def __deepcopy__(self, memo: Any) -> Any:
        self.make_full()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.make_full()
        return self.__reduce_ex__(protocol)


@cache
def _left(kind: Any) -> Any:
    names = {"ordinary": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (_LeftParameter, kind), names)


def leave_parameter(p: nn.Parameter, value: later.Value, like: Tensor) -> None:
    """Frees the memory of ``p``, which stays sharded until user code touches it or the next run shards it. ``like`` has
    the full shape."""
    set_data(p, without_memory(like))
    later.leave(p, value)
    p.__class__ = _left(type(p))


def has_left_parameters(module: nn.Module) -> bool:
    """Whether an earlier run has left any parameter of ``module`` sharded."""
    return any(isinstance(p, LeftState) for p in module.parameters())


def without_memory(like: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Creates a tensor with shape and dtype of ``like``, whose memory is freed."""
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
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
    """Has later reads of sharded tensors check that all ranks of ``agreement`` take part (collective)."""
    reads = agreement.with_kind(READS)
    reads.timeout_seconds = min(READ_SECONDS, agreement.timeout_seconds)
    _reads.clear()
    _reads[agreement] = reads


def leave_states(optimizers: Iterable[Optimizer], full: bool, moves: bool = True) -> None:
    """Turns sharded states into full tensors if ``full`` (collective), else into :class:`LeftState`, which becomes full
    when user code touches it. With ``moves`` all of them move to host memory."""
    for entry in entries(optimizers):
        for key, value in entry.items():
            if isinstance(value, DTensor):
                is_all = full or (moves and value.device_mesh.size() == 1)
                shard = as_shard(to_host(local(value)), value) if moves else value
                entry[key] = to_host(gathered(value)) if is_all else LeftState.of(shard, shard)


def has_left_states(optimizer: Optimizer) -> bool:
    """Whether an earlier run has left any state of ``optimizer`` sharded."""
    return any(isinstance(value, LeftState) for entry in entries([optimizer]) for value in entry.values())


def left_shards(state: Any) -> Any:
    """Returns ``state``, a state dict, with each :class:`LeftState` replaced by its shard. Those that have a function
    instead become full (collective)."""

    def one(path: Any, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, LeftState):
            return tensor
        if isinstance(tensor.shard, Tensor):
            return tensor.shard
        tensor.make_full()
        return tensor

    with DisableTorchFunction():
        return map_tensors(one, state)


def entries(optimizers: Iterable[Optimizer]) -> Iterator[dict[str, Any]]:
    """The states of each parameter, and of the optimizers that ``optimizers`` wrap."""
    for optimizer in optimizers:
        for state in states(family(optimizer)):
            yield from (entry for entry in state.values() if isinstance(entry, dict))
