"""One micro-batch of a module under fake tensors: the order in which units run, and the bytes alive meanwhile.

Nothing is computed and nothing is stored: a :func:`shadow` of the module has the structure, the code and the ties of
the original and fake parameters; the user's module is never touched. A :class:`LiveBytes` sees every operator, so every
storage that autograd keeps is counted, with the memory of the kernels that the traced device would run.

A stack of equal blocks is traced by its first and its last block. Those between are *replayed*: they are not run, the
account gets the bytes that the first kept after its forward and the moments of the last one's backward. Blocks are
equal when class, shapes, dtypes, plain attributes and inputs are; an index (``layer_idx``) may differ.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from lightning_zero.config import ActivationCheckpointingConfig
from lightning_zero.engines.recompute import costly_is_kept, recomputed_modules
from lightning_zero.engines.units import UnitPlan
from lightning_zero.planner.closures import Closures
from lightning_zero.planner.memory import Moment
from lightning_zero.private.lightning import pretend_device, trainer_of
from lightning_zero.private.torch import (
    ITEM,
    FakeTensorMode,
    TorchDispatchMode,
    module_tables,
    overload_packet,
    pytree,
    saves_elsewhere,
)

NO_RECOMPUTATION = ActivationCheckpointingConfig()
_POSITION = re.compile(r"(^|_)(idx|index|id|number|num|i)$")
"""Attributes that tell equal blocks apart without changing what they do."""
_EQUAL = torch.ops.aten.equal.default
_NONZERO = torch.ops.aten.nonzero.default
_MASKED_SELECT = torch.ops.aten.masked_select.default
_INDEX = torch.ops.aten.index.Tensor


@dataclass
class Trace:
    """The record of one micro-batch."""

    moments: list[Moment] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Names of the parameters that received a gradient."""
    flops: float = 0.0
    """Multiply-adds count two, forward and backward, as ``torch.utils.flop_counter`` counts them."""
    num_replayed: int = 0
    waiting_bytes: float = 0.0
    """Most that saved inputs take in host memory (``activation_checkpointing.offload``)."""


class NotTraceable(Exception):
    """The micro-batch needs values, which fake tensors do not have."""


# -- a module of fake tensors ----------------------------------------------------------------------------------------


def shadow(
    module: nn.Module, mode: Any, device: torch.device, dtype_of: Callable[[str, Tensor], torch.dtype]
) -> nn.Module:
    """A copy of ``module`` whose tensors are fake: same classes, attributes and ties, no memory.

    Args:
        module: On any device, also meta.
        mode: The ``FakeTensorMode`` that owns the fake tensors; with a ``nullcontext`` and the meta device they are
            meta tensors.
        device: Where they pretend to be.
        dtype_of: The dtype that a parameter or buffer of that name shall have.

    Raises:
        NotTraceable: When the module cannot be copied.
    """
    # deepcopy takes an object that it finds in memo from there, instead of copying it
    memo: dict[int, Any] = {}

    def fake(name: str, tensor: Tensor) -> Tensor:
        dtype = dtype_of(name, tensor)
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device)

    with mode:
        for name, p in module.named_parameters():
            memo[id(p)] = shadowed = nn.Parameter(fake(name, p), requires_grad=p.requires_grad)
            its = vars(shadowed)  # fake tensors have attributes of their own
            its.update({key: _faked(value, device) for key, value in vars(p).items() if key not in its})
        for name, b in module.named_buffers():
            memo[id(b)] = fake(name, b)
    for m in module.modules():
        trainer = trainer_of(m)
        if trainer is not None:
            memo[id(trainer)] = None
    try:
        closures = Closures(module, memo)
        copied = copy.deepcopy(module, memo)
        closures.finish()
    except Exception as error:  # whatever a user's attribute raises
        raise NotTraceable(f"{type(module).__name__} cannot be copied: {_first_line(error)}") from error
    with mode:
        for m in copied.modules():
            tables = module_tables(m)
            for key, value in list(vars(m).items()):
                if not any(value is table for table in tables):
                    m.__dict__[key] = _faked(value, device)
            pretend_device(m, device)
    return copied


def fake_batch(batch: Any, mode: FakeTensorMode, device: torch.device, times: int = 1, dtype: Any = None) -> Any:
    """``batch`` with fake tensors, ``times`` as long in dim 0; floating ones in ``dtype`` if given."""

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = (value.shape[0] * times, *value.shape[1:]) if value.dim() else value.shape
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return torch.empty(shape, dtype=wanted, device=device)

    with mode:
        return pytree.tree_map(fake, batch)


def _faked(value: Any, device: torch.device) -> Any:
    """Tensors that are neither parameters nor buffers: the states of metrics, caches."""
    if isinstance(value, Tensor) and type(value) is Tensor:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    if type(value) is dict and any(isinstance(v, Tensor) for v in value.values()):
        return {k: _faked(v, device) for k, v in value.items()}
    if type(value) is list and any(isinstance(v, Tensor) for v in value):
        return [_faked(v, device) for v in value]
    return value


# -- what is alive ---------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage made under it while it lives."""

    def __init__(self, known: Iterable[Tensor], truth: bool = False) -> None:
        super().__init__()
        self.live = 0.0
        self.peak = 0.0
        self.flops = 0.0
        self.truth = truth
        """The value of every comparison whose value the code asks for."""
        self._weights: dict[int, tuple[weakref.ref[Any], float]] = {}
        for tensor in known:
            self._watch(tensor.untyped_storage(), 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM:
            dtype = args[0].dtype
            return self.truth if dtype == torch.bool else (1.0 if dtype.is_floating_point else 1)
        if func is _EQUAL:
            return self.truth
        # How many elements a mask selects is a value; all of them is the most it can be.
        if func is _INDEX and any(i is not None and i.dtype == torch.bool for i in args[1]):
            args = (args[0], [each for i in args[1] for each in _unmasked(i)])
        elif func is _MASKED_SELECT:
            return self.__torch_dispatch__(_INDEX, types, (args[0].expand(args[1].shape), [args[1]]))
        elif func is _NONZERO:
            out = torch.empty((args[0].numel(), args[0].dim()), dtype=torch.int64, device=args[0].device)
            self._see(out)
            return out
        out = func(*args, **(kwargs or {}))
        if (packet := overload_packet(func)) in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        self._see(out)
        return out

    def _see(self, out: Any) -> None:
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            key = id(storage)
            if key not in self._weights or self._weights[key][0]() is not storage:
                self._watch(storage, float(storage.nbytes()))
        elif isinstance(out, (tuple, list)):
            for each in out:
                self._see(each)

    def _watch(self, storage: Any, nbytes: float) -> None:
        key = id(storage)
        self._weights[key] = (weakref.ref(storage, partial(self._gone, key)), nbytes)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, ref: Any) -> None:
        entry = self._weights.get(key)
        if entry is not None and entry[0] is ref:
            self.live -= self._weights.pop(key)[1]

    def exclude(self, tensor: Tensor) -> float:
        """Takes a tensor out of the account; returns its bytes."""
        storage = tensor.untyped_storage()
        ref, nbytes = self._weights.get(id(storage), (None, 0.0))
        if ref is not None and ref() is storage:
            self._weights[id(storage)] = (ref, 0.0)
            self.live -= nbytes
        return float(tensor.numel() * tensor.element_size())

    def mark(self) -> tuple[float, float]:
        """``(peak since the last mark, alive now)``."""
        peak, self.peak = self.peak, self.live
        return peak, self.live


class _OnHost:
    """Saved inputs that wait in host memory (``save_on_cpu``): no bytes of the device until they come back."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self.peak = 0.0

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: (self.wait(t.nbytes), t.shape, t.dtype, t.device),
            lambda packed: torch.empty(packed[1], dtype=packed[2], device=packed[3]),
        )

    def wait(self, nbytes: float) -> object:
        """``nbytes`` wait as long as what is returned lives."""
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)
        waiting = _Waiting()
        weakref.finalize(waiting, self._back, nbytes)
        return waiting

    def _back(self, nbytes: float) -> None:
        self.bytes -= nbytes


class _Waiting:
    pass


def _unmasked(index: Tensor | None) -> list[Tensor | None]:
    """A boolean index as the integer ones it stands for when it is true everywhere."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64, device=index.device) for _ in range(index.dim())]


@dataclass
class _Record:
    """One block, to be replayed; all bytes relative to those at its beginning."""

    signature: Any = None
    spec: Any = None
    """Structure of the output; its tensors as ``(shape, dtype, requires_grad)`` or the position of an input."""
    outputs: list[Any] = field(default_factory=list)
    saved_inputs: tuple[bool, ...] = ()
    """For each tensor of the input, whether the block keeps it for its backward."""
    peak: float = 0.0
    retained: float = 0.0
    waiting: float = 0.0
    """Bytes of its inputs that wait in host memory."""
    flops: float = 0.0
    backward: list[Moment] = field(default_factory=list)
    backward_flops: float = 0.0
    used: list[int] = field(default_factory=list)
    """Positions of the parameters that received a gradient."""
    complete: bool = False


class _Boundary(torch.autograd.Function):
    """Passes tensors through; says when the gradients of all of them have come back."""

    @staticmethod
    def forward(ctx: Any, say: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.say = say
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.say()
        return None, *grads


class _Replay(torch.autograd.Function):
    """Stands in for a block: its outputs, what it keeps for the backward, its backward's moments."""

    @staticmethod
    def forward(ctx: Any, tracer: Any, unit: int, record: _Record, *tensors: Tensor) -> Any:
        ctx.tracer, ctx.unit, ctx.record = tracer, unit, record
        ctx.inputs = [(t.shape, t.dtype, t.device) if t.requires_grad else None for t in tensors]
        tracker, device = tracer.tracker, tensors[0].device
        before = tracker.live
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in record.outputs]
        rest = max(record.retained - (tracker.live - before), 0.0)
        ctx.kept = [torch.empty(int(rest), dtype=torch.uint8, device=device)]
        ctx.kept += [t.detach() for t, saved in zip(tensors, record.saved_inputs, strict=True) if saved]
        ctx.kept.append(tracer.on_host.wait(record.waiting))
        tracker.peak = max(tracker.peak, before + record.peak)
        tracker.flops += record.flops
        ctx.mark_non_differentiable(*(t for t, (_, _, grad) in zip(made, record.outputs, strict=True) if not grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        record: _Record = ctx.record
        if not record.complete:
            raise _Unequal
        ctx.tracer.replay_backward(ctx.unit, record)
        ctx.kept = None
        with torch.no_grad():
            grads = [None if i is None else torch.empty(i[0], dtype=i[1], device=i[2]) for i in ctx.inputs]
        return None, None, None, *grads


class _Unequal(Exception):
    """Blocks that looked equal were not; trace all of them."""


# -- the trace -------------------------------------------------------------------------------------------------------


def trace(
    module: nn.Module,
    plan: UnitPlan,
    step: Callable[[], Tensor | None],
    mode: FakeTensorMode,
    *,
    recompute: ActivationCheckpointingConfig = NO_RECOMPUTATION,
    autocast: Any = None,
    known: Sequence[Tensor] = (),
) -> Trace:
    """Runs ``step`` (a forward that returns the loss, or ``None`` if it ran its own backward) and its backward.

    Args:
        module: A :func:`shadow`; its units' ``forward`` are wrapped for good.
        plan: The units of this very module.
        step: What to run.
        mode: The fake tensors' owner.
        recompute: Which modules compute their forward again in the backward, and what they keep and where.
        autocast: A context manager to run the forward in.
        known: Further tensors that exist already (the batch).

    Raises:
        NotTraceable: With the reason.
    """
    error: Exception | None = None
    for replay, truth in ((True, False), (True, True), (False, False), (False, True)):
        tracer = _Tracer(module, plan, recompute, replay, truth, known)
        try:
            with tracer.watching():
                return tracer.run(step, mode, autocast or nullcontext())
        except Exception as found:  # user code under fake tensors can raise anything
            error = error if error is not None and not isinstance(error, _Unequal) else found
            if replay and truth and not isinstance(found, _Unequal) and not tracer.trace.num_replayed:
                break  # without replay it would end the same
    raise NotTraceable(_first_line(error)) from error


class _Tracer:
    def __init__(
        self,
        module: nn.Module,
        plan: UnitPlan,
        recompute: ActivationCheckpointingConfig,
        replay: bool,
        truth: bool,
        known: Sequence[Tensor],
    ) -> None:
        self.module, self.plan = module, plan
        self.recomputed = _recomputed(recompute, module, plan)
        kept: dict[str, Any] = {"context_fn": costly_is_kept} if recompute.target == "selective" else {}
        self.checkpoint: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **kept)
        self.on_host, self.offloads = _OnHost(), recompute.offload
        self.trace = Trace()
        self.tracker = LiveBytes([*module.parameters(), *module.buffers(), *known], truth)
        self.root = len(plan.units) - 1
        self.records: dict[int, _Record] = {}  # unit -> its own
        self.leaders: dict[int, tuple[int, int]] = {}  # unit -> first and last of its group
        self.in_backward: dict[int, tuple[int, float, float]] = {}  # unit -> moments, live, flops at its begin
        if replay:
            for group in _equal_units(plan, self.recomputed):
                for unit in group:
                    self.leaders[unit] = (group[0], group[-1])
        names = {p: name for name, p in module.named_parameters()}
        self.names = names
        self.owner = {p: i for i, u in enumerate(plan.units) for p in u.parameters.values()}
        self.owner |= dict.fromkeys(plan.replicated.values(), -1)

    # -- hooks

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles: list[Any] = []
        wrapped: list[nn.Module] = []
        trainable = {p: p.requires_grad for p in self.names}
        for p in self.names:
            p.grad = None
            if p.requires_grad:
                handles.append(p.register_post_accumulate_grad_hook(self.on_gradient))  # type: ignore[arg-type]
        for index, unit in enumerate(self.plan.units[:-1]):
            unit.module.forward = partial(self.forward, index, unit.module.forward)  # type: ignore[method-assign]
            wrapped.append(unit.module)
            handles.append(unit.module.register_forward_pre_hook(partial(self.enter, index), with_kwargs=True))
            handles.append(unit.module.register_forward_hook(partial(self.leave, index)))
        for m in self.recomputed - set(wrapped):
            m.forward = partial(self.part, m.forward)  # type: ignore[method-assign]
            wrapped.append(m)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for m in wrapped:
                del m.__dict__["forward"]
            for p, requires_grad in trainable.items():
                p.grad = None
                p.requires_grad_(requires_grad)  # a step that failed may have left an optimizer toggled

    def run(self, step: Callable[[], Tensor | None], mode: Any, autocast: Any) -> Trace:
        with ExitStack() as stack:
            stack.enter_context(mode)
            stack.enter_context(self.tracker)
            self.moment("forward", self.root)
            with autocast:
                loss = step()
            self.moment("forward_end", self.root)
            if isinstance(loss, Tensor) and loss.requires_grad:
                self.moment("backward", self.root)
                loss.backward()
                del loss
            self.moment("backward_end", self.root)
            self.moment("end", self.root)
        self.trace.flops = self.tracker.flops
        self.trace.waiting_bytes = self.on_host.peak
        return self.trace

    def moment(self, event: str, unit: int, gradient_bytes: float = 0.0) -> None:
        peak, live = self.tracker.mark()
        self.trace.moments.append(
            Moment(event=event, unit=unit, peak_bytes=peak, live_bytes=live, gradient_bytes=gradient_bytes)
        )

    def on_gradient(self, p: Tensor) -> None:
        assert p.grad is not None
        self.trace.used.add(self.names[p])  # type: ignore[index]
        self.moment("gradient", self.owner[p], self.tracker.exclude(p.grad))  # type: ignore[index]

    def enter(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit in self.in_backward:
            return None  # recomputed, gathered already
        self.moment("forward", unit)
        flat, spec = pytree.tree_flatten((args, kwargs))
        where = [i for i, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad]
        if torch.is_grad_enabled() and where:
            passed = _Boundary.apply(partial(self.backward_end, unit), *(flat[i] for i in where))
            for i, t in zip(where, passed, strict=True):
                flat[i] = t
        return pytree.tree_unflatten(flat, spec)

    def leave(self, unit: int, module: nn.Module, args: Any, output: Any) -> None:
        if unit in self.in_backward:
            return
        self.moment("forward_end", unit)
        if torch.is_grad_enabled():
            for t in pytree.tree_leaves(output):
                if isinstance(t, Tensor) and t.requires_grad:
                    t.register_hook(partial(self.backward, unit))

    def backward(self, unit: int, grad: Tensor) -> None:
        if unit not in self.in_backward:
            self.moment("backward", unit)
            self.in_backward[unit] = (len(self.trace.moments), self.tracker.live, self.tracker.flops)

    def backward_end(self, unit: int) -> None:
        self.moment("backward_end", unit)
        begin = self.in_backward.pop(unit, None)
        record = self.records.get(unit)
        if begin is None or record is None:
            return
        first, last = self.leaders.get(unit, (unit, unit))
        if unit == last and first != last and self.records[first].spec is not None:
            self._complete(self.records[first], record, unit, *begin)

    def _complete(self, first: _Record, last: _Record, unit: int, start: int, live: float, flops: float) -> None:
        if (first.signature, first.retained, first.outputs) != (last.signature, last.retained, last.outputs):
            raise _Unequal
        for m in self.trace.moments[start:-1]:
            if m.unit != unit:
                raise _Unequal  # something else ran in between
        first.backward = [
            Moment(
                event=m.event,
                peak_bytes=m.peak_bytes - live,
                live_bytes=m.live_bytes - live,
                gradient_bytes=m.gradient_bytes,
            )
            for m in self.trace.moments[start:-1]
        ]
        tail = self.trace.moments[-1]
        first.backward.append(Moment(event="", peak_bytes=tail.peak_bytes - live, live_bytes=tail.live_bytes - live))
        parameters = list(self.plan.units[unit].parameters)
        first.used = [i for i, name in enumerate(parameters) if name in self.trace.used]
        first.backward_flops = self.tracker.flops - flops
        first.complete = True

    # -- blocks

    def forward(self, unit: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first, last = self.leaders.get(unit, (-1, -1))
        flat, _ = pytree.tree_flatten((args, kwargs))
        equal = unit not in (first, last) and first in self.records
        if equal and torch.is_grad_enabled() and not saves_elsewhere():
            record = self.records[first]
            if record.spec is not None and record.signature == _signature(flat):
                self.trace.num_replayed += 1
                return self._replayed(unit, record, flat)
        run = original
        if saves_elsewhere():  # the user's own checkpointing around the block: nothing is kept as it would be
            return run(*args, **kwargs)
        module = self.plan.units[unit].module
        if module in self.recomputed and torch.is_grad_enabled():
            run = partial(self.recompute, original)
        if unit not in (first, last) or unit in self.records:
            return run(*args, **kwargs)
        live, flops, waiting = self.tracker.live, self.tracker.flops, self.on_host.bytes
        saved: set[int] = set()
        with nullcontext() if module in self.recomputed else _saved_storages(saved):
            output = run(*args, **kwargs)
        record = self.records[unit] = self._recorded(flat, output, live, flops)
        record.waiting = self.on_host.bytes - waiting
        # a unit that recomputes keeps its inputs; those of a part that does are among what autograd saves
        keeps_all = module in self.recomputed and not self.offloads
        record.saved_inputs = tuple(
            keeps_all or id(t.untyped_storage()) in saved for t in flat if isinstance(t, Tensor)
        )
        return output

    def part(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a recomputed module that is no unit."""
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return self.recompute(original, *args, **kwargs)

    def recompute(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As :class:`~lightning_zero.engines.recompute.Recomputed` has it."""
        with self.on_host.hooks() if self.offloads else nullcontext():
            return self.checkpoint(original, *args, **kwargs)

    def _recorded(self, inputs: list[Any], output: Any, live: float, flops: float) -> _Record:
        record = _Record(signature=_signature(inputs))
        flat, spec = pytree.tree_flatten(output)
        tensors = [t for t in flat if isinstance(t, Tensor)]
        own = {id(t.untyped_storage()) for t in inputs if isinstance(t, Tensor)}
        grad_inputs = any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        if len(tensors) == len(flat) and grad_inputs and not any(id(t.untyped_storage()) in own for t in tensors):
            record.spec = spec
            record.outputs = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        record.retained = self.tracker.live - live
        record.peak = self.tracker.peak - live
        record.flops = self.tracker.flops - flops
        return record

    def _replayed(self, unit: int, record: _Record, inputs: list[Any]) -> Any:
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        return pytree.tree_unflatten(list(_Replay.apply(self, unit, record, *tensors)), record.spec)

    def replay_backward(self, unit: int, record: _Record) -> None:
        live = self.tracker.live
        peak, _ = self.tracker.mark()
        names = list(self.plan.units[unit].parameters)
        self.trace.used.update(names[i] for i in record.used)
        for m in record.backward[:-1]:
            self.trace.moments.append(
                Moment(
                    event=m.event,
                    unit=unit,
                    peak_bytes=max(peak, live + m.peak_bytes),
                    live_bytes=live + m.live_bytes,
                    gradient_bytes=m.gradient_bytes,
                )
            )
            peak = 0.0
        self.tracker.peak = live + record.backward[-1].peak_bytes
        self.tracker.flops += record.backward_flops


def _saved_storages(found: set[int]) -> Any:
    """While active, the storages of the tensors that autograd saves are noted."""

    def pack(t: Tensor) -> Tensor:
        found.add(id(t.untyped_storage()))
        return t.detach()  # an output kept with its history would never be freed

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)


def _signature(flat: list[Any]) -> Any:
    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype, value.requires_grad
        return value if isinstance(value, (int, float, bool, str, type(None))) else type(value)

    return tuple(map(one, flat))


def _recomputed(config: ActivationCheckpointingConfig, module: nn.Module, plan: UnitPlan) -> set[nn.Module]:
    units = [unit.module for unit in plan.units[:-1]]
    if not config.is_on or (config.units is None and not units):
        return set()
    return {m for m in recomputed_modules(config, module, units) if m is not module}


def _equal_units(plan: UnitPlan, recomputed: Collection[nn.Module]) -> list[list[int]]:
    """Groups of four or more units that do the same."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for index, unit in enumerate(plan.units[:-1]):
        again = tuple(m in recomputed for m in unit.module.modules())
        groups[_structure(unit.module), again].append(index)
    return [group for group in groups.values() if len(group) > 3]


def _structure(module: nn.Module) -> Any:
    found: list[Any] = []
    for name, m in module.named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(m).items())
            if isinstance(value, (int, float, bool, str, type(None))) and not _POSITION.search(key)
        )
        tensors = [*m.named_parameters(recurse=False), *m.named_buffers(recurse=False)]
        shapes = tuple((n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in tensors)
        found.append((name, type(m), plain, shapes))
    return tuple(found)


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
