"""Shards a module while ``configure_model`` builds it, so that no process ever holds all of it.

[Memory]
- *lot*: the memory that a parameter lies in, its untyped storage, whatever parameters and views share it.
- *open lot*: whole on every rank, as an ordinary constructor left it.
- *closed lot*: its storage has no bytes. Each rank keeps its part of rank 0's bytes: ``part_bytes`` of them, padded at
  the end, so that all parts are equally long.

Constructors run as they are, on whole tensors and with the random numbers of ordinary construction. A parameter's lot
is known when the parameter, or a module that holds it, is registered. As soon as the open lots are more than
``OPEN_BYTES`` the oldest ones are closed. Any operator that meets a closed lot, through whatever view of it, opens it
first: initialization that comes later, ties, copies, ``load_state_dict``. A storage keeps its identity through all of
this, so shapes, strides, devices and views stay what they were.

[Agreement] Opening and closing are collective. They follow from registrations and operators, so ranks that run the same
code make them in the same order; before each, ranks compare what they are about to do, and all raise where it differs.
An open lot may be read and written by one rank alone: rank 0's bytes count when it is closed, or sharded at last.

[Escapes] Bytes that leave the reach of operators (``numpy()``, ``data_ptr()``, ...) are never closed.

[Threads] Only the thread that builds takes part in exchanges: no rank can guarantee the order of other threads'
operators. An open lot that another thread uses stays open; a closed one makes it, and then every rank, raise.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lightning_zero.comm.agree import Agreement, run_agreement
from lightning_zero.engines.base import OnWhole, unheard
from lightning_zero.engines.birth import OPEN_BYTES
from lightning_zero.private.torch import DisableTorchFunction, TorchDispatchMode, pytree, set_data, storage_key

LEAST_BYTES = 64 * 2**10
"""Smaller lots are not worth a message: biases and norms of a large module are a thousandth of it."""

_ESCAPES = frozenset(
    "numpy __array__ __dlpack__ __cuda_array_interface__ data_ptr storage untyped_storage share_memory_ __reduce_ex__"
    " set_".split()
)
_READS = frozenset(["tolist", "__deepcopy__"])
"""Functions that read memory by other means than operators, while they run."""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CLONES = (torch.ops.aten.clone.default,)


@dataclass
class _Lot:
    """See the module's text. ``name`` is what it was registered as first."""

    serial: int
    name: str
    nbytes: int
    memory: StorageWeakRef
    part: Tensor | None = field(default=None, repr=False)  # uint8, (part_bytes,); None: open


class Build:
    """One run's building, from ``configure_model`` to the engine's start.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._agreement = _agreement()
        self._lots: dict[int, _Lot] = {}  # storage key -> what is known of it
        self._open: dict[int, Any] = {}  # storage key -> storage, the one that was opened first in front
        self._escaped: dict[int, StorageWeakRef] = {}
        self._num_lots = 0
        self._busy = False  # inside an exchange, whose own operators are nobody's
        self._thread = threading.get_ident()
        self._lock = threading.Lock()  # lots do not change while another thread looks at them
        self._misuse: RuntimeError | None = None  # of another thread, which may have nobody to tell
        self._differs = False  # all ranks have raised
        self._entered: ExitStack | None = None
        self._aside: list[tuple[nn.Parameter, Tensor]] = []

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around ``configure_model`` (collective).

        Raises:
            RuntimeError: On all ranks, where they build different modules. All raise the error of one that fails.
        """

        def on_parameter(module: nn.Module, name: str, p: Any) -> None:
            if not self._is_elsewhere and p is not None:
                self._register([(f"{type(module).__name__}.{name}", p)])

        def on_module(module: nn.Module, name: str, child: Any) -> None:
            if not self._is_elsewhere and child is not None:
                kind = type(child).__name__
                self._register((f"{kind}.{inner}", p) for inner, p in child.named_parameters())

        handles = (
            register_module_parameter_registration_hook(on_parameter),
            register_module_module_registration_hook(on_module),
        )
        try:
            with self.view():
                yield
            if self._misuse is not None:
                raise self._misuse
        except Exception as error:
            if not self._differs:
                self._agreement.gather(None, error=error)  # the others are in an exchange, or at their end
            raise
        finally:
            for handle in handles:
                handle.remove()
        self._meet("end", [], f"after {self._num_lots} parameters")

    @property
    def found(self) -> bool:
        """Whether anything is closed."""
        return any(lot.part is not None for lot in self._lots.values())

    @contextmanager
    def view(self) -> Iterator[None]:
        """Closed lots open as they are used inside it."""
        with _threads_under(self), _Escapes(self), _Operators(self):
            yield

    def begin_view(self) -> None:
        """As :meth:`view`, to :meth:`end_view`."""
        if self._entered is None and self.found:
            self._entered = ExitStack()
            self._entered.enter_context(self.view())

    def end_view(self) -> None:
        """See :meth:`begin_view`."""
        if self._entered is not None:
            self._entered.close()
            self._entered = None

    def release(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``tensors`` are whole from here on, and nobody's (collective); those of them that may differ between ranks,
        as no rank 0's bytes have come for them."""
        used = self._used(tensors)
        same = {key for key in used if self._lots[key].part is not None}
        self._make_whole(used)
        for key in used:
            self._open.pop(key, None)
            self._lots.pop(key, None)
        return [tensor for tensor in tensors if _key_of(tensor) not in same]

    def leave_aside(self) -> None:
        """The run has ended before its engine took the module: what is closed becomes empty, until :meth:`restore`.
        Operators would read memory that is not there."""
        self.end_view()
        with DisableTorchFunction(), torch.no_grad():
            for p in self._module.parameters():
                lot = self._lots.get(_key_of(p))
                if lot is not None and lot.part is not None:
                    self._aside.append((p, p.data))
                    set_data(p, p.data.new_empty(0))

    def restore(self, whole: bool, optimizers: Iterable[Any] = (), on_whole: OnWhole = unheard) -> None:
        """The module is an ordinary one again (collective)."""
        if not whole:
            return
        self._agreement = _agreement()
        for p, data in self._aside:
            self.release([data])
            set_data(p, data)
            on_whole(p)
        self._aside.clear()

    # -- events --------------------------------------------------------------------------------------------------

    def _register(self, named: Iterable[tuple[str, Tensor]]) -> None:
        if self._busy:
            return
        with self._exchanging():
            for name, tensor in named:
                self._follow(name, tensor)
            self._close_the_oldest()

    def touched(self, tensors: Iterable[Any]) -> None:
        """Before an operator runs on ``tensors``: opens what is closed (collective where that is anything)."""
        if self._is_elsewhere:
            self._use_elsewhere(tensors)
            return
        if self._busy or not self._lots:
            return
        with self._exchanging():
            used = self._used(tensors)
            closed = sum(self._lots[key].nbytes for key in used if self._lots[key].part is not None)
            if closed:
                self._close_the_oldest(used, closed)
                self._make_whole(used)

    def copied(self, source: Any, result: Any) -> None:
        """``result`` is a clone of ``source``: that of a parameter is going to be one, mostly (``copy.deepcopy``)."""
        if self._is_elsewhere or self._busy or not isinstance(source, Tensor):
            return
        if (lot := self._lots.get(_key_of(source))) is not None:
            self._register([(lot.name, result)])

    def replaced(self, p: nn.Parameter) -> None:
        """``p.data`` was assigned: it lies elsewhere now."""
        if not self._is_elsewhere and not self._busy:
            self._register([(type(p).__name__, p)])

    def escapes(self, tensor: Any) -> None:
        """The memory of ``tensor`` is about to be known by its address: it stays where it is."""
        if self._is_elsewhere:
            self._use_elsewhere([tensor])
            return
        if self._busy or not isinstance(tensor, Tensor) or not (key := _key_of(tensor)):
            return
        self.touched([tensor])
        with self._exchanging():
            self._keep_open(key, tensor.untyped_storage())

    @property
    def _is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def _use_elsewhere(self, tensors: Iterable[Any]) -> None:
        """Before another thread uses ``tensors``."""
        if not self._lots:
            return
        with self._lock, DisableTorchFunction():
            for key, storage in self._used(tensors).items():
                if self._lots[key].part is not None:
                    self._misuse = RuntimeError(
                        f"thread {threading.current_thread().name} uses {self._lots[key].name}, which is shared out"
                        " between the ranks while configure_model builds the module: use it in the thread that builds,"
                        " or build='whole', with which every rank builds the whole module."
                    )
                    raise self._misuse
                self._keep_open(key, storage)

    def _keep_open(self, key: int, storage: Any) -> None:
        self._escaped.setdefault(key, StorageWeakRef(storage))
        self._open.pop(key, None)
        self._lots.pop(key, None)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        self._busy = True
        try:
            with self._lock, DisableTorchFunction(), torch.no_grad():
                yield
        finally:
            self._busy = False

    # -- lots ----------------------------------------------------------------------------------------------------

    def _follow(self, name: str, tensor: Tensor) -> None:
        storage = _storage_of(tensor)
        if storage is None or storage.nbytes() < LEAST_BYTES:
            return
        key = storage_key(storage)
        if key in self._lots or key in self._escaped:
            return
        self._lots[key] = _Lot(self._num_lots, name, storage.nbytes(), StorageWeakRef(storage))
        self._open[key] = storage
        self._num_lots += 1

    def _close_the_oldest(self, needed: Collection[int] = (), more_bytes: int = 0) -> None:
        """Makes room for ``more_bytes``. The newest lot stays: its constructor is about to fill it."""
        rest = sum(self._lots[key].nbytes for key in self._open) + more_bytes
        if rest <= OPEN_BYTES:
            return
        oldest = []
        for key in list(self._open)[:-1]:
            if rest <= OPEN_BYTES // 2:
                break
            if key not in needed:
                oldest.append(key)
                rest -= self._lots[key].nbytes
        if oldest:
            self._meet("close", oldest)
            for key in oldest:
                self._close(key)
            for key in [key for key, lot in self._lots.items() if lot.memory.expired()]:
                del self._lots[key]

    def _close(self, key: int) -> None:
        lot, storage = self._lots[key], self._open.pop(key)
        whole = _bytes_of(storage)
        dist.broadcast(whole, 0)
        part_bytes = -(-lot.nbytes // dist.get_world_size())
        own = whole[part_bytes * dist.get_rank() :][:part_bytes]
        lot.part = whole.new_zeros(part_bytes)
        lot.part[: own.numel()].copy_(own)
        storage.resize_(0)

    def _used(self, tensors: Iterable[Any]) -> dict[int, Any]:
        """The lots among ``tensors``: key -> storage."""
        used = {}
        for tensor in tensors:
            if isinstance(tensor, Tensor) and (key := _key_of(tensor)) in self._lots:
                used[key] = tensor.untyped_storage()
        return used

    def _make_whole(self, used: Mapping[int, Any]) -> None:
        closed = [key for key in used if self._lots[key].part is not None]
        if not closed:
            return
        self._meet("open", closed)
        for key in closed:
            lot, storage = self._lots[key], used[key]
            assert lot.part is not None
            storage.resize_(lot.part.numel() * dist.get_world_size())
            dist.all_gather_into_tensor(_bytes_of(storage), lot.part)
            lot.part, self._open[key] = None, storage

    def _meet(self, event: str, keys: Collection[int], more: str = "") -> None:
        """Raises ``RuntimeError`` on all ranks unless they are about to do the same."""
        lots = [self._lots[key] for key in keys]
        mine = (event, tuple((lot.serial, lot.name, lot.nbytes) for lot in lots), more)
        self._differs = True  # also where another rank has failed, whose error is raised here
        found = self._agreement.gather(mine, "configure_model at stage 3 with build='auto'")
        self._differs = any(each != mine for each in found)
        if not self._differs:
            return
        raise RuntimeError(
            "ranks build different modules, or some use parameters that others do not: "
            + "; ".join(f"rank {rank}: {_said(each)}" for rank, each in enumerate(found))
            + ". At stage 3 parameters are shared out while configure_model builds them, so all ranks must run the same"
            " code there and up to the start of training; or use build='whole', with which every rank builds the whole"
            " module."
        )


class _Operators(TorchDispatchMode):
    """Sees every operator, also inside composite ones and in autograd's backward."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._build = build

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._build.touched(pytree.tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        if func in _CLONES:
            self._build.copied(args[0], result)
        return result


class _Escapes(TorchFunctionMode):
    """Sees the ways to a tensor's memory that are no operators."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._build = build

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and func.__name__ in _ESCAPES:
            self._build.escapes(args[0])
        elif args and func.__name__ in _READS:
            self._build.touched(args[:1])
        result = func(*args, **(kwargs or {}))
        if func == _SET_DATA and isinstance(args[0], nn.Parameter):  # torch makes a wrapper anew for each call
            self._build.replaced(args[0])
        return result


@contextmanager
def _threads_under(build: Build) -> Iterator[None]:
    """Threads that start inside have the modes, too, which are each thread's own: without them they would read memory
    that is not there, and crash."""
    start = threading.Thread.start

    def start_under_modes(thread: threading.Thread) -> None:
        run = thread.run

        def run_under_modes() -> None:
            with _Escapes(build), _Operators(build):
                run()

        thread.run = run_under_modes  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_under_modes  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def _agreement() -> Agreement:
    return run_agreement() or Agreement(alone=True)


def _storage_of(tensor: Any) -> Any:
    """Storage of ``tensor``; ``None`` for what cannot be closed: no memory of its own, mapped files, subclasses."""
    is_plain = type(tensor) is Tensor or isinstance(tensor, nn.Parameter)
    if not is_plain or is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
        return None
    if type(tensor.data) is not Tensor:
        return None
    storage = tensor.untyped_storage()
    return storage if storage.resizable() else None


def _key_of(tensor: Tensor) -> int:
    """Of its storage; 0 for tensors without."""
    try:
        with DisableTorchFunction():
            return storage_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError, ValueError):  # sparse tensors, wrappers, lazy parameters
        return 0


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _said(event: Any) -> str:
    what, lots, more = event
    names = ", ".join(name for _, name, _ in lots[:3]) + (", ..." if len(lots) > 3 else "")
    return " ".join(filter(None, (what, names, more)))
