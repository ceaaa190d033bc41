"""Views of a whole tensor that user code got for a sharded one show the shards, and are written through to them.

``p.view(-1)``, ``p[0]`` and ``p.T`` of a sharded ``p`` are views of a gathered copy, which torch would let nobody write
to, or whose writes would be lost; so would those to the values of ``state_dict()``. Of each such copy it is known whose
it is for as long as one of its views lives. An in-place function brings the copy up to date, runs on the view and
stores the rows of this rank; any other function brings up to date what it is given, if shards have changed since.

Views that are taken inside a step (``p.data``, ``p.detach()``, ``p.view(-1)``) are of the engine's own gathered copy.
Held beyond the step they are treated alike: while the parameter is away that memory is stale, or given up, and is made
whole again for whoever looks at it. The next gather and drop of the parameter fill and empty it as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.comm.reads import Changes
from lightning_zero.comm.shards import before_host_write, gathered, local, shard_like
from lightning_zero.engines.fsdp2 import private
from lightning_zero.private.torch import DisableTorchFunctionSubclass, is_in_graph_alone, storage_behind, storage_key


@dataclass
class _Lent:
    owner: DTensor
    origin: DTensor  # the owner, or the shard that it was taken of
    original: Tensor | None
    alive: StorageWeakRef
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    since: int  # the number of changes that it shows
    home: private.Home | None = None  # where the engine's own copies lie
    is_watched: bool = True  # inside steps, too
    views: list[weakref.ref[Tensor]] = field(default_factory=list)  # that were taken in this step

    @property
    def is_gathered(self) -> bool:
        """Whether the copy is the engine's own, and in use."""
        return self.home is not None and not private.is_away(self.home.param)

    def shows(self, done: int) -> bool:
        """Whether the copy has the values of ``done`` changes."""
        if self.is_gathered:
            return True
        return self.since == done and (self.home is None or not private.is_emptied(self.home))

    def over(self, view: Tensor) -> Tensor:
        """All of the copy, of which ``view`` is a part."""
        return view.detach().as_strided(self.owner.shape, self.stride, self.offset)


class LentViews:
    """The gathered copies of which views may be held, by their storage.

    Args:
        changes: Of the shards.

    Attributes:
        watch: Has every call of the rest of a step looked at, if one is under way.
    """

    def __init__(self, changes: Changes | None = None) -> None:
        self.watch: Callable[[], object] = lambda: None
        self._lent: dict[int, _Lent] = {}
        self._taken: dict[int, _Lent] = {}  # of the engine's own copies
        self._taken_of: dict[int, list[_Lent]] = {}  # the same, by the id of what is gathered and dropped together
        self._changes = Changes() if changes is None else changes

    def __bool__(self) -> bool:
        return bool(self._lent or self._taken)

    @property
    def are_held(self) -> bool:
        """Whether plain tensors may be such views inside a step."""
        return bool(self._lent) or any(lent.is_watched for lent in self._taken.values())

    def record(
        self, whole: Tensor, owner: DTensor, original: Tensor | None = None, origin: DTensor | None = None
    ) -> None:
        """``whole`` holds the values of ``owner``, and it or views of it are about to be handed out. ``original``: the
        user's parameter, if the owner is the shard of one. ``origin``: the shard that the owner is an alias of."""
        storage = whole.untyped_storage()
        layout = whole.stride(), whole.storage_offset()
        origin = owner if origin is None else origin
        lent = _Lent(owner, origin, original, StorageWeakRef(storage), *layout, self._changes.begun)
        self._lent[lent.alive.cdata] = lent  # no other storage's as long as this is here
        self.watch()

    def take(self, original: Tensor, view: Any, home: private.Home) -> None:
        """``view`` is one of ``original``, gathered, and about to be handed out; or several are."""
        storage = original.untyped_storage()
        lent = self._taken.get(storage_key(storage))
        if lent is None or lent.home is None or lent.home.param is not home.param:
            shard, layout = home.param.sharded_param, (original.stride(), original.storage_offset())
            lent = _Lent(shard, shard, original, StorageWeakRef(storage), *layout, 0, home, is_watched=False)
            self._taken[storage_key(storage)] = lent
            self._taken_of.setdefault(id(home.group), []).append(lent)
        lent.since = self._changes.begun
        lent.views += [weakref.ref(each) for each in (view if isinstance(view, (list, tuple)) else [view])]

    def dropped(self, group: private.Group) -> bool:
        """``group`` is about to be dropped in a step. Whether views of it are held by others than the graph, and were
        not watched yet."""
        found = False
        for lent in self._taken_of.get(id(group), ()):
            if lent.home is not None and not lent.is_watched:
                in_graph = sum(is_in_graph_alone(reference) for reference in lent.views)
                lent.is_watched = private.others_in(lent.home) > in_graph
                found = found or lent.is_watched
        return found

    def forget_expired(self) -> None:
        """Copies of which nothing is held any more."""
        if self._lent:
            self._lent = {at: lent for at, lent in self._lent.items() if not lent.alive.expired()}
        if self._taken:
            self._taken = {at: lent for at, lent in self._taken.items() if lent.home and private.others_in(lent.home)}
            self._taken_of = {}
            for lent in self._taken.values():
                lent.is_watched = True
                lent.views.clear()

    def owns(self, value: Any) -> bool:
        """Whether ``value``, or one of a list, is such a view, and not of a parameter that is gathered: then it is a
        view of that."""
        if isinstance(value, (list, tuple)):
            return any(map(self.owns, value))
        return isinstance(value, Tensor) and (lent := self._find(value)) is not None and not lent.is_gathered

    def gathered_behind(self, values: Iterable[Any]) -> Iterator[Tensor]:
        """The gathered parameters of which ``values``, and those of lists among them, are views."""
        for value in values:
            if isinstance(value, (list, tuple)):
                yield from self.gathered_behind(value)
            elif isinstance(value, Tensor) and (lent := self._find(value)) is not None and lent.is_gathered:
                assert lent.original is not None
                yield lent.original

    def originals(self, values: Iterable[Tensor]) -> list[Tensor]:
        """The user's parameters in whose gathered copies ``values`` lie."""
        found = [self._find(value) for value in values] if self._taken else []
        return [lent.original for lent in found if lent is not None and lent.home and lent.original is not None]

    def outdated(self, values: Iterable[Any]) -> Iterator[Tensor]:
        """Those of ``values``, and of lists among them, that show shards as they were before a change; none while a
        change is under way."""
        if self._changes.begun != self._changes.done:
            return
        for value in values:
            if isinstance(value, (list, tuple)):
                yield from self.outdated(value)
            elif isinstance(value, Tensor) and (lent := self._find(value)) and not lent.shows(self._changes.done):
                yield value

    @torch.no_grad()
    def update(self, view: Tensor, now: Tensor) -> None:
        """Gives the copy that ``view`` is a part of the values ``now`` of its owner."""
        lent = self._find(view)
        assert lent is not None
        _fill(lent, view, now)
        lent.since = self._changes.done

    def held(self, originals: Mapping[Tensor, nn.Parameter]) -> list[tuple[Tensor, Tensor]]:
        """The copies of which something is alive, each with the user's parameter whose values it is to show when the
        run has ended."""
        found: list[tuple[Tensor, Tensor]] = []
        self.forget_expired()
        for lent in (*self._lent.values(), *self._taken.values()):
            if lent.home is not None:
                private.refill(lent.home)
            p, storage = originals.get(lent.origin), storage_behind(lent.alive)
            if p is not None and storage is not None and _shares_memory(lent.owner, lent.origin):
                copy = torch.empty(0, dtype=lent.owner.dtype, device=storage.device)
                found.append((copy.set_(storage, lent.offset, lent.owner.shape, lent.stride), p))
        return found

    def _find(self, view: Tensor) -> _Lent | None:
        try:
            with DisableTorchFunctionSubclass():  # a class that translates calls is not asked
                if isinstance(view, DTensor) or view.layout != torch.strided:
                    return None
                key = storage_key(view.untyped_storage())
        except RuntimeError:  # no memory of its own: inside a transform of torch.func
            return None
        return self._lent.get(key) or self._taken.get(key)

    def owner(self, view: Tensor) -> tuple[DTensor, Tensor | None]:
        """The shard that ``view`` belongs to, and the user's parameter if the shard is of one."""
        lent = self._find(view)
        assert lent is not None
        return lent.owner, lent.original

    def write(
        self,
        func: Callable[..., Any],
        view: Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        now: Tensor | None = None,
    ) -> Any:
        """``func(view, *args, **kwargs)``, all of whose tensors are whole (collective).

        Args:
            now: The owner as it is gathered, if it is: what is written goes there.
        """
        lent = self._find(view)
        assert lent is not None
        before_host_write(lent.owner)
        with torch.no_grad():
            _fill(lent, view, gathered(lent.owner) if now is None else now)  # other writes since
            with torch.inference_mode() if view.is_inference() else nullcontext():
                copy = lent.over(view)
                result = func(view, *args, **kwargs)
                if hasattr(result, "wait"):  # of a collective with async_op
                    result.wait()
            # outside of inference mode: the engine looks at the version of its shards
            if now is None:
                local(lent.owner).copy_(local(shard_like(copy, lent.owner)))
            else:
                now.copy_(copy)
        lent.since = self._changes.begun
        return result


def _fill(lent: _Lent, view: Tensor, values: Tensor) -> None:
    """The copy that ``view`` is a part of gets the ``values``; no parameter lies in it now."""
    if lent.home is not None:
        private.refill(lent.home, values)
        return
    with private.outside_transforms(), torch.inference_mode() if view.is_inference() else nullcontext():
        lent.over(view).copy_(values)


def _shares_memory(alias: DTensor, origin: DTensor) -> bool:
    """Until ``p.data`` is assigned, an alias does."""
    return storage_key(local(alias).untyped_storage()) == storage_key(local(origin).untyped_storage())
