"""DeepSpeed's side of :mod:`~lightning_zero.engines.residency`: opens and closes its parameters by their keys.

With P parameters, parameter ``n`` has the key ``n``, its gradient the key ``P + n``, and optimizer states have
keys from ``2 P`` on.

At stages 1 and 2 a parameter is always full, a view of DeepSpeed's buffer. At stage 3 DeepSpeed gathers it when its
module runs, and frees its memory afterwards; the shape stays. Between steps a parameter that user code touches is
gathered into memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.gradients import Gradients
from lightning_zero.engines.deepspeed.parameters import Parameters, Phase
from lightning_zero.engines.refusals import require_shape
from lightning_zero.engines.residency import Residency, States, Views, views_of
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
        views: Views,
        gradients: Gradients,
        backward: Callable[[Callable[[], None]], None],
        before_bring: Callable[[Tensor], None],
    ) -> None:
        self._stage3 = params.stage3
        self.refill: Callable[[Tensor], None] | None = self._refill if params.stage3 else None
        self.views = views
        self._params: list[Any] = list(params.held)
        self._own: dict[int, int] = {id(p): key for key, p in enumerate(params.held)}  # id of a parameter -> its key
        self._aliases: dict[int, Any] = {}  # stages 1 and 2: key -> its views, a WeakIdKeyDictionary used as a set
        self._module, self._gradients = params, gradients
        self.states = States(
            2 * len(self._params),
            gather=lambda key, assembly: assembly(),
            store=lambda full, assembly: assembly.part.copy_(assembly.of(full)),
        )
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
        self._buffers.clear()

    @property
    def own(self) -> Mapping[int, Any]:
        return self._own

    # -- keys ----------------------------------------------------------------------------------------------------

    def key_of(self, p: Tensor) -> int:
        return self._own[id(p)]

    def name(self, key: int) -> str:
        number = key % len(self._params)
        found = next((name for name, p in self._module.named.items() if p is self._params[number]), "?")
        return f"parameter {found!r}" if key == number else f"the gradient of parameter {found!r}"

    def is_there(self, p: Tensor) -> bool:
        if self._module.is_between():
            return False  # so that a touch opens the parameter, and its values are stored when the window ends
        return not (private.is_partitioned(p) or private.is_ahead(p))

    def shard_of(self, p: Tensor) -> Tensor:
        return p

    def address(self, p: Tensor) -> int:
        cut = private.cut_of(p)
        return (p if cut is None else cut).data_ptr() or id(p)

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

    def open(self, key: int, values: list[Tensor]) -> None:
        if key >= len(self._params):
            self._gradients.opened(self._params[key - len(self._params)], values[0])
        elif not self.is_here(key):
            set_data(self._params[key], values[0])

    def is_held(self, key: int) -> bool:
        if key >= len(self._params):
            return self._gradients.is_held(self._params[key - len(self._params)])
        p = self._params[key]
        return not self.is_here(key) and self.views.are_held(p, users_of(p.untyped_storage()) - 1)

    def close(self, key: int) -> None:
        if key >= len(self._params):
            self._gradients.close(self._params[key - len(self._params)])
            return
        p = self._params[key]
        self._store(p)
        if not self.is_here(key):
            storage = p.untyped_storage()
            private.free(p)
            self.views.leave(p, storage, users_of(storage))

    # -- writes --------------------------------------------------------------------------------------------------

    def _store(self, p: Any) -> None:
        """Stores this rank's elements of ``p`` in shards and masters.

        Every write of user code must end here, or the next step restores the old master."""
        if private.is_managed(p):
            private.store_part(p)
        key, shards = self._own[id(p)], self._module.shards
        if shards is not None and p in shards:
            shards.adopt(p)
        self._versions[key] = version_of(p)
        self._maybe_written.discard(key)

    def _is_written(self, key: int, p: Tensor) -> bool:
        return key in self._maybe_written or self._versions.get(key) != version_of(p)

    def settle(self) -> None:
        """Stores all that was written inside a step."""
        held = {key for key, (each, num) in self._buffers.items() if users_of(each) > num or _is_numpys(each)}
        if held:  # user code holds these buffers and may write to them at any time
            self._maybe_written.update(key for key, p in enumerate(self._params) if _memory(p) in held)
        for key, p in enumerate(self._params):
            if not private.is_partitioned(p) and self._is_written(key, p):
                self._store(p)

    def stepped(self, params: Iterable[Tensor]) -> None:
        """Records that an optimizer has changed ``params``; a backward through older graphs raises afterwards."""
        self.settle()  # hooks of the optimizer may have written to parameters
        changed = [p for p in params if id(p) in self._own]
        increment_version(changed)
        self._versions.update((self._own[id(p)], version_of(p)) for p in changed)

    def written(self, p: Tensor) -> None:
        if not self._module.is_between():
            self._maybe_written.add(self._own[id(p)])

    # -- memory that user code holds -----------------------------------------------------------------------------

    def _refill(self, p: Tensor) -> None:
        self.residency.touch([p], brings=True)

    def before_free(self, p: Tensor) -> None:
        """Is called before DeepSpeed frees the memory of ``p``."""
        key = self._own[id(p)]
        self.residency.close(key)
        if self._is_written(key, p) or _is_numpys(p.untyped_storage()):
            self._store(p)
        self.views.leave_in_step(p, lambda: (p.untyped_storage(), users_of(p.untyped_storage()) - 1))

    # -- calls ---------------------------------------------------------------------------------------------------

    def bring(self, p: Tensor) -> None:
        self._before_bring(p)
        private.keep(p)
        self.is_keeping = True

    def grad_of(self, p: Tensor) -> Tensor | None:
        key = len(self._params) + self._own[id(p)]
        with DisableTorchFunction():
            return self._gradients.read(p, lambda: self.residency.open_again(key))

    def assign_grad(self, p: Tensor, value: Tensor | None) -> None:
        self._gradients.write(p, value)

    def backward(self, func: Any, run: Callable[[], Any]) -> Any:
        in_step = self._module.phase is Phase.STEP
        if func is torch.autograd.grad:
            if in_step:
                self.keep_all()
        elif in_step and self._module.shards is not None:
            return self._backward(run)
        return run()

    def before_collective(self, tensors: Sequence[Any]) -> None:
        """Does nothing: the collective's writes are stored when the window ends."""

    def aliased(self, p: Tensor, alias: Any) -> None:
        key = self._own[id(p)]
        if not self._stage3:
            # the buffer holds other parameters, too
            if own := [view for view in views_of(p, alias) if 0 <= view.data_ptr() - p.data_ptr() < max(p.nbytes, 1)]:
                self._aliases.setdefault(key, WeakIdKeyDictionary()).update(dict.fromkeys(own))
        elif not (self._module.is_between() and self.is_here(key)):
            self.views.take(p, alias)

    def assign_data(self, p: Tensor, value: Tensor) -> None:
        require_shape("data", p, value)
        if value.data_ptr() == p.data_ptr() and value.stride() == p.stride():
            return
        key, shards = self._own[id(p)], self._module.shards
        if self._stage3 or shards is None or p not in shards:
            self.views.moved(p)
            set_data(p, value.detach())
        elif not self._module.is_between():
            raise ValueError(
                f"{self.name(key)}: p.data = value inside a step moves the parameter out of DeepSpeed's buffer: write"
                " p.data.copy_(value), do it in a hook, or use engine='fsdp2' (or stage=3)."
            )
        else:  # p must stay in DeepSpeed's buffer, but its aliases keep the old values
            for alias in list(self._aliases.pop(key, ())):
                set_data(alias, alias.clone())
            p.data.copy_(value)
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
