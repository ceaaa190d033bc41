"""Shards the parameters of a module while ``configure_model`` builds it, so that no process ever holds all of them.

[Memory] An *open* parameter is full on every rank, as its constructor left it. A *closed* parameter has an empty
storage; each rank keeps its part of rank 0's bytes, padded at the end so that all parts have equal length. Shape,
strides and dtype do not change.

Constructors run unchanged, on full tensors and with the random numbers of ordinary construction. This module learns of
a parameter when the parameter, or a module that holds it, is registered. When open parameters take more than
``OPEN_BYTES``, those opened first are closed. A closed parameter has a *guarded class* (see
:mod:`~lightning_zero.engines.residency`): until the engine shards its unit, each torch call opens the closed parameters
among its arguments first. A parameter stays open while anything other than Python holds it or its memory: a view, a
graph, NumPy, or a thread started since.

[Agreement] Opening and closing are collective. They follow from registrations and calls, which are the same on ranks
that run the same code. Before each, the ranks compare what they are about to do; if it differs, all of them raise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from lightning_zero.comm.agree import Agreement, run_agreement
from lightning_zero.engines.base import OnWhole, unheard
from lightning_zero.engines.birth import OPEN_BYTES
from lightning_zero.engines.residency import guarded, needs_no_values
from lightning_zero.private.torch import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    is_in_graph,
    pytree,
    set_data,
    torch_function_of,
    users_of,
)

_FROM_PARAMETER = nn.Parameter.__new__.__code__
"""Code of the constructor that compares the class of ``p.detach()`` with that of ``p``, for ``nn.Parameter``
subclasses."""
_FRAMES = 8
_ADDRESSES = frozenset(["data_ptr", "storage", "untyped_storage"])
LEAST_BYTES = 64 * 2**10
"""Smaller parameters stay open: biases and norms are a thousandth of a large module, not worth a message each."""


class Build:
    """Opens and closes parameters of one run, from ``configure_model`` to the engine's start.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._agreement = run_agreement() or Agreement(alone=True)
        self._places: dict[int, tuple[int, str]] = {}  # id of each known parameter -> number and name
        self._open: dict[int, nn.Parameter] = {}  # by id, in the order of opening
        self._closed: dict[int, tuple[nn.Parameter, Tensor]] = {}  # by id; the part is 1D, uint8
        self._pinned: set[int] = set()  # ids of parameters whose address user code has: never closed again
        self._closes = True
        self._kinds: dict[type, type] = {}  # guarded classes -> plain ones
        self._guarded: dict[type, type] = {}
        self._thread, self._num_threads = threading.current_thread(), _num_threads()
        self._misuse: RuntimeError | None = None  # raised in another thread, where it may go unnoticed
        self._differs = False  # all ranks have raised already, so no further message follows
        self._aside: list[tuple[nn.Parameter, Tensor]] = []

    @contextmanager
    def building(self) -> Iterator[None]:
        """Close parameters as needed inside; wraps ``configure_model`` (collective).

        Raises:
            RuntimeError: On all ranks, if they build different modules. If one rank fails, all raise its error.
        """

        def on_parameter(module: nn.Module, name: str, p: Any) -> None:
            self._register([(f"{type(module).__name__}.{name}", p)])

        def on_module(module: nn.Module, name: str, child: Any) -> None:
            if child is not None:
                kind = type(child).__name__
                self._register((f"{kind}.{inner}", p) for inner, p in child.named_parameters())

        self._num_threads = _num_threads()
        handles = (
            register_module_parameter_registration_hook(on_parameter),
            register_module_module_registration_hook(on_module),
        )
        try:
            yield
            if self._misuse is not None:
                raise self._misuse
        except Exception as error:
            if not self._differs:
                self._agreement.gather(None, error=error)  # the others wait in an exchange, or at the end
            raise
        finally:
            for handle in handles:
                handle.remove()
        self._agree("end", [], f"after {len(self._places)} parameters")

    @property
    def found(self) -> bool:
        """Whether any parameter is closed."""
        return bool(self._closed)

    def hand_over(self) -> None:
        """Stop closing parameters: the engine takes them from here on and opens each one as it does."""
        self._closes = False
        self._open.clear()

    def leave_aside(self) -> None:
        """Empty the closed parameters until :meth:`restore`: the run has ended before its engine took the module."""
        with DisableTorchFunction(), torch.no_grad():
            for p, _ in self._closed.values():
                p.__class__ = self._kinds.get(type(p), type(p))
                self._aside.append((p, p.data))
                set_data(p, p.data.new_empty(0))

    def restore(self, whole: bool, optimizers: Iterable[Any] = (), on_whole: OnWhole = unheard) -> None:
        """Make the module an ordinary one again, with full parameters (collective)."""
        if not whole:
            return
        self._agreement = run_agreement() or Agreement(alone=True)
        self.hand_over()
        for p, data in self._aside:
            with DisableTorchFunction(), torch.no_grad():
                set_data(p, data)
            self._make_open([p])
            on_whole(p)
        self._aside.clear()

    # -- events --------------------------------------------------------------------------------------------------

    def replaced(self, p: nn.Parameter) -> None:
        """Register ``p``, which an earlier run had sharded and which has full memory again."""
        self._register([(type(p).__name__, p)])

    def _register(self, named: Iterable[tuple[str, Any]]) -> None:
        if threading.current_thread() is not self._thread:
            return  # registered later, when a module of the building thread takes the parameter
        with DisableTorchFunction(), torch.no_grad():
            for name, p in named:
                if id(p) not in self._places and _can_be_closed(p):
                    self._places[id(p)] = len(self._places), name
                    self._open[id(p)] = p
            self._make_room()

    def _ask(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Any) -> Any:
        """Run ``func(*args, **kwargs)``, a torch call with closed parameters among its arguments, which it opens."""
        if needs_no_values(func):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found, given = {}, {id(value): value for value in pytree.tree_leaves((args, kwargs))}
        for value in given.values():
            if id(value) in self._closed:
                found[id(value)] = value
            elif type(value) in self._kinds:  # not a closed parameter: user code made it by type(p)(...)
                value.__class__ = self._kinds[type(value)]
        if func.__name__ in _ADDRESSES:
            self._pinned.update(found)
        if found:
            self._make_open(list(found.values()), given)
        result = func(*args, **(kwargs or {}))
        if func is Tensor.detach and _is_for_a_parameter():
            result.__class__ = type(args[0])
        return result

    def _make_open(self, params: Sequence[nn.Parameter], needed: Collection[int] = ()) -> None:
        """Open ``params`` (collective); parameters with ids in ``needed`` stay open."""
        if threading.current_thread() is not self._thread:
            self._misuse = RuntimeError(
                f"thread {threading.current_thread().name} uses {self._places[id(params[0])][1]}, which is sharded"
                " while configure_model builds the module: use it in the thread that builds, or set build='whole', so"
                " that every rank builds the full module."
            )
            raise self._misuse
        with DisableTorchFunction(), torch.no_grad():
            self._make_room(sum(p.nbytes for p in params), needed)
            self._agree("open", params)
            for p in params:
                _, part = self._closed.pop(id(p))
                storage = p.untyped_storage()
                storage.resize_(part.numel() * dist.get_world_size())
                dist.all_gather_into_tensor(_bytes_of(storage), part)
                p.__class__ = self._kinds.get(type(p), type(p))
                self._open[id(p)] = p

    def _make_room(self, more_bytes: int = 0, needed: Collection[int] = ()) -> None:
        """Close the parameters opened first. The newest stays open: its constructor is about to fill it."""
        rest = sum(p.nbytes for p in self._open.values()) + more_bytes
        if not self._closes or rest <= OPEN_BYTES:
            return
        # Choose by sizes and order alone, which are the same on all ranks. References and free memory may differ
        # between ranks, so they count only through _agree.
        oldest = []
        for p in list(self._open.values())[:-1]:
            if rest <= OPEN_BYTES // 2:
                break
            if id(p) not in needed:
                oldest.append(p)
                rest -= p.nbytes
        if not oldest:
            return
        held = self._agree("close", oldest, held=[id(p) in self._pinned or self._is_held(p) for p in oldest])
        for p, by_any in zip(oldest, held, strict=True):
            del self._open[id(p)]
            if by_any:
                self._open[id(p)] = p  # moved to the back: checked again after all others
            else:
                self._close(p)

    def _is_held(self, p: nn.Parameter) -> bool:
        """Whether something may use the memory of ``p`` without passing through its guarded class."""
        storage = p.untyped_storage()
        return _num_threads() > self._num_threads or is_in_graph(p) or users_of(storage) > 1 or not storage.resizable()

    def _close(self, p: nn.Parameter) -> None:
        storage = p.untyped_storage()
        full = _bytes_of(storage)
        dist.broadcast(full, 0)
        part_bytes = -(-full.numel() // dist.get_world_size())
        own = full[part_bytes * dist.get_rank() :][:part_bytes]
        part = full.new_zeros(part_bytes)
        part[: own.numel()].copy_(own)
        self._closed[id(p)] = p, part
        storage.resize_(0)
        kind = type(p)
        if kind not in self._guarded:
            self._guarded[kind] = guarded(kind, self._ask)
            self._kinds[self._guarded[kind]] = kind
        p.__class__ = self._guarded[kind]

    def _agree(
        self, event: str, params: Sequence[nn.Parameter], more: str = "", held: Sequence[bool] = ()
    ) -> list[bool]:
        """Raise ``RuntimeError`` on all ranks unless they are about to do the same. ``held`` says for each parameter
        whether this rank holds it; returns whether any rank does."""
        mine = event, tuple((*self._places[id(p)], p.nbytes) for p in params), more
        self._differs = True  # also if gather raises the error of another rank
        found = self._agreement.gather((mine, held), "configure_model at stage 3 with build='auto'")
        self._differs = any(each != mine for each, _ in found)
        if not self._differs:
            return [any(flags) for flags in zip(*(flags for _, flags in found), strict=True)]
        raise RuntimeError(
            "ranks build different modules, or some ranks use parameters that others do not: "
            + "; ".join(f"rank {rank}: {_said(each)}" for rank, (each, _) in enumerate(found))
            + ". At stage 3 parameters are sharded while configure_model builds them, so all ranks must run the same"
            " code there and up to the start of training; or set build='whole', so that every rank builds the full"
            " module."
        )


def _is_for_a_parameter() -> bool:
    """Whether ``nn.Parameter(p)`` is the caller of ``p.detach()``, perhaps through torch function modes."""
    frame = sys._getframe(2).f_back
    for _ in range(_FRAMES):
        if frame is None or frame.f_code is _FROM_PARAMETER:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is _FROM_PARAMETER


def _num_threads() -> int:
    """Number of non-daemon threads; daemons (those of progress bars) use no parameters."""
    return sum(not thread.daemon for thread in threading.enumerate())


def _can_be_closed(p: Any) -> bool:
    """Whether ``p`` is a plain strided parameter of at least :data:`LEAST_BYTES` without its own torch function."""
    if not isinstance(p, nn.Parameter) or is_lazy(p) or p.is_meta or p.layout != torch.strided:
        return False
    if torch_function_of(type(p)) is not disabled_torch_function or type(p.data) is not Tensor:
        return False
    return p.nbytes >= LEAST_BYTES


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _said(event: Any) -> str:
    what, params, more = event
    names = ", ".join(name for _, name, _ in params[:3]) + (", ..." if len(params) > 3 else "")
    return " ".join(filter(None, (what, names, more)))
