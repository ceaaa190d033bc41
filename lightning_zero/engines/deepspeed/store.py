"""DeepSpeed's side of :mod:`~lightning_zero.engines.residency`: opens and closes its parameters by their keys.

With P parameters, parameter ``n`` has the key ``n``, and its gradient the key ``P + n``. Optimizers' states have keys
from ``2 P`` on, in the order in which they were made, which all ranks share.

At stages 1 and 2 a parameter is always full, a view of DeepSpeed's buffer. At stage 3 DeepSpeed allocates it when its
module runs, and empties it afterwards; an empty parameter has shape (0,). A parameter that user code has open lies in
memory of its own (its *spot*). So does, until the step ends, a parameter of which user code has touched older memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.gradients import Gradients
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay
from lightning_zero.engines.refusals import require_shape
from lightning_zero.engines.residency import Memories, Resharded, Residency
from lightning_zero.engines.torch_functions import tensors_in
from lightning_zero.private.torch import (
    DisableTorchFunction,
    is_in_graph_alone,
    set_data,
    storage_key,
    users_of,
    version_of,
)


class State(NamedTuple):
    """A state of an optimizer that steps on pieces; ``piece`` is this rank's part, 1-D."""

    key: int
    parameter: Tensor
    piece: Tensor


class DeepSpeedStore:
    """Implements :class:`~lightning_zero.engines.residency.Store`.

    Attributes:
        residency: Must be set by the creator of the store.
        is_keeping: Whether parameters have been gathered for the rest of the step. Reset by the engine.

    Args:
        params: The module's parameters, with masters and gradients once an optimizer is attached.
        under_way: The engine's current activities.
        backward: The engine's ``backward``, for a backward that user code starts inside a step.
        before_bring: Called before a parameter is gathered in a step.
    """

    residency: Residency
    only_brings = True
    is_keeping = False

    def __init__(
        self,
        params: Parameters,
        under_way: UnderWay,
        memories: Memories,
        gradients: Gradients,
        backward: Callable[[Callable[[], None]], None],
        before_bring: Callable[[Tensor], None],
    ) -> None:
        self.hides_shapes = self._stage3 = params.stage3
        self._memories = memories
        self._params: list[Any] = list(params.held)
        self._own: dict[int, int] = {id(p): key for key, p in enumerate(params.held)}  # id of a parameter -> its key
        self._homes: dict[int, Tensor] = {}  # key -> DeepSpeed's memory of a parameter that lies in a spot
        self._aliases: dict[int, list[weakref.ref[Tensor]]] = {}  # key -> p.data and p.detach() in DeepSpeed's memory
        self._module, self._under_way, self._gradients = params, under_way, gradients
        self._backward, self._before_bring = backward, before_bring
        self._versions: dict[int, int] = {}  # key -> the parameter's version when it was last stored
        self._maybe_written: set[int] = set()  # keys of writes that a version does not show
        self._taken: dict[int, list[weakref.ref[Tensor]]] = {}  # key -> views taken inside a step
        self._buffers: dict[int, tuple[Any, int]] = {}  # stages 1 and 2: each buffer and its number of users
        self._states: Any = WeakIdKeyDictionary()  # the full tensor that users see -> State
        self._states_by_key: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._num_states = 0  # states made so far; never decreases, so that keys stay unique
        if self._stage3:
            for p in params.held:
                private.watch(p, self.before_empty)

    def begin(self) -> None:
        """Records versions and buffers, once DeepSpeed has laid out its memory."""
        for key, p in enumerate(self._params):
            self._versions[key] = version_of(p)
        if not self._stage3:
            buffers = {_memory(p): p.untyped_storage() for p in self._params}
            self._buffers = {key: (buffer, users_of(buffer)) for key, buffer in buffers.items()}

    def end(self) -> None:
        """Drops all parameters, which are ordinary tensors again, and states: a touch of one that is left raises."""
        for full in self._states:
            if isinstance(full, Resharded):
                full.residency = None
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
        if key >= 2 * len(self._params):
            return "an optimizer's state"
        number = key % len(self._params)
        found = next((name for name, p in self._module.named.items() if p is self._params[number]), "?")
        return f"parameter {found!r}" if key == number else f"the gradient of parameter {found!r}"

    def is_there(self, p: Tensor) -> bool:
        if self._under_way.is_between():
            return False  # so that a touch opens the parameter, and its values are stored when the window ends
        if not self._stage3 or Phase.BACKWARD in self._under_way:
            return True
        return not (private.is_partitioned(p) or private.is_ahead(p))

    def shard_of(self, p: Tensor) -> Tensor:
        return p.new_empty(()).expand(private.full_shape(p))

    def address(self, tensor: Tensor) -> int:
        cut = private.cut_of(tensor)
        return (tensor if cut is None else cut).data_ptr() or id(tensor)

    # -- opening and closing -------------------------------------------------------------------------------------

    def is_here(self, key: int) -> bool:
        if key >= len(self._params):  # a gradient, or a state
            return False
        if self._stage3:
            private.land(self._params[key])
        return not private.is_partitioned(self._params[key])

    def gather(self, key: int) -> list[Tensor]:
        num = len(self._params)
        if key < num:
            p = self._params[key]
            return [p.data if self.is_here(key) else private.gathered_copy(p)]
        if key < 2 * num:
            return [self._gradients.assembled(self._params[key - num])]
        full, shards = self._states_by_key.get(key), self._module.shards
        if full is None or shards is None:
            raise RuntimeError(
                "an optimizer's state is read that does not exist on every rank: create the state on every rank"
            )
        _, p, piece = self._states[full]
        return [shards.assemble(p, piece)]

    def open(self, key: int, values: list[Tensor]) -> list[Tensor]:
        if key >= len(self._params):
            self._states_by_key[key].open(values[0])
            return []
        p, value = self._params[key], values[0]
        spot = self._memories.again(key, 0)
        if spot is not None:
            self._move(key, p, spot)
            spot.copy_(value)
        elif not self.is_here(key):
            set_data(p, value)
        return []

    def _move(self, key: int, p: Tensor, spot: Tensor) -> None:
        """Puts ``p`` into ``spot``, until :meth:`_leave`. Does not copy values."""
        if self.is_here(key) and key not in self._homes:
            self._homes[key] = p.data
        set_data(p, spot)

    def close(self, key: int) -> None:
        if key < len(self._params):
            p = self._params[key]
            self._store(p)
            self._leave(key, p)
            return
        full, shards = self._states_by_key.get(key), self._module.shards
        if full is None:  # already freed
            return
        _, p, piece = self._states[full]
        if shards is not None:
            piece.copy_(shards.cut(p, full))
        if users_of(full.untyped_storage()) > 1:
            self._memories.keep(key, 0, full)
        Resharded.close(full, key, self.residency)

    def _leave(self, key: int, p: Any) -> None:
        """Puts ``p`` back into DeepSpeed's memory, or empties ``p`` if DeepSpeed has none for it."""
        place, home = p.data, self._homes.pop(key, None)
        if home is not None:
            home.copy_(place)
            set_data(p, home)
        elif self.is_here(key):
            return
        else:
            private.empty(p)
        self._memories.keep(key, 0, place)

    # -- states --------------------------------------------------------------------------------------------------

    def state(self, p: Tensor, piece: Tensor) -> Tensor:
        """Makes the tensor of the full shape of ``p`` that represents ``piece``, a state of ``p``, between steps."""
        key = 2 * len(self._params) + self._num_states
        self._num_states += 1
        full = torch.empty(self._module.shapes[p], dtype=piece.dtype, device=p.device)
        self._states[full], self._states_by_key[key] = State(key, p, piece), full
        Resharded.close(full, key, self.residency)
        return full

    def known_state(self, value: Any) -> State | None:
        """Returns the state if ``value`` was made by :meth:`state`."""
        found: State | None = self._states.get(value) if isinstance(value, Tensor) else None
        return found

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
            with torch.no_grad(), DisableTorchFunction():
                self._go_where_it_is_held(p)

    # -- memory that user code holds -----------------------------------------------------------------------------

    def used(self, params: Sequence[Tensor], result: Any, aliases: bool, first: Any) -> None:
        if aliases and self._stage3 and Phase.BACKWARD not in self._under_way:
            for p in params:
                self._taken.setdefault(self._own[id(p)], []).extend(map(weakref.ref, tensors_in((result,))))
        if first is None and self._stage3:  # a compiled graph, whose backward computes with the parameters themselves
            for p in params:
                self.bring(p)

    def before_empty(self, p: Tensor) -> None:
        """Is called before DeepSpeed frees the memory of ``p``."""
        key = self._own[id(p)]
        self.residency.close(key)
        if self._is_written(key, p) or _is_numpys(p.untyped_storage()):
            self._store(p)
        taken = self._taken.pop(key, None) if self._taken else None
        if self._homes.pop(key, None) is not None or (taken is not None and _is_held(p, taken)):
            self._memories.keep(key, 0, p.data)

    def _go_where_it_is_held(self, p: Tensor) -> None:
        """Moves ``p`` into memory of it that user code holds, so that views and parameter share values."""
        key = self._own[id(p)]
        spot = self._memories.again(key, 0)
        if spot is not None and _memory(spot) != _memory(p):
            spot.copy_(p)
            self._move(key, p, spot)

    # -- calls ---------------------------------------------------------------------------------------------------

    def bring(self, p: Tensor) -> None:
        self._before_bring(p)
        private.keep(p)
        self.is_keeping = True
        self._go_where_it_is_held(p)

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
        self._memories.forget(key, 0)
        if self._memories.is_of(value) is not None or any(_memory(value) == _memory(each) for each in self._params):
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


def _is_held(p: Tensor, taken: Sequence[weakref.ref[Tensor]]) -> bool:
    """Whether user code holds the memory of ``p``: it has more users than ``p`` and the views that only graphs hold."""
    in_graph = sum(map(is_in_graph_alone, taken))
    return users_of(p.untyped_storage()) - 1 > in_graph
