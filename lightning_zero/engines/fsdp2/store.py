"""The engine's part of :mod:`~lightning_zero.engines.residency`: parameters, gradients and states by their keys.

Let G be the number of ``fully_shard`` groups, in an order that all ranks share. Group ``g`` has the key ``g``, its
gradients have the key ``G + g``, and the optimizers' states have keys from ``2 G`` on, in the optimizers' order.

A parameter is opened in its *home*, the memory into which it is gathered in steps, if the home has the dtype of the
shard. It is opened elsewhere in mixed precision, where the home has low precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_zero.comm.shards import gathered_each, local
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.assigned import AssignedGradients
from lightning_zero.engines.fsdp2.writes import Writes
from lightning_zero.engines.refusals import require_shape
from lightning_zero.engines.residency import States, Views, store_rows
from lightning_zero.private.torch import set_data, storage_key, users_of

if TYPE_CHECKING:
    from lightning_zero.engines.fsdp2.engine import Fsdp2Engine


class Fsdp2Store:
    """See :class:`~lightning_zero.engines.residency.Store`.

    Args:
        own: ``id`` of each of the user's parameters -> its ``ShardedParam``.
        groups: The groups of all units.
        gradients: Gradients as user code reads and assigns them.
        writes: Watches writes to gathered parameters.
        views: Memory left to views.
        names: ``id`` of each of the user's parameters -> its name.
    """

    only_brings = False

    def __init__(
        self,
        own: Mapping[int, private.ShardedParam],
        groups: Sequence[private.Group],
        gradients: AssignedGradients,
        writes: Writes,
        views: Views,
        names: Mapping[int, str],
        engine: Fsdp2Engine,
    ) -> None:
        self.own, self._groups, self._gradients, self._writes = own, groups, gradients, writes
        self.views, self._names, self._engine = views, names, engine
        self.refill = views.refill
        self._keys = {id(p): key for key, group in enumerate(groups) for p in group.fsdp_params}
        self._elsewhere: set[int] = set()  # ids of ShardedParams whose parameter is currently outside its home
        self.states = States(2 * len(groups), self._gather_state, store_rows)

    # -- keys ----------------------------------------------------------------------------------------------------

    def key_of(self, p: Tensor) -> int:
        return self._keys[id(self.own[id(p)])]

    def is_there(self, p: Tensor) -> bool:
        return self.own[id(p)].sharded_state is private.UNSHARDED  # keep cheap: runs at each call with a parameter

    def shard_of(self, p: Tensor) -> DTensor:
        shard: DTensor = self.own[id(p)].sharded_param
        return shard

    def address(self, p: Tensor) -> int:
        shard = self.shard_of(p)
        return local(shard).data_ptr() or id(shard)

    def name(self, key: int) -> str:
        num = len(self._groups)
        found = [self._names.get(id(private.own_of(p)), "?") for p in self._groups[key % num].fsdp_params]
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        what = f"parameter {found[0]!r}{more}"
        return what if key < num else f"the gradient of {what}"

    # -- full for a while ----------------------------------------------------------------------------------------

    def is_here(self, key: int) -> bool:
        return False

    def gather(self, key: int) -> list[Tensor]:
        self._engine.touches(key)
        num = len(self._groups)
        if key < num:
            private.forget_gather(self._groups[key])  # a gather ahead would fill memory that is about to be freed
            return gathered_each([p.sharded_param for p in self._groups[key].fsdp_params])
        return gathered_each([grad for _, grad in self._gradients.sharded(self._groups[key - num])])

    def _gather_state(self, key: int, shard: DTensor) -> Tensor:
        self._engine.touches(key)
        return gathered_each([shard])[0]

    def open(self, key: int, values: list[Tensor]) -> None:
        num = len(self._groups)
        if key < num:
            for p, value in zip(self._groups[key].fsdp_params, values, strict=True):
                self._open_parameter(p, value)
        else:
            self._gradients.open(self._groups[key - num], values, key)

    def _open_parameter(self, p: private.ShardedParam, value: Tensor) -> None:
        if private.home_dtype(p) == value.dtype:
            private.fill_home(p, value)
        else:
            set_data(private.own_of(p), _apart(value, p.sharded_param))
            self._elsewhere.add(id(p))

    def is_held(self, key: int) -> bool:
        num = len(self._groups)
        if key < num:
            group = self._groups[key]
            homes = [private.Home(group, p) for p in group.fsdp_params]
            return any(self.views.are_held(private.own_of(home.param), self._users(home)[1]) for home in homes)
        return self._gradients.are_held(self._groups[key - num])

    def _users(self, home: private.Home) -> tuple[Any, int]:
        """Return the storage of a parameter, and the number of tensors in it that are not the engine's own."""
        if id(home.param) not in self._elsewhere:
            return home.users()
        storage = private.own_of(home.param).untyped_storage()
        return storage, users_of(storage) - 1

    def close(self, key: int) -> None:
        num = len(self._groups)
        if key < num:
            self._close_parameters(key)
        else:
            self._gradients.close(self._groups[key - num])

    def _close_parameters(self, key: int) -> None:
        group = self._groups[key]
        self._engine.shards_change()
        for p in group.fsdp_params:
            original, home = private.own_of(p), private.Home(group, p)
            store_rows(original, p.sharded_param)
            is_held = self.views.leave(original, *self._users(home))
            if id(p) in self._elsewhere:
                self._elsewhere.discard(id(p))
                private.go_home(p, original)
            elif is_held:
                home.leave()
            else:
                home.free()
        self._writes.disregard(key)
        self._engine.shards_have_changed()

    def bring(self, p: Tensor) -> None:
        key = self.key_of(p)
        self._engine.touches(key)
        self._engine.bring(self._groups[key])

    # -- assignments ---------------------------------------------------------------------------------------------

    def grad_of(self, p: Tensor) -> Tensor | None:
        known = self.own[id(p)]
        return self._gradients.read(known, len(self._groups) + self.key_of(p))

    def assign_grad(self, p: Tensor, value: Tensor | None) -> None:
        self._gradients.write(self.own[id(p)], value)

    def backward(self, func: Any, run: Callable[[], Any]) -> Any:
        return run()

    def aliased(self, p: Tensor, alias: Any) -> None:
        self.views.take(p, alias, in_step=self.is_there(p))

    def before_collective(self, tensors: Sequence[Any]) -> None:
        self._gradients.before_collective(tensors)

    def assign_data(self, p: Tensor, value: Tensor) -> None:
        known = self.own[id(p)]
        require_shape("data", p, value)
        if _same_place(value, p):
            return
        home = private.Home(self._groups[self.key_of(p)], known)
        self.views.moved(p)
        if not private.is_away(known):
            home.leave()  # views taken so far keep the previous values
            p.data.copy_(value)  # as an assignment does, without counting a write for autograd
            self._writes.data_is_taken(p)
            return
        if value.dtype != known.sharded_param.dtype:
            raise ValueError(
                f"{self.name(self.key_of(p))}: p.data = value or module.to(dtype) in a run cannot change the dtype from"
                f" {known.sharded_param.dtype} to {value.dtype}: convert the module in __init__ or configure_model."
            )
        if id(known) not in self._elsewhere and home.users()[1] > 0:
            home.leave()
        set_data(p, value.detach())
        self._elsewhere.add(id(known))

    def written(self, p: Tensor) -> None:
        self._writes.data_is_taken(p)


def _apart(value: Tensor, shard: DTensor) -> Tensor:
    """Return ``value``, in memory that is not the shard's: with one rank the gathered value is the shard."""
    is_shard = storage_key(value.untyped_storage()) == storage_key(local(shard).untyped_storage())
    return value.clone() if is_shard else value


def _same_place(a: Tensor, b: Tensor) -> bool:
    same = storage_key(a.untyped_storage()) == storage_key(b.untyped_storage())
    return same and a.storage_offset() == b.storage_offset() and a.stride() == b.stride()
