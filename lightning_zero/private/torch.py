"""Private parts of PyTorch except those of ``fully_shard`` (``engines/fsdp2/private.py``), read in torch 2.11-2.15.

``torch._foreach_*`` is not listed: torch documents these functions on its page of operators, as beta, so other files
use them directly. The same holds for ``os._exit`` and ``sys._getframe``, which Python documents.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch._functorch.apis
import torch._functorch.eager_transforms
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_zero.private.check import Library, importing

_Call = TypeVar("_Call", bound=Callable[..., Any])
TESTED = ">=2.11,<2.16"
VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
"""Selects code for a version of torch. Only private files may use it."""
_GET_ATTRIBUTE = "tp_getattro_impl" if VERSION >= (2, 14) else "var_getattr"
_SET_DATA = "shallow_copy_data_" if VERSION >= (2, 14) else "set_"
"""The operator to which Dynamo translates ``p.data = value``."""
_DYNAMOS_SETATTR = "torch._dynamo.variables.builtin:SetAttrBuiltinVariable._call_setattr"
TORCH = Library(
    "torch",
    TESTED,
    {
        "torch": "_C.DisableTorchFunction _C._EnableTorchFunction _C._disabled_torch_function_impl"
        " _C._are_functorch_transforms_active _C._len_torch_dispatch_stack _C._current_graph_task_id"
        " _C._storage_Use_Count UntypedStorage._cdata _C._dynamo.eval_frame.set_eval_frame"
        " _C._autograd._top_saved_tensors_default_hooks _C._autograd._saved_tensors_hooks_is_enabled"
        " ops.aten._local_scalar_dense.default ops.aten.detach.default._schema.is_mutable",
        "torch:Tensor": "_version _base _post_accumulate_grad_hooks _make_wrapper_subclass",
        "torch.nn:Module": "_parameters _buffers _modules _non_persistent_buffers_set _call_impl"
        " _compiled_call_impl _apply",
        "torch.nn": "MultiheadAttention._reset_parameters Transformer._reset_parameters",
        "torch.autograd": "_engine_run_backward",
        "torch.autograd:backward": "_engine_run_backward",
        "torch.autograd:grad": "_engine_run_backward",
        "torch.amp.grad_scaler:GradScaler": "_scale _per_optimizer_states",
        "torch.optim.optimizer": "_global_optimizer_pre_hooks _global_optimizer_post_hooks",
        "torch.optim.optimizer:Optimizer": "_patch_step_function hooked"  # see private/torch_optim.py
        " _optimizer_step_pre_hooks _optimizer_step_post_hooks"
        " _optimizer_state_dict_pre_hooks _optimizer_state_dict_post_hooks"
        " _optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks",
        "torch.optim.lr_scheduler:LRScheduler": "_wrapped_by_lr_sched",
        "torch._functorch.pyfunctorch": "temporarily_clear_interpreter_stack",
        "torch._functorch.apis": "vmap_impl",
        "torch._functorch.eager_transforms": "grad_and_value_impl _vjp_with_argnums _jvp_with_argnums",
        "torch._dynamo": "reset_code_caches OptimizedModule exc.unimplemented",
        "torch._dynamo.eval_frame": "skip_code",
        "torch._dynamo.eval_frame:_TorchDynamoContext": "_torchdynamo_orig_callable",
        "torch._dynamo.output_graph:OutputGraph": "call_user_compiler grapharg",
        "torch._dynamo.variables.builder:GraphArg": "example",
        "torch._dynamo.variables.tensor:TensorVariable": _GET_ATTRIBUTE,
        "torch._dynamo.variables.optimizer:OptimizerVariable": "call_method",
        **({_DYNAMOS_SETATTR: _SET_DATA} if VERSION >= (2, 13) else {}),
        "torch.distributed.distributed_c10d": "_abort_process_group",
        "torch.distributed.tensor:DTensor": "_local_tensor",
        "torch.distributed.tensor.debug": "_clear_sharding_prop_cache",
        "torch._subclasses.fake_tensor:FakeTensorMode": "allow_non_fake_inputs",
        "torch.utils._python_dispatch": "TorchDispatchMode.__torch_dispatch__ _disable_current_modes",
        "torch.utils._pytree": "tree_map tree_leaves tree_flatten tree_unflatten",
    },
)

with importing(TORCH):
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as without_transforms
    from torch._subclasses.fake_tensor import FakeTensorMode  # no public path
    from torch.distributed import _functional_collectives as functional_collectives  # what DTensor calls
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache as forget_meshes
    from torch.utils import _pytree as pytree  # torch's own functions for nested arguments; no public path yet
    from torch.utils._python_dispatch import TorchDispatchMode  # no public path; torch's documentation uses this one
    from torch.utils._python_dispatch import _disable_current_modes as outside_modes  # dispatch modes; no public name

    # Call `forget_meshes` between runs. DTensor's operators cache results by mesh, and meshes compare equal whatever
    # their process groups are: a later run would get tensors with an earlier run's groups. No public name clears it.

    DisableTorchFunction = torch._C.DisableTorchFunction
    """No ``__torch_function__`` runs inside it, neither of a mode (as our views have) nor of a subclass. The public
    ``DisableTorchFunctionSubclass`` leaves modes on."""
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass  # documented under this name
    EnableTorchFunction: Any = torch._C._EnableTorchFunction
    """Undoes ``DisableTorchFunction`` inside it, for the user's own code."""
    disabled_torch_function = torch._C._disabled_torch_function_impl
    """``__torch_function__`` for a subclass without one of its own; public only for ``torch.compile``, under the same
    name."""
    in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
    """Whether a transform of ``torch.func`` is running; there is no public way to ask."""
    ITEM = torch.ops.aten._local_scalar_dense.default
    """The operator of ``Tensor.item()``."""
    INITIALIZERS = ("reset_parameters", "_reset_parameters")
    """Methods by which torch's modules initialize themselves; two modules have only the second name."""

__all__ = [
    "FakeTensorMode", "TorchDispatchMode", "forget_meshes", "functional_collectives", "outside_modes", "pytree",
    "without_transforms",
]  # fmt: skip
"""Names that come from private modules."""

KEPT_WITHOUT_HOOKS: dict[str, Any] = {"respect_saved_tensors_hooks": False} if VERSION >= (2, 14) else {}
"""Keeps the tensors that selective recomputation saves away from saved-tensor hooks. Every version does so by default,
but torch 2.14 warns unless it is told."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Counter that grows with each in-place write to a tensor or a view of it; torch's notes on autograd describe it."""
local_tensor: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""The shard of a ``DTensor`` itself; autograd records the public ``to_local()``, which is ten times slower."""
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""A module's own parameters, by attribute, for reading and writing. ``named_parameters(recurse=False)`` makes a copy,
without duplicates."""

storage_key: Callable[[Any], int] = attrgetter("_cdata")
"""Identity of a storage, with or without memory; ``data_ptr`` is 0 for every storage without memory. The key is unique
while a ``torch.multiprocessing.reductions.StorageWeakRef`` to the storage is alive."""


def users_of(storage: Any) -> int:
    """Returns the number of tensors that use ``storage``; there is no public way to ask."""
    return torch._C._storage_Use_Count(storage._cdata) - 1  # the Python object `storage` itself counts as one


def takes_saved_tensors_hooks() -> bool:
    """Whether hooks for the tensors that autograd saves are allowed, and none are on, as in a recomputed module; there
    is no public way to ask."""
    home: Any = torch._C._autograd
    return home._saved_tensors_hooks_is_enabled() and home._top_saved_tensors_default_hooks(True) is None


def set_local_tensor(sharded: Any, part: Tensor) -> None:
    """Sets the shard of a ``DTensor``; the public ``from_local`` would move ``part`` to the mesh's device."""
    sharded._local_tensor = part


def set_data(p: Tensor, value: Tensor) -> None:
    """Sets ``p.data = value`` for a parameter of any class, even if its ``__torch_function__`` does not support it."""
    with torch._C.DisableTorchFunctionSubclass():
        p.data = value


def convert(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces each tensor ``t`` by ``function(t)``, as ``module.to`` does. Modules may override ``_apply`` to convert
    tensors that are neither parameters nor buffers."""
    module._apply(function)


@contextmanager
def backwards_inside(mode: TorchFunctionMode) -> Iterator[None]:
    """Keeps ``mode`` active while autograd runs inside this block.

    ``Tensor.backward`` and ``torch.autograd.grad`` are torch functions themselves, so torch turns a mode that handles
    them off while they run. The mode would then miss every user hook, ``autograd.Function`` and recomputed forward.
    """
    run_backward = torch.autograd._engine_run_backward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = inside
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run_backward


_touches: list[Callable[[list[Any]], None]] = []
_TRANSFORMS = (
    (torch._functorch.apis, "vmap_impl"),
    (torch._functorch.eager_transforms, "grad_and_value_impl"),
    (torch._functorch.eager_transforms, "_vjp_with_argnums"),
    (torch._functorch.eager_transforms, "_jvp_with_argnums"),
)
"""All transforms of ``torch.func`` call one of these four."""


def before_transforms(touch: Callable[[list[Any]], None]) -> Callable[[], None]:
    """Has ``touch`` called with all arguments of each transform of ``torch.func``, until the returned function is
    called.

    A transform wraps tensors in other objects. Wrapping is not a torch function, so no mode and no subclass sees it.
    Runs may end in any order: torch's own functions are restored when the last run ends.
    """
    if not _touches:
        for module, name in _TRANSFORMS:
            setattr(module, name, _touching(getattr(module, name)))
    _touches.append(touch)

    def end() -> None:
        if touch not in _touches:  # already ended
            return
        _touches.remove(touch)
        if not _touches:
            for module, name in _TRANSFORMS:
                setattr(module, name, getattr(module, name).__wrapped__)

    return end


def _touching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def transform(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for touch in _touches:
                touch(pytree.tree_leaves((args, kwargs)))
        return original(*args, **kwargs)

    return transform


def has_accumulation_hooks(p: Tensor) -> bool:
    """Whether ``p`` has hooks from ``register_post_accumulate_grad_hook``; there is no public way to ask."""
    return bool(p._post_accumulate_grad_hooks)


def module_tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Returns the tables of a module's own parameters, buffers and children, by attribute."""
    return module._parameters, module._buffers, module._modules


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the entries of ``state_dict`` by name: the registered objects themselves, a tied one under each name.

    ``state_dict`` itself runs hooks, and an engine's hook gathers. No public name lists the buffers that it omits.
    """
    saved: dict[str, Tensor] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        kept = {k: b for k, b in each._buffers.items() if k not in each._non_persistent_buffers_set}
        for name, tensor in {**each._parameters, **kept}.items():
            if tensor is not None:
                saved[f"{prefix}.{name}" if prefix else name] = tensor
    return saved


def as_traced(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that a mode must call for ``func`` while Dynamo traces. ``Tensor.unflatten`` is Python code
    that calls ``super()``, which would break the graph (torch 2.13)."""
    return torch.unflatten if func is Tensor.unflatten else func


def outside_transforms() -> AbstractContextManager[object]:
    """Suspends transforms of ``torch.func`` for code that gathers a parameter.

    A parameter that the transformed function does not take as an argument is a constant of the transform. But the
    autograd functions that gather it have no rules for transforms: inside of one they would raise, or crash.
    """
    return without_transforms() if in_transform() else nullcontext()


def in_fx_trace() -> bool:
    """Whether ``make_fx`` is recording operators. The public check alone takes five times as long."""
    return torch._C._len_torch_dispatch_stack() > 0 and get_proxy_mode() is not None


def never_a_frame(function: _Call) -> _Call:
    """Lets Dynamo inline ``function`` into compiled callers, but never compile it for eager callers; returns it.

    So a handler of torch functions can tell the two apart. The public ``torch.compiler.disable`` would break graphs.
    Functions that ``function`` calls may be compiled, except between two :data:`pause_dynamo` calls.
    """
    from torch._dynamo.eval_frame import skip_code  # fully_shard has imported it

    skip_code(function.__code__)
    return function


pause_dynamo: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
"""Call ``previous = pause_dynamo(None)``, and finally ``pause_dynamo(previous)``: in between nothing is compiled except
compiled functions themselves. The public ``torch.compiler.disable`` takes ten times as long and needs a function."""

Graph = Callable[..., Any]
"""A backend's result for one of Dynamo's graphs; it takes the graph's inputs one by one."""


class Dynamo:
    """Changes Dynamo's behaviour for the rest of the process. Graphs live as long as the code that they come from, so
    the change cannot be undone. Only backends are public, and users choose those.

    Args:
        wrap: ``wrap(graph, compiled)`` returns the function to run in place of each compiled graph.
        own: Whether reads of a parameter's ``.grad`` and ``.data`` must run in eager mode: they break the graph.
    """

    def __init__(self, wrap: Callable[[Any, Graph], Graph], own: Callable[[Tensor], bool]) -> None:
        from torch._dynamo.exc import unimplemented
        from torch._dynamo.output_graph import OutputGraph
        from torch._dynamo.variables.optimizer import OptimizerVariable
        from torch._dynamo.variables.tensor import TensorVariable

        compile_graph, get_attribute = OutputGraph.call_user_compiler, getattr(TensorVariable, _GET_ATTRIBUTE)
        call_of_optimizer = OptimizerVariable.call_method

        def leave_to_eager(what: str) -> None:
            explanation = f"{what} is answered for outside of graphs."
            unimplemented(gb_type="lightning_zero: sharded parameters", context=what, explanation=explanation, hints=[])

        @functools.wraps(compile_graph)  # keep the signature: the table's check compares parameters with torch's
        def call_user_compiler(self: OutputGraph, gm: Any, example_inputs: Any) -> Any:
            return wrap(gm, compile_graph(self, gm, example_inputs))

        @functools.wraps(get_attribute)
        def read(self: TensorVariable, tx: Any, name: str) -> Any:
            if name in ("grad", "data") and issubclass(self.python_type(), nn.Parameter):
                given = self.proxy.node.meta.get("grapharg")
                if given is not None and own(given.example):
                    leave_to_eager(f".{name} of a sharded parameter")
            return get_attribute(self, tx, name)

        @functools.wraps(call_of_optimizer)
        def call_method(self: OptimizerVariable, tx: Any, name: str, *args: Any) -> Any:
            if name == "_init_group":  # Dynamo calls it by itself, and it reads gradients
                held = (p for group in self.value.param_groups for p in group["params"])
                if any(isinstance(p, nn.Parameter) and own(p) for p in held):
                    leave_to_eager(f"{type(self.value).__name__} of sharded parameters")
            return call_of_optimizer(self, tx, name, *args)

        OptimizerVariable.call_method = call_method  # type: ignore[method-assign, assignment]
        OutputGraph.call_user_compiler = call_user_compiler  # type: ignore[method-assign]
        setattr(TensorVariable, _GET_ATTRIBUTE, read)

    def forget_graphs(self) -> None:
        """Lets all code be traced again."""
        from torch._dynamo import reset_code_caches

        reset_code_caches()


def assigns_data(graph: Any) -> bool:
    """Whether one of Dynamo's graphs assigns ``p.data`` of a parameter that is its input."""
    given = {n: getattr(n.meta.get("grapharg"), "example", None) for n in graph.graph.nodes if n.op == "placeholder"}
    writes = (n.args[0] for n in graph.graph.nodes if n.args and getattr(n.target, "__name__", n.target) in _SET)
    return any(isinstance(given.get(n), nn.Parameter) for n in writes)


_SET = ("set_", _SET_DATA)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the function that ``module.compile()`` runs instead of calling the module, or ``None``."""
    return module._compiled_call_impl


def is_compiled(module: nn.Module) -> bool:
    """Whether calling ``module``, or a function that it holds, runs compiled code, by any way of compiling it."""
    from torch._dynamo import OptimizedModule

    # Check for this attribute: a module's compiled call may also be one of ours that recomputes.
    calls = (compiled_call(module), *filter(inspect.isroutine, vars(module).values()))
    return isinstance(module, OptimizedModule) or any(hasattr(call, "_torchdynamo_orig_callable") for call in calls)


def uncompiled(function: Any) -> Any:
    """Returns the function that was passed to ``torch.compile``; returns other functions unchanged."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Sets the function that runs instead of calling ``module``, hooks included, as ``module.compile()`` does. Copies
    and pickles omit it."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = call


def call_with_hooks(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``module`` with all its hooks, but with ``forward`` instead of its own."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        if before is None:
            own.pop("forward", None)
        else:
            own["forward"] = before


def wrapper_subclass(cls: type, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """Makes a tensor of the subclass ``cls`` without memory, as torch's own subclasses (``DTensor``) are made. The
    public documentation of ``__torch_dispatch__`` mentions this function."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


def schema_of(func: Any) -> Any:
    """Returns the schema of an operator that ``__torch_dispatch__`` receives."""
    return func._schema


def in_backward() -> bool:
    """Whether autograd is running on this thread. On an accelerator, a backward runs on a thread of torch's own."""
    return torch._C._current_graph_task_id() != -1


def abort_process_groups() -> None:
    """Ends all process groups without waiting for other ranks; the public ``destroy_process_group`` waits."""
    dist.distributed_c10d._abort_process_group()


def loss_scale(scaler: Any) -> Tensor | None:
    """Returns the scale of a ``GradScaler`` on its device; the public ``get_scale()`` copies it to the host, which
    waits for the device."""
    return scaler._scale


def found_inf(scaler: Any, optimizer: Optimizer) -> dict[torch.device, Tensor]:
    """Returns the inf flags of ``scaler.unscale_(optimizer)`` by device, for writing: ``GradScaler`` has no public way
    to add other ranks' flags (FSDP1's ``ShardedGradScaler`` uses the same name)."""
    return scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]


def set_found_inf(scaler: Any, optimizer: Optimizer, found: dict[torch.device, Tensor]) -> None:
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
