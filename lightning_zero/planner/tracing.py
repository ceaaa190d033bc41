"""Traces one micro-batch under fake tensors: the order in which units run, and the bytes alive at each moment.

Nothing is computed or stored: a :func:`shadow` of the module has its structure, code and ties, but fake parameters.
:class:`LiveBytes` sees every operator, so it counts every storage that autograd keeps.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_zero.config import ActivationCheckpointingConfig, CompileConfig
from lightning_zero.engines.forwards import Forwards
from lightning_zero.engines.units import UnitPlan
from lightning_zero.planner.memory import Moment
from lightning_zero.private.lightning import set_device, trainer_of
from lightning_zero.private.torch import ITEM, TorchDispatchMode, in_backward, pytree

_Module = TypeVar("_Module", bound=nn.Module)
_INDEX = torch.ops.aten.index.Tensor


class NotTraceable(Exception):
    """The micro-batch needs values, which fake tensors lack, or code that cannot be copied."""


# -- a module of fake tensors ----------------------------------------------------------------------------------------


def shadow(
    module: nn.Module, mode: Any, device: torch.device, dtype_of: Callable[[str, Tensor], torch.dtype]
) -> nn.Module:
    """Copies ``module`` with its classes, attributes and ties, but with tensors that take no memory.

    They are fake tensors of ``mode`` that pretend to be on ``device``, or meta tensors if ``mode`` is a
    ``nullcontext``.

    Raises:
        NotTraceable: If the module cannot be copied.
    """
    memo: dict[int, Any] = {}  # deepcopy takes what it finds here in place of a copy
    try:
        with mode, _FakeCopies(device):
            for name, p in module.named_parameters():
                memo[id(p)] = nn.Parameter(fake(p, device, dtype_of(name, p)), requires_grad=p.requires_grad)
            for name, b in module.named_buffers():
                memo[id(b)] = fake(b, device, dtype_of(name, b))
            for m in module.modules():
                if (trainer := trainer_of(m)) is not None:
                    memo[id(trainer)] = None
            copied = copy.deepcopy(module, memo)
            for p in module.parameters():
                attributes = vars(memo[id(p)])  # fake tensors have attributes of their own, which must stay
                new = {key: value for key, value in vars(p).items() if key not in attributes}
                attributes.update({key: copy.deepcopy(value, memo) for key, value in new.items()})
    except Exception as error:  # a user's attribute can raise anything
        raise NotTraceable(f"{type(module).__name__} cannot be copied: {_first_line(error)}") from error
    for m in copied.modules():
        set_device(m, device)
    return copied


def structure_of(module: _Module) -> _Module:
    """A copy of ``module`` on the meta device, for a plan after ``module`` has been sharded. Raises as :func:`shadow`
    does."""
    return cast(_Module, shadow(module, nullcontext(), torch.device("meta"), lambda name, t: t.dtype))


class _FakeCopies(TorchFunctionMode):
    """Makes fake copies also of tensors that are neither parameters nor buffers, such as the states of metrics."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), fake(tensor, self.device, tensor.dtype))


def fake(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """An empty tensor with the shape and strides of ``tensor``; call it under the ``FakeTensorMode`` that shall own
    it."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device)


# -- what is alive ---------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages that were allocated under it, without those of ``known``."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0.0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A fake tensor has no value. Answer checks and logs so that the step goes on: "all" is true, "any" is false.
        if func is ITEM:
            dtype = args[0].dtype
            return hasattr(args[0], "of_all") if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if any(map(_is_real_parameter, pytree.tree_leaves(args))):
            raise NotTraceable("the step of the copy uses a parameter of the module itself")
        if func is _INDEX:
            args = args[0], [each for index in args[1] for each in _all_selected(index)], *args[2:]
        out = func(*args, **(kwargs or {}))
        if "all" in str(func.overloadpacket):  # all, _is_all_true
            out.of_all = True
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.untyped_storage() not in self._seen:
                self._seen.add(tensor.untyped_storage())
                self._count(tensor.untyped_storage(), float(tensor.untyped_storage().nbytes()))
        return out

    def _count(self, storage: Any, nbytes: float) -> None:
        self._change(nbytes)
        weakref.finalize(storage, self._change, -nbytes)

    def _change(self, nbytes: float) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def exclude(self, tensor: Tensor) -> None:
        """Removes a tensor from the count, from the peak as well."""
        self._count(tensor.untyped_storage(), -float(tensor.nbytes))
        self.peak -= tensor.nbytes


def _all_selected(index: Tensor | None) -> list[Tensor | None]:
    """Replaces a boolean mask by the integer indices of a mask that selects everything: the number of selected elements
    is a value, which fake tensors lack, so the largest is assumed."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64, device=index.device) for _ in range(index.dim())]


# -- the trace -------------------------------------------------------------------------------------------------------


def trace(
    module: nn.Module,
    units: UnitPlan,
    step: Callable[[], Tensor | None],
    batch: Sequence[Tensor],
    recompute: ActivationCheckpointingConfig | None = None,
) -> list[Moment]:
    """Runs ``step`` and its backward on a :func:`shadow` under its ``FakeTensorMode``; the shadow cannot be used again.

    ``step`` is a forward that returns the loss, or ``None`` if it ran the backward itself.

    Raises:
        NotTraceable: If the step cannot run under fake tensors; has the reason.
    """
    _refuse_functions(module)
    live = LiveBytes([*module.parameters(), *module.buffers(), *batch])
    watch = _Watch(module, units, live)
    if recompute is not None and (recompute.units is not None or watch.root):
        blocks = [unit.module for unit in units.units[:-1]]
        Forwards(recompute, CompileConfig(), module, blocks, torch.device("cpu")).begin()
    try:
        with live, register_module_forward_pre_hook(_refuse_layer):
            loss = step()
            watch.moment(watch.root)
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()
            del loss
            watch.moment(watch.root)
        if not any(m.gradient for m in watch.moments):
            raise NotTraceable("no parameter received a gradient")
    except Exception as error:  # user code under fake tensors can raise anything
        raise NotTraceable(_first_line(error)) from error
    return watch.moments


def _is_real_parameter(value: Any) -> bool:
    return issubclass(type(value), nn.Parameter)  # a fake parameter is of another class


def _refuse_layer(layer: nn.Module, args: Any) -> None:
    """Refuses a layer of the module itself: it may be sharded by now, and its hooks would gather."""
    if any(map(_is_real_parameter, layer.parameters())):
        raise NotTraceable(f"the step of the copy runs the module's own {type(layer).__name__}")


def _refuse_functions(copied: nn.Module) -> None:
    """Refuses functions that hold the original module or its tensors: deepcopy does not copy functions, so a trace
    would write to the original."""
    own = {id(value) for m in copied.modules() for value in (m, *vars(m).values())}
    for m in copied.modules():
        hooks = [hook for value in vars(m).values() if isinstance(value, dict) for hook in value.values()]
        for function in (f for f in (*vars(m).values(), *hooks) if isinstance(f, FunctionType)):
            for content in (cell.cell_contents for cell in function.__closure__ or ()):
                held = content.__self__ if isinstance(content, MethodType) else content
                if isinstance(held, (nn.Module, Tensor, list, dict, set)) and id(held) not in own:
                    raise NotTraceable(
                        f"{type(m).__name__} holds {function.__qualname__}, a closure that cannot be copied"
                    )


class _Watch:
    """Hooks that record a moment whenever a unit has run or a gradient is complete."""

    def __init__(self, module: nn.Module, units: UnitPlan, live: LiveBytes) -> None:
        self.live, self.moments = live, list[Moment]()
        self.root = len(units.units) - 1
        for index, unit in enumerate(units.units):
            for name, p in unit.parameters.items():
                self._watch_gradient(p, index, name)
            if index != self.root:
                unit.module.register_forward_pre_hook(self._enter)
                unit.module.register_forward_hook(partial(self._leave, index))
        for name, p in units.replicated.items():
            self._watch_gradient(p, self.root, name)

    def _watch_gradient(self, p: Tensor, unit: int, name: str) -> None:
        def complete(p: Tensor) -> None:
            assert p.grad is not None
            self.live.exclude(p.grad)
            self.moment(unit, name)

        if p.requires_grad:
            p.register_post_accumulate_grad_hook(complete)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not in_backward():  # else the unit is being recomputed
            self.moment(self.root)

    def _leave(self, unit: int, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        returns = any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(output))
        self.moment(unit, returns=returns)

    def moment(self, unit: int, gradient: str = "", returns: bool = False) -> None:
        self.moments.append(Moment(unit=unit, gradient=gradient, activations=self.live.peak, returns=returns))
        self.live.peak = self.live.live


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
