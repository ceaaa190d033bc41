"""DeepSpeed's side of :mod:`~lightning_zero.engines.residency`: opens and closes its parameters by their keys.

With P parameters, parameter ``n`` has the key ``n``, and its gradient the key ``P + n``. Optimizers' states have no
keys: see ``optimizer_step``.

At stages 1 and 2 a parameter is always full, a view of DeepSpeed's buffer. At stage 3 DeepSpeed gathers it when its
module runs, and frees its memory afterwards; the shape stays. A parameter that user code has open lies in
memory of its own (its *spot*). So does, until the step ends, a parameter of which user code has touched older memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.gradients import Gradients
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay
from lightning_zero.engines.refusals import require_shape
from lightning_zero.engines.residency import Residency, Views
from lightning_zero.private.torch import (
    DisableTorchFunction,
    set_data,
    storage_key,
    users_of,
    version_of,
)


class DeepSpeedStore:
    """Implements :class:`~lightning_zero.engines.residency.Store`.

    Attributes:
        residency: Must be set by the creator of the store.
        is_keeping: Whether parameters have been gathered for the rest of the step. Reset by the engine.

    Args:
        params: The module's parameters, with masters and gradients once an optimizer is attached.
        under_way: The engine's current activities.
        backward: The engine's ``backward``, for a backward that user code starts inside a step.
        views: Memory left to views.
        before_bring: Called before a parameter is gathered in a step.
    """

    residency: Residency
    only_brings = True
    is_keeping = False

    def __init__(
        self,
        params: Parameters,
        under_way: UnderWay,
        views: Views,
        gradients: Gradients,
        backward: Callable[[Callable[[], None]], None],
        before_bring: Callable[[Tensor], None],
    ) -> None:
        self._stage3 = params.stage3
        self._views = views
        self._params: list[Any] = list(params.held)
        self._own: dict[int, int] = {id(p): key for key, p in enumerate(params.held)}  # id of a parameter -> its key
        self._homes: dict[int, Tensor] = {}  # key -> DeepSpeed's memory of a parameter that lies in a spot
        self._aliases: dict[int, list[weakref.ref[Tensor]]] = {}  # key -> p.data and p.detach() in DeepSpeed's memory
        self._module, self._under_way, self._gradients = params, under_way, gradients
        self._backward, self._before_bring = backward, before_bring
        self._versions: dict[int, int] = {}  # key -> the parameter's version when it was last stored
        self._maybe_written: set[int] = set()  # keys of writes that a version does not show
        self._buffers: dict[int, tuple[Any, int]] = {}  # stages 1 and 2: each buffer and its number of users
        if self._stage3:
            for p in params.held:
                private.watch(p, self.before_free)

    def begin(self) -> None:
        """Records versions and buffers, once DeepSpeed has laid out its memory."""
        for key, p in enumerate(self._params):
            self._versions[key] = version_of(p)
        if not self._stage3:
            buffers = {_memory(p): p.untyped_storage() for p in self._params}
            self._buffers = {key: (buffer, users_of(buffer)) for key, buffer in buffers.items()}

    def end(self) -> None:
        """Drops all parameters, which are ordinary tensors again."""
        self._own.clear()
        self._params.clear()
        self._homes.clear()
        self._buffers.clear()

    @property
    def own(self) -> Mapping[int, Any]:
        return self._own

    # -- keys ----------------------------------------------------------------------------------------------------

    def key_of(self, p: Tensor) -> int:
        return self._own[id(p)]

    def key_of_sharded(self, tensor: DTensor) -> int | None:
        return None

    def parameters(self, key: int) -> Sequence[Tensor]:
        return [self._params[key]] if key < len(self._params) else ()

    def name(self, key: int) -> str:
        number = key % len(self._params)
        found = next((name for name, p in self._module.named.items() if p is self._params[number]), "?")
        return f"parameter {found!r}" if key == number else f"the gradient of parameter {found!r}"

    def is_there(self, p: Tensor) -> bool:
        if self._under_way.is_between():
            return False  # so that a touch opens the parameter, and its values are stored when the window ends
        return not (private.is_partitioned(p) or private.is_ahead(p))

    def shard_of(self, p: Tensor) -> Tensor:
        return p

    def address(self, tensor: Tensor) -> int:
        cut = private.cut_of(tensor)
        return (tensor if cut is None else cut).data_ptr() or id(tensor)

    # -- opening and closing -------------------------------------------------------------------------------------

    def is_here(self, key: int) -> bool:
        if key >= len(self._params):  # a gradient
            return False
        if self._stage3:
            private.land(self._params[key])
        return not private.is_partitioned(self._params[key])

    def gather(self, key: int) -> list[Tensor]:
        num = len(self._params)
        if key < num:
            p = self._params[key]
            return [p.data if self.is_here(key) else private.gathered_copy(p)]
        return [self._gradients.assembled(self._params[key - num])]

    def open(self, key: int, values: list[Tensor]) -> list[Tensor]:
        if not self.is_here(key):
            set_data(self._params[key], values[0])
        return []

    def is_held(self, key: int) -> bool:
        p = self._params[key]
        in_place = self.is_here(key) and key not in self._homes
        return not in_place and self._views.are_held(p, users_of(p.untyped_storage()) - 1)

    def close(self, key: int) -> None:
        p = self._params[key]
        self._store(p)
        self._leave(key, p)

    def _leave(self, key: int, p: Any) -> None:
        """Puts ``p`` back into DeepSpeed's memory, or frees it if DeepSpeed has none for it."""
        place, home = p.data, self._homes.pop(key, None)
        if home is not None:
            home.copy_(place)
            set_data(p, home)
        elif self.is_here(key):
            return
        else:
            private.free(p)
        storage = place.untyped_storage()
        self._views.leave(p, storage, users_of(storage) - 1)

    # -- writes --------------------------------------------------------------------------------------------------

    def _store(self, p: Any) -> None:
        """Stores this rank's elements of ``p`` in shards and masters.

        Every write of user code must end here, or the next step restores the old master."""
        if private.is_managed(p):
            private.store_part(p)
        key, shards = self._own[id(p)], self._module.shards
        if (home := self._homes.get(key)) is not None:
            home.copy_(p)
        if shards is not None and p in shards:
            shards.adopt(p)
        self._versions[key] = version_of(p)
        self._maybe_written.discard(key)

    def _is_written(self, key: int, p: Tensor) -> bool:
        return key in self._homes or key in self._maybe_written or self._versions.get(key) != version_of(p)

    def settle(self) -> None:
        """Stores all that was written inside a step, and moves parameters back into DeepSpeed's memory."""
        held = {key for key, (each, num) in self._buffers.items() if users_of(each) > num or _is_numpys(each)}
        if held:  # user code holds these buffers and may write to them at any time
            self._maybe_written.update(key for key, p in enumerate(self._params) if _memory(p) in held)
        for key, p in enumerate(self._params):
            if not private.is_partitioned(p) and self._is_written(key, p):
                self._store(p)
                if key in self._homes:
                    self._leave(key, p)

    def stepped(self, params: Iterable[Tensor]) -> None:
        """Records that an optimizer has changed ``params``; a backward through older graphs raises afterwards."""
        self.settle()  # hooks of the optimizer may have written to parameters
        changed = [p for p in params if id(p) in self._own]
        increment_version(changed)
        self._versions.update((self._own[id(p)], version_of(p)) for p in changed)

    def written(self, p: Tensor) -> None:
        if not self._under_way.is_between() and Phase.BACKWARD not in self._under_way:
            self._maybe_written.add(self._own[id(p)])

    # -- memory that user code holds -----------------------------------------------------------------------------

    def used(self, params: Sequence[Tensor], result: Any, aliases: bool, first: Any) -> None:
        if aliases and self._stage3 and Phase.BACKWARD not in self._under_way:
            with DisableTorchFunction():
                for p in params:
                    self._views.take(p, result)
        if first is None and self._stage3:  # a compiled graph, whose backward computes with the parameters themselves
            for p in params:
                self.bring(p)

    def before_free(self, p: Tensor) -> None:
        """Is called before DeepSpeed frees the memory of ``p``."""
        key = self._own[id(p)]
        self.residency.close(key)
        if self._is_written(key, p) or _is_numpys(p.untyped_storage()):
            self._store(p)
        self._homes.pop(key, None)
        self._views.leave_in_step(p, lambda: (p.untyped_storage(), users_of(p.untyped_storage()) - 1))

    # -- calls ---------------------------------------------------------------------------------------------------

    def bring(self, p: Tensor) -> None:
        self._before_bring(p)
        private.keep(p)
        self.is_keeping = True

    def grad_of(self, p: Tensor) -> Tensor | None:
        key = len(self._params) + self._own[id(p)]

        def full() -> Tensor:
            with DisableTorchFunction(), torch.no_grad():
                return self.residency.gather(key)[0][0]

        return self._gradients.read(p, full)

    def assign_grad(self, p: Tensor, value: Tensor | None) -> None:
        self._gradients.write(p, value)

    def backward(self, func: Any, run: Callable[[], Any]) -> Any:
        in_step = Phase.STEP in self._under_way and Phase.BACKWARD not in self._under_way
        if func is torch.autograd.grad:
            if in_step:
                self.keep_all()
        elif in_step and self._module.shards is not None:
            return self._backward(run)
        return run()

    def before_collective(self, tensors: Sequence[Any]) -> None:
        """Does nothing: the collective's writes are stored when the window ends."""

    def aliased(self, p: Tensor, alias: Tensor) -> None:
        key = self._own[id(p)]
        if self.is_here(key):
            alive = [each for each in self._aliases.get(key, ()) if each() is not None]
            self._aliases[key] = [*alive, weakref.ref(alias)]
        elif self._under_way.is_between():
            self._views.take(p, alias)

    def assign_data(self, p: Tensor, value: Tensor) -> None:
        require_shape("data", p, value)
        if _lie_alike(value, p):
            return
        key = self._own[id(p)]
        if self.is_here(key) and key not in self._homes:
            for each in self._aliases.pop(key, ()):
                if (alias := each()) is not None and _memory(alias) == _memory(p):  # an alias keeps the old values
                    set_data(alias, alias.clone())
            self._homes[key] = p.data
        self._views.moved(p)
        if any(_memory(value) == _memory(each) for each in self._params):
            value = value.clone()  # value lies in another parameter's memory, which DeepSpeed may free
        set_data(p, value.detach())
        self.written(p)

    def keep_all(self) -> None:
        """Keeps all parameters full until the step ends, because a user's own backward begins inside the step.

        Another backward then uses the same parameters in an order that no module's hooks follow."""
        if self._stage3:
            with DisableTorchFunction(), torch.no_grad():
                for p in self._params:
                    private.keep(p)
                self.is_keeping = True


def _memory(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _is_numpys(memory: Any) -> bool:
    """Whether NumPy may share ``memory``; NumPy's writes change no version counter."""
    return memory.device.type == "cpu" and not memory.resizable()


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    same = _memory(a) == _memory(b)
    return same and a.storage_offset() == b.storage_offset() and a.stride() == b.stride()
