"""Deferred initialization: materializes modules on the meta device, one shard unit at a time.

``with torch.device("meta")`` creates modules that have shapes and no memory. :class:`Materializer` visits them in the
order of their construction (children before their parent, siblings in the order of registration) and calls each one's
initializer. Random numbers are therefore drawn in the same order as in ordinary construction, provided that the
constructor uses the same functions. A unit is sharded as soon as its last module is initialized. Only the root unit's
parameters stay full until the end, as they do in each step.

Values come from the first of these sources that applies:

1. a checkpoint (``ckpt_path``) or ``load_pretrained`` (:mod:`~lightning_zero.checkpoint.later`): rank 0 reads one
   tensor at a time, and no initializer runs; or the shards of the module's previous run;
2. the class's ``reset_parameters`` (named differently in ``nn.MultiheadAttention`` and ``nn.Transformer``), followed,
   in a transformers model, by the model's ``_init_weights``.

A tied parameter keeps the value of the first module that holds it. The initializer of another module writes to scratch
memory, as its constructor did. An initializer may write to its submodules, also to those that are already sharded. New
memory is filled with one byte value, so that an error can name the tensors to which no initializer has written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zero.checkpoint import later
from lightning_zero.checkpoint.store import together
from lightning_zero.comm.agree import Agreement, run_agreement
from lightning_zero.private import transformers
from lightning_zero.private.torch import INITIALIZERS, module_tables

_SHOWN = 12
_BLANK = 0xA5
"""Value of each byte of a tensor that has not been initialized: no useful value in any dtype."""
_LOOKED_AT_BYTES = 1024


def on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of ``module`` has no memory yet."""
    return any(later.has_no_memory(t) for m in module.modules() for t in _own_tensors(m).values())


def materialize_all(module: nn.Module, home: torch.device) -> None:
    """Materializes all of ``module`` on ``home`` without sharding, for runs that shard nothing (collective).

    Raises:
        ValueError: See :meth:`Materializer.finish`.
    """
    materializer = Materializer(module, home)
    materializer.materialize(module, _each(module))
    materializer.finish()


class Materializer:
    """Materializes one module; see the file's docstring. Every method is collective; all ranks raise the same error.

    Args:
        module: Partly or completely on the meta device.
        home: Device on which its tensors are materialized.
        view: Entered while initializers run, so that they can write to sharded parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        home: torch.device,
        view: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._module, self._home, self._view = module, home, view
        self._names = {m: name for name, m in module.named_modules()}
        self._needed = on_meta(module)
        self._rest = deque(in_order_of_construction(module)) if self._needed else deque[Any]()
        self._done: set[nn.Module] = set()
        self._all_materialized: set[nn.Module] = set()  # modules whose whole subtree was materialized here
        self._materialized: dict[int, str] = {}  # ids of tensors materialized here -> their names
        self._blank = [  # names of tensors without a value
            self._named(m, name)
            for m, _ in self._rest
            for name, value in vars(m).items()
            if isinstance(value, Tensor) and value.is_meta
        ]
        self._agreement = run_agreement() or Agreement(alone=True)

    def materialize(self, upto: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Materializes and initializes all modules up to ``upto``, in the order of construction, and ``tensors``."""
        if self._needed:
            together(self._agreement, lambda: self._materialize(upto, tensors))

    def _materialize(self, upto: nn.Module, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            while upto not in self._done:
                module, owner = self._rest.popleft()
                self._initialize(module, owner)
                self._done.add(module)
            reads = not dist.is_initialized() or dist.get_rank() == 0  # other ranks receive rank 0's values
            for tensor in tensors:
                if (value := later.left(tensor)) is not None:
                    full, memory = later.full_value(value), later.memory_for(tensor, self._home)
                    later.become(tensor, memory.copy_(full) if reads else memory)
        self._blank += [self._materialized[id(t)] for t in tensors if id(t) in self._materialized and _is_blank(t)]

    def finish(self) -> None:
        """Raises ``ValueError`` for tensors that no initializer has written to."""
        if not self._blank:
            return
        shown = ", ".join(map(repr, self._blank[:_SHOWN]))
        more = f" and {len(self._blank) - _SHOWN} more" if len(self._blank) > _SHOWN else ""
        raise ValueError(
            f"{shown}{more} on the meta device was not written to by any initializer, so its value is unknown: give"
            " the class a reset_parameters() that fills it, read it from a file (ckpt_path,"
            " lightning_zero.load_pretrained), or build that part outside of torch.device('meta')."
        )

    # -- one module ----------------------------------------------------------------------------------------------

    def _initialize(self, module: nn.Module, owner: Any) -> None:
        materialized = self._give_memory(module)
        calls = list(_initializers(module, owner))
        are_materialized = all(id(tensor) in self._materialized for tensor in _own_tensors(module).values())
        if are_materialized and self._all_materialized.issuperset(module.children()):
            self._all_materialized.add(module)
        # else a submodule has values from another source, which this module's initializer would overwrite
        if not calls or not (materialized or module in self._all_materialized):
            return
        before = {name: p for name, p in module_tables(module)[0].items() if p is not None}
        with self._scratch_for_others(module, materialized), self._view():
            for call in calls:
                call()
        for name, p in before.items():
            if module_tables(module)[0].get(name) is not p:
                raise ValueError(
                    f"{self._named(module, name)} was replaced by its module's initializer: write to the parameter"
                    " instead, as torch.nn.init does, or build the module outside of torch.device('meta')."
                )

    def _give_memory(self, module: nn.Module) -> set[int]:
        materialized = set()
        for name, tensor in _own_tensors(module).items():
            if tensor.is_meta and later.left(tensor) is None:
                memory = later.memory_for(tensor, self._home)
                _bytes_of(memory).fill_(_BLANK)
                later.become(tensor, memory)
                materialized.add(id(tensor))
                self._materialized[id(tensor)] = self._named(module, name)
        return materialized

    @contextmanager
    def _scratch_for_others(self, module: nn.Module, materialized: set[int]) -> Iterator[None]:
        """Protects tensors of ``module`` itself that have values already (tied, or built outside of meta): scratch
        tensors replace them inside the context."""
        with ExitStack() as stack:
            for table in module_tables(module)[:2]:
                for name, tensor in list(table.items()):
                    if tensor is None or tensor.is_meta or id(tensor) in materialized or isinstance(tensor, DTensor):
                        continue
                    scratch = torch.empty_like(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    table[name] = nn.Parameter(scratch, tensor.requires_grad) if is_parameter else scratch
                    stack.callback(table.__setitem__, name, tensor)
            yield

    def _named(self, module: nn.Module, name: str) -> str:
        prefix = self._names[module]
        return f"{prefix}.{name}" if prefix else name


def _initializers(module: nn.Module, owner: Any) -> Iterator[Callable[[], Any]]:
    found = (getattr(module, name, None) for name in INITIALIZERS)
    own = next((f for f in found if callable(f)), None)
    if own is not None:
        yield own
    if owner is not None:
        yield partial(transformers.initialize, owner, module)


def in_order_of_construction(module: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yields each module once, submodules first, with the transformers model that it belongs to, or ``None``."""
    seen: set[nn.Module] = set()

    def visit(each: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
        if each in seen:
            return
        seen.add(each)
        owner = each if transformers.is_model(each) else owner
        for child in each.children():
            yield from visit(child, owner)
        yield each, owner

    yield from visit(module, None)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    parameters, buffers, _ = module_tables(module)
    return {name: t for name, t in (*parameters.items(), *buffers.items()) if t is not None}


def _each(module: nn.Module) -> list[Tensor]:
    return list({id(t): t for m in module.modules() for t in _own_tensors(m).values()}.values())


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _is_blank(tensor: Tensor) -> bool:
    """Whether nothing was written to ``tensor`` since it was materialized, which its first bytes show."""
    first = _bytes_of(tensor)[:_LOOKED_AT_BYTES]
    return first.numel() > 0 and bool((first == _BLANK).all())
