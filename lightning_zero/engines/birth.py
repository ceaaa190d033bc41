"""Deferred initialization: materializes modules on the meta device, one shard unit at a time.

``with torch.device("meta")`` creates modules that have shapes and no memory. :class:`Birth` visits them in the order of
their construction (children before their parent, siblings in the order of registration) and calls each one's
initializer. Random numbers are therefore drawn in the same order as in ordinary construction, provided that the
constructor uses the same functions. A unit is sharded as soon as its last module is initialized. Only the root unit's
parameters stay full until the end, as they do in each step.

Values come from the first of these sources that applies:

1. a checkpoint (``ckpt_path``) or ``load_pretrained`` (:mod:`~lightning_zero.checkpoint.later`): rank 0 reads one
   tensor at a time, and no initializer runs;
2. the class's ``reset_parameters`` (named differently in ``nn.MultiheadAttention`` and ``nn.Transformer``), followed,
   in a transformers model, by the model's ``_init_weights``.

A tied parameter keeps the value of the first module that holds it. The initializer of another module writes to scratch
memory, as its constructor did. An initializer may write to its submodules, also to those that are already sharded. An
error names tensors that were materialized here and that no initializer has written to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from lightning_zero.private.torch import INITIALIZERS, TorchDispatchMode, module_tables, pytree, schema_of

OPEN_BYTES = 64 * 2**20
"""Bytes of full parameters that ``configure_model`` may build before the oldest ones are sharded
(:mod:`lightning_zero.engines.fsdp2.build`)."""
_SHOWN = 12


def on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of ``module`` has no memory yet."""
    return any(t.is_meta for m in module.modules() for t in _own_tensors(m).values())


def give_birth(module: nn.Module, home: torch.device) -> None:
    """Materializes all of ``module`` on ``home`` without sharding, for runs that shard nothing (collective).

    Raises:
        ValueError: See :meth:`Birth.require_initializers` and :meth:`Birth.finish`.
    """
    birth = Birth(module, home)
    birth.require_initializers()
    birth.bring_up(module, _each(module))
    birth.finish()


class Birth:
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
        self._rest = deque(_in_order_of_construction(module)) if self._needed else deque[Any]()
        self._done: set[nn.Module] = set()
        self._all_born: set[nn.Module] = set()  # modules whose whole subtree was materialized here
        self._born: set[int] = set()  # ids of tensors materialized here
        self._unwritten: dict[int, tuple[Tensor, str]] = {}  # address -> tensor not written to yet, and its name
        self._never: list[str] = []  # names of tensors that were sharded without being written to
        self._agreement = run_agreement() or Agreement(alone=True)

    def require_initializers(self) -> None:
        """Raises ``ValueError`` for tensors that no source can give values to, before any memory is allocated."""
        able: set[nn.Module] = set()  # modules that have an initializer, or are inside one that has
        for module, owner in self._rest:
            if next(_initializers(module, owner), None) is not None:
                able.update(module.modules())
        lost = [
            self._named(module, name)
            for module, _ in self._rest
            for name, tensor in _own_tensors(module).items()
            if tensor.is_meta and later.left(tensor) is None and module not in able
        ]
        plain = [
            self._named(module, name)
            for module, _ in self._rest
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_meta
        ]
        if lost or plain:
            raise ValueError(_lost([*lost, *plain], "has no initializer"))

    def bring_up(self, upto: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Materializes and initializes all modules up to ``upto``, in the order of construction, and ``tensors``."""
        if self._needed:
            together(self._agreement, lambda: self._bring_up(upto, tensors))

    def _bring_up(self, upto: nn.Module, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            while upto not in self._done:
                module, owner = self._rest.popleft()
                self._initialize(module, owner)
                self._done.add(module)
            reads = not dist.is_initialized() or dist.get_rank() == 0  # other ranks receive rank 0's values
            for tensor in tensors:
                if tensor.is_meta and (value := later.left(tensor)) is not None:
                    memory = torch.empty_like(tensor, device=self._home)
                    later.become(tensor, memory.copy_(value) if reads else memory)
        done = {id(t) for t in tensors}
        for address, (tensor, name) in list(self._unwritten.items()):
            if id(tensor) in done:  # sharded next: its memory is freed and the address may be reused
                self._never.append(name)
                del self._unwritten[address]

    def finish(self) -> None:
        """Raises ``ValueError`` for tensors that no initializer has written to."""
        lost = [*self._never, *(name for _, name in self._unwritten.values())]
        if lost:
            raise ValueError(_lost(lost, "was not written to by any initializer"))

    # -- one module ----------------------------------------------------------------------------------------------

    def _initialize(self, module: nn.Module, owner: Any) -> None:
        born = self._give_memory(module)
        calls = list(_initializers(module, owner))
        if self._born.issuperset(map(id, _own_tensors(module).values())) and self._all_born.issuperset(
            module.children()
        ):
            self._all_born.add(module)
        # else a submodule has values from another source, which this module's initializer would overwrite
        if not calls or not (born or module in self._all_born):
            return
        before = {name: p for name, p in module_tables(module)[0].items() if p is not None}
        with self._scratch_for_others(module, born), _Watch(self._unwritten), self._view():
            for call in calls:
                call()
        for name, p in before.items():
            if module_tables(module)[0].get(name) is not p:
                raise ValueError(
                    f"{self._named(module, name)} was replaced by its module's initializer: write to the parameter"
                    " instead, as torch.nn.init does, or build the module outside of torch.device('meta')."
                )

    def _give_memory(self, module: nn.Module) -> set[int]:
        born = set()
        for name, tensor in _own_tensors(module).items():
            if tensor.is_meta and later.left(tensor) is None:
                later.become(tensor, torch.empty_like(tensor, device=self._home))
                born.add(id(tensor))
                if tensor.numel():
                    self._unwritten[_address(tensor)] = tensor, self._named(module, name)
        self._born |= born
        return born

    @contextmanager
    def _scratch_for_others(self, module: nn.Module, born: set[int]) -> Iterator[None]:
        """Protects tensors of ``module`` itself that have values already (tied, or built outside of meta): scratch
        tensors replace them inside the context."""
        with ExitStack() as stack:
            for table in module_tables(module)[:2]:
                for name, tensor in list(table.items()):
                    if tensor is None or tensor.is_meta or id(tensor) in born or isinstance(tensor, DTensor):
                        continue
                    scratch = torch.empty_like(tensor)
                    table[name] = nn.Parameter(scratch, tensor.requires_grad) if _is_parameter(tensor) else scratch
                    stack.callback(table.__setitem__, name, tensor)
            yield

    def _named(self, module: nn.Module, name: str) -> str:
        prefix = self._names[module]
        return f"{prefix}.{name}" if prefix else name


class _Watch(TorchDispatchMode):
    """Removes each address that an operator writes to from ``unwritten``, also through ``.data``, views or ``out=``."""

    def __init__(self, unwritten: dict[int, tuple[Tensor, str]]) -> None:
        super().__init__()
        self._unwritten = unwritten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if schema.is_mutable:
            for i, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[i] if i < len(args) else kwargs.get(argument.name)
                    for tensor in pytree.tree_leaves(value):
                        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                            self._unwritten.pop(_address(tensor), None)
        return func(*args, **kwargs)


def _initializers(module: nn.Module, owner: Any) -> Iterator[Callable[[], Any]]:
    found = (getattr(module, name, None) for name in INITIALIZERS)
    own = next((f for f in found if callable(f)), None)
    if own is not None:
        yield own
    if owner is not None:
        yield partial(transformers.initialize, owner, module)


def _in_order_of_construction(module: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
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


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _lost(names: Iterable[str], why: str) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(map(repr, names[:_SHOWN]))}{more} on the meta device {why}, so its value is unknown: give the"
        " class a reset_parameters() that fills it, read it from a file (ckpt_path, lightning_zero.load_pretrained),"
        " or build that part outside of torch.device('meta')."
    )
