"""All uses of private names of ``fully_shard``, and nothing else.

``fully_shard`` has no undo, no public way to list its groups and none to act before a group's reduction. This code was
written against the sources of torch 2.11-2.15; :data:`FULLY_SHARD` is checked when a strategy is created, and the
parity tests fail if behavior differs. List a new private name in :data:`FULLY_SHARD` before you use it here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from lightning_zero.host import in_large_pages
from lightning_zero.private.check import Library, importing
from lightning_zero.private.torch import (
    TESTED,
    VERSION,
    DisableTorchFunction,
    in_transform,
    set_data,
    storage_key,
    users_of,
)

_HOME = "torch.distributed.fsdp._fully_shard"
_WAITS_APART = VERSION < (2, 15)
"""Whether gradients of earlier micro-batches wait for their reduction in ``unsharded_accumulated_grad``, in the dtype
of the reduction. Since torch 2.15 they stay on the user's parameter, with that dtype as its ``grad_dtype``."""
FULLY_SHARD = Library(
    "torch",
    TESTED,
    {
        f"{_HOME}._fsdp_param_group:FSDPParamGroup": "fsdp_params device mesh_info post_forward_mesh_info"
        " _training_state reduce_grads all_reduce_grads unshard_in_backward _register_post_backward_hook"
        " pre_forward post_forward pre_backward post_backward finalize_backward unshard wait_for_unshard reshard"
        " is_sharded is_unsharded _to_sharded _to_unsharded _all_gather_process_group _all_gather_result"
        " _post_forward_indices _module_to_pre_save_state_dict_hook_handle"
        " _module_to_pre_load_state_dict_hook_handle",
        f"{_HOME}._fsdp_param_group": "RegisterPostBackwardFunction.generate_vmap_rule",
        f"{_HOME}._fsdp_param:FSDPParam": "sharded_param _sharded_param_data padded_sharded_param_size"
        " _unsharded_param _module_info shared_modules shared_param_names param_dtype"
        " _orig_size _contiguous_orig_stride sharded_state all_gather_outputs init_all_gather_outputs"
        " alloc_all_gather_outputs init_unsharded_param free_unsharded_param _setattr_on_modules"
        " reset_sharded_param _post_load_hook_handle "
        + ("unsharded_accumulated_grad to_accumulated_grad_if_needed" if _WAITS_APART else "unsharded_grad_dtype"),
        f"{_HOME}._fsdp_param": "ShardedState.UNSHARDED",
        f"{_HOME}._fsdp_common": "TrainingState.PRE_BACKWARD TrainingState.IDLE",
        f"{_HOME}._fsdp_collectives": "_get_param_all_gather_inputs",
        f"{_HOME}._fsdp_collectives:AllGatherResult": "all_gather_output all_gather_event all_gather_work"
        " param_all_gather_input_dtypes param_all_gather_input_numels all_gather_input_split_sizes",
        f"{_HOME}._fsdp_param_group:FSDPCommContext": "all_gather_state all_gather_copy_in_stream all_gather_stream"
        + ("" if _WAITS_APART else " _last_post_reduce_events"),
        f"{_HOME}._fsdp_state:FSDPState": "_state_ctx _comm_ctx _training_state _modules _pre_forward_hook_handle"
        " _post_forward_hook_handle iter_forward_root post_forward_order all_states _lazy_init _pre_backward"
        " _root_pre_forward",
        f"{_HOME}._fsdp_state": "_get_module_fsdp_state",
        f"{_HOME}._fully_shard": "FSDPModule._orig_cls_mro_index",
        "torch.distributed.fsdp:fully_shard": "_is_fsdp_managed_module _fsdp_use_orig_params",
        "torch.distributed._composable.contract": "REGISTRY_KEY STATE_KEY",
        "torch.distributed._composable_state": "_module_state_mapping",
        "torch": "_C._DisableFuncTorch autograd._unsafe_preserve_version_counter",
    },
)
with importing(FULLY_SHARD):
    from torch.distributed import _composable_state
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, _get_param_all_gather_inputs
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

Group = Any  # torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup
STATE_KEYS = (STATE_KEY, REGISTRY_KEY)
"""Keys under which a unit's ``__dict__`` holds the state of ``fully_shard``."""
KNOWS_TRANSFORMS: bool = RegisterPostBackwardFunction.generate_vmap_rule
"""Whether the hooks of ``fully_shard`` support ``torch.func`` transforms: since torch 2.13."""
UNSHARDED = ShardedState.UNSHARDED
ShardedParam = Any  # torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam


def init_now(root: nn.Module) -> None:
    """Make ``root`` the root of all units below it; otherwise the module that runs first would become a root."""
    _state(root)._lazy_init()


def give_class_back(module: nn.Module) -> None:
    """Restore the unit's class, and remove the marks of ``fully_shard`` from the modules below.

    ``type(layer) is nn.Linear`` must hold for user code, and transformers disables layerdrop where it finds the mark.
    From then on, use the functions below instead of the methods of ``FSDPModule``.
    """
    module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]  # [FSDP<Orig>, FSDPModule, Orig, ...]
    for inner in module.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            inner.__dict__.pop(mark, None)


def unshard(unit: nn.Module, async_op: bool = False) -> nn.Module:
    """Gather the unit's parameters; with ``async_op`` they are valid only after :func:`wait_for_unshard`."""
    for group in groups(unit):
        group.unshard(async_op=async_op)
    if not async_op:
        wait_for_unshard(unit)
    return unit


def wait_for_unshard(unit: nn.Module) -> None:
    for group in groups(unit):
        group.wait_for_unshard()


def gather_now(group: Group) -> None:
    """Gather the group in the middle of a forward or backward, for uses outside its unit's own part."""
    if group.is_sharded:
        with DisableTorchFunction():
            group.unshard()
            group.wait_for_unshard()


def comm_context(root: nn.Module) -> Any:
    """Return the object that holds the streams of all units below ``root``."""
    return _state(root)._comm_ctx


def gather_after_this(root: nn.Module) -> None:
    """Make later gathers see the shards as the current stream leaves them.

    They copy shards on a stream of their own, which by itself waits for the current stream only when a step begins.
    """
    comm = comm_context(root)
    if streams := [s for s in (comm.all_gather_copy_in_stream, comm.all_gather_stream) if hasattr(s, "wait_event")]:
        event = comm.device_handle.current_stream().record_event()
        for stream in streams:
            stream.wait_event(event)


def begin_forward(root: nn.Module) -> None:
    """Let gathers of units that run without their root wait only for work queued so far; otherwise each gather would
    wait for all compute queued before it."""
    _state(root)._root_pre_forward(root, (), {})


def end_forward(root: nn.Module) -> None:
    """Free the buffer of the last gather, as the root does after its forward."""
    comm = comm_context(root)
    if comm.all_gather_state is not None:
        for stream in (comm.all_gather_copy_in_stream, comm.all_gather_stream):
            stream.wait_event(comm.all_gather_state.event)
        comm.all_gather_state = None


def reshard(unit: nn.Module) -> None:
    """Drop the unit's gathered parameters."""
    for group in groups(unit):
        group.reshard()


def set_reshard_after_forward(unit: nn.Module, reshards: bool) -> None:
    """Do what ``FSDPModule``'s method of this name does, for a unit whose class is restored."""
    for group in groups(unit):
        group.post_forward_mesh_info = group.mesh_info if reshards else None


def set_requires_gradient_sync(units: list[nn.Module], syncs: bool) -> None:
    """Set whether a backward reduces the gradients of ``units``."""
    for unit in units:
        for group in groups(unit):
            group.reduce_grads = group.all_reduce_grads = syncs


def keep_registered(group: Group, originals: Mapping[Tensor, nn.Parameter]) -> None:
    """Make the user's parameters the gathered parameters, and keep them registered on their modules.

    ``fully_shard`` creates a gathered parameter once and keeps it; only its memory is allocated and freed. While the
    group is sharded, a user's parameter is empty: do not compute with it while :func:`is_away` is true.

    The groups must be initialized and sharded; ``originals`` maps sharded parameters to the user's.
    """
    for p in group.fsdp_params:
        original = originals[p.sharded_param]
        size, data = group.mesh_info.shard_mesh_size, p._sharded_param_data
        p.init_all_gather_outputs([data.numel()], [p.param_dtype or data.dtype], size, group.device)
        dtype_before = original.grad_dtype
        p.home = torch.as_strided(p.all_gather_outputs[0], p._orig_size, p._contiguous_orig_stride, storage_offset=0)
        go_home(p, original)
        if not _WAITS_APART and p.unsharded_grad_dtype != original.grad_dtype:
            p.dtype_before, original.grad_dtype = dtype_before, p.unsharded_grad_dtype
        p.free_unsharded_param()
        p._unsharded_param = original
        register(p, original)
        p._setattr_on_modules = p.reset_sharded_param = _stay
        p._post_load_hook_handle.remove()
        for mark in [key for key in vars(original) if key.startswith("_fsdp")]:
            del vars(original)[mark]
    for handles in (
        group._module_to_pre_save_state_dict_hook_handle,
        group._module_to_pre_load_state_dict_hook_handle,
    ):
        for handle in handles.values():  # these hooks reshard, even in the middle of a step
            handle.remove()


def give_grad_dtype_back(p: ShardedParam, original: nn.Parameter) -> None:
    """Restore the ``grad_dtype`` from before the run, and cast the gradient to it; torch cannot unset it."""
    if "dtype_before" in vars(p):
        grad, original.grad = original.grad, None
        original.grad_dtype = p.dtype_before
        original.grad = None if grad is None else grad.to(grad.device, p.dtype_before)


def go_home(p: ShardedParam, original: Tensor) -> None:
    """Place ``original`` in its home again, also while that memory is freed."""
    set_data(original, p.home)


def is_away(p: ShardedParam) -> bool:
    """Whether the parameter is resharded, so that only the shard has valid values."""
    return p.sharded_state is not UNSHARDED


class Home(NamedTuple):
    """The memory into which a parameter is gathered."""

    group: Group
    param: ShardedParam

    def free(self) -> None:
        """Free the memory of a resharded parameter, which nobody holds."""
        if not is_resizable(self.param):
            self.leave()
        self.param.free_unsharded_param()

    def leave(self) -> None:
        """Leave the memory to its holders; the parameter gets a new home, without values."""
        group, p = self
        output, full = p.all_gather_outputs[0], p._unsharded_param
        lay_there = storage_key(full.untyped_storage()) == storage_key(output.untyped_storage())
        set_data(output, torch.empty_like(output))
        set_data(p.home, output.as_strided(p._orig_size, p._contiguous_orig_stride))
        if lay_there:
            go_home(p, full)
        group.__dict__.pop("parts_of_outputs", None)
        if is_away(p):
            p.free_unsharded_param()

    def users(self) -> tuple[Any, int]:
        """Return the storage, and the number of tensors in it that are not the engine's own."""
        group, p = self
        storage = p.all_gather_outputs[0].untyped_storage()
        all_parts = group.__dict__.get("parts_of_outputs")
        parts = () if all_parts is None else all_parts[group.fsdp_params.index(p)]
        own = [*p.all_gather_outputs, p.home, p._unsharded_param, *parts]
        own += [part._base for part in parts[:1]]  # a view keeps its base
        keys = [storage_key(t.untyped_storage()) for t in {id(t): t for t in own if t is not None}.values()]
        return storage, users_of(storage) - keys.count(storage_key(storage))


def own_of(p: ShardedParam) -> Tensor:
    """Return the gathered parameter, which is the user's."""
    original: Tensor = p._unsharded_param
    return original


def home_dtype(p: ShardedParam) -> torch.dtype:
    """Return the dtype of the memory into which the parameter is gathered."""
    dtype: torch.dtype = p.all_gather_outputs[0].dtype
    return dtype


def fill_home(p: ShardedParam, values: Tensor) -> None:
    """Allocate the home of a resharded parameter and copy ``values`` into it, without counting this as a write."""
    p.alloc_all_gather_outputs()
    with torch.autograd._unsafe_preserve_version_counter((p.home, p._unsharded_param)):
        p.home.copy_(values)


def is_resizable(p: ShardedParam) -> bool:
    """Whether the memory of the gathered copy can be freed; not once NumPy shares it."""
    return bool(p.all_gather_outputs[0].untyped_storage().resizable())


def register(p: ShardedParam, instead: Any) -> None:
    """Register ``instead`` on the modules that hold the parameter, gathered or sharded.

    If the user has replaced or deleted the parameter since, the module stays as the user left it.
    """
    for module, name in _places(p):
        held = module._parameters.get(name)
        if held is p.sharded_param or held is p._unsharded_param:
            if "." in name:  # tensordict's TensorDictParams: such a name cannot be an attribute
                module._parameters[name] = instead
            else:
                setattr(module, name, instead)


def grad_of(p: ShardedParam) -> Tensor | None:
    """Return the reduced gradient (sharded); before the reduction this rank's own (full)."""
    grad = p.sharded_param.grad
    return next(iter(_full_grads(p)), None) if grad is None else grad


def drop_full_grad(p: ShardedParam) -> None:
    """Discard a gradient that has not been reduced."""
    p._unsharded_param.grad = None
    if _WAITS_APART:
        p.unsharded_accumulated_grad = None


def set_full_grad(p: ShardedParam, grad: Tensor) -> None:
    """Make ``grad`` this rank's own unreduced gradient, which the next reduction includes."""
    full = p._unsharded_param
    full.grad = grad.to(full.device, full.grad_dtype)


def add_full_grad(p: ShardedParam, grad: Tensor) -> None:
    """Add ``grad`` to this rank's own unreduced gradient."""
    own, *_ = _full_grads(p)
    with torch.no_grad():
        own.add_(grad)


def _full_grads(p: ShardedParam) -> list[Tensor]:
    """Return this rank's own unreduced gradients: of this micro-batch, and of earlier ones if stored separately."""
    found = [p._unsharded_param.grad, p.unsharded_accumulated_grad if _WAITS_APART else None]
    return [grad for grad in found if grad is not None]


def groups(module: nn.Module) -> list[Group]:
    """Return the parameter groups of one unit: one, or none if the unit holds no parameters."""
    state = _state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.12


def hook_unit(module: nn.Module, acts: Callable[[], bool]) -> None:
    """Make the unit's own hooks do nothing unless ``acts()``, and wrap them for Dynamo once.

    ``fully_shard`` wraps them at each call, which takes 16 µs of Python, five times per unit and step.
    """
    state = _state(module)

    def acting(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: hook(*args) if acts() else None

    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        hooks = handle.hooks_dict_ref()
        hooks[handle.id] = torch.compiler.disable(acting(_undecorated(hooks[handle.id])), reason=_REASON)
    state._pre_backward = torch.compiler.disable(_undecorated(state._pre_backward), reason=_REASON)


_REASON = "skipping FSDP hooks"


@dataclass(frozen=True)
class GroupHooks:
    """Callbacks with a group, at the moments of its schedule."""

    before_unshard: Callable[[Group], Any] = lambda group: None
    """Called before the group is gathered."""
    before_reshard: Callable[[Group], Any] = lambda group: None
    """Called before the gathered parameters are dropped."""
    before_backward: Callable[[Group], Any] = lambda group: None
    """Called when the group's part of a backward begins, before it is gathered for that."""
    before_reduce: Callable[[Group], bool] = lambda group: True
    """Called when the group's part of a backward ends; returns whether to reduce its gradients."""


def hook_group(group: Group, hooks: GroupHooks, is_root: bool = False) -> None:
    """Make ``group`` call ``hooks``, and run its own work outside any ``TorchFunctionMode``, as it is not user code.

    The root's group stays gathered until the backward is over, whatever the inputs: a batch may carry a graph of its
    own (features of a trained encoder, from ``on_after_batch_transfer``), whose backward follows the root's.
    """
    unshard, to_sharded = group.unshard, group._to_sharded
    pre_backward, post_backward = _undecorated(group.pre_backward), _undecorated(group.post_backward)

    def unshards(async_op: bool = False) -> None:
        if group.is_sharded and group._all_gather_result is None:
            hooks.before_unshard(group)
        unshard(async_op)

    def becomes_sharded() -> None:
        if not group.is_sharded:
            hooks.before_reshard(group)
        to_sharded()

    @torch.compiler.disable(reason=_REASON)
    def backward_begins(*unused: Any) -> None:
        with DisableTorchFunction():
            hooks.before_backward(group)
            pre_backward(*unused)

    @torch.compiler.disable(reason=_REASON)
    def backward_ends(*unused: Any) -> None:
        with DisableTorchFunction():
            if hooks.before_reduce(group):
                post_backward(*unused)

    def quiet(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with DisableTorchFunction():
                return original(*args, **kwargs)

        return call

    group.unshard, group._to_sharded = unshards, becomes_sharded
    group.pre_backward, group.post_backward = backward_begins, backward_ends
    for name in ("pre_forward", "post_forward", "finalize_backward"):
        setattr(group, name, quiet(getattr(group, name)))
    if is_root:
        group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)
    else:
        _let_inputs_change(group)


def _let_inputs_change(group: Group) -> None:
    """Let the unit change its inputs in place (``nn.ReLU(inplace=True)``, ``x += self.bias``), as under DDP.

    ``fully_shard`` passes the inputs through an ``autograd.Function`` whose backward ends the group's part, and torch
    forbids in-place writes to inputs that such a function returns unchanged. Views of the inputs may be written to,
    and a hook on their gradients ends the group's part as well. If the unit writes to all inputs, the group's part ends
    with the backward.
    """

    def register(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs: dict[int, Tensor] = {}
        if torch.is_grad_enabled():
            # not leaves: they cannot be written to, and a view of a parameter in another unit would have no memory
            _map_tensors(lambda t: inputs.setdefault(id(t), t) if t.grad_fn is not None else t, (args, kwargs))
        if not inputs:
            return args, kwargs
        views: Sequence[Tensor]
        if in_transform() or any(t.layout != torch.strided for t in inputs.values()):
            views = RegisterPostBackwardFunction.apply(group, *inputs.values())
        else:
            with DisableTorchFunction():
                views = [t.view_as(t) for t in inputs.values()]
            register_multi_grad_hook(views, lambda grads: group.post_backward())
        instead = dict(zip(inputs, views, strict=True))
        return _map_tensors(lambda t: instead.get(id(t), t), (args, kwargs))

    group._register_post_backward_hook = register


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Replace each tensor in ``value`` by ``function(tensor)``, in the containers of ``value`` themselves.

    The caller must see writes of the unit to lists, dictionaries and dataclasses (an appended auxiliary loss).
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list):
        value[:] = [_map_tensors(function, each) for each in value]
    elif isinstance(value, dict):
        for key, each in list(value.items()):
            value[key] = _map_tensors(function, each)  # not update(), which a ModelOutput of transformers refuses
    elif isinstance(value, tuple):
        items = [_map_tensors(function, each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            # bypass __setattr__: a frozen dataclass forbids it, and others may override it with checks
            object.__setattr__(value, each.name, _map_tensors(function, getattr(value, each.name)))
    return value


def _undecorated(method: Any) -> Callable[..., Any]:
    """Return a method without its decorators."""
    function = getattr(method, "__func__", None)
    return MethodType(inspect.unwrap(function), method.__self__) if function is not None else method


def pin(group: Group) -> None:
    """Keep the group gathered until :func:`unpin`, through further forwards and backwards."""
    group.reshard = _stay


def unpin(group: Group) -> None:
    """Undo :func:`pin`; from here on the group is resharded as usual."""
    group.__dict__.pop("reshard", None)


Gather = Callable[[list[Sequence[Tensor]], list[Tensor], dist.ProcessGroup], dist.Work]


def gather_in_place(group: Group, gather: Gather) -> None:
    """Make ``gather(parts, shards, process_group)`` fill the gathered parameters directly, without a buffer.

    ``parts`` are, for each parameter, the views that the shards of the ranks fill. Use this on CPUs only: there are no
    streams to order gather and compute.
    """
    process_group, params = group._all_gather_process_group, group.fsdp_params

    @outside_transforms()
    def unshard(async_op: bool = False) -> None:
        # The same conditions as in FSDPParamGroup.unshard, which this replaces.
        is_not_due = group._training_state == type(group._training_state).PRE_BACKWARD and not group.unshard_in_backward
        if group._all_gather_result is not None or group.is_unsharded or is_not_due:
            return
        shards = [shard for (shard,) in _get_param_all_gather_inputs(params)]
        outputs = [p.all_gather_outputs[0] for p in params]
        for p in params:
            p.alloc_all_gather_outputs()
            memory = p.all_gather_outputs[0].untyped_storage()
            in_large_pages(memory.data_ptr(), memory.nbytes())
        parts = group.__dict__.get("parts_of_outputs")
        if parts is None:
            parts = group.parts_of_outputs = [output.detach().chunk(process_group.size()) for output in outputs]
        with (
            torch.autograd._unsafe_preserve_version_counter(tuple(outputs)),
            record_function("FSDP::all_gather"),
        ):
            work = gather(parts, shards, process_group)
        group._all_gather_result = AllGatherResult(outputs[0], None, work, [], [], [])

    @outside_transforms()
    def wait_for_unshard() -> None:
        if group._all_gather_result is None:
            return
        with record_function("FSDP::all_gather_wait"):
            _await_gather(group)
        for p in params:
            p.init_unsharded_param()
        group._to_unsharded()
        group._all_gather_result = None

    end_of_backward = group.finalize_backward

    def finalize_backward() -> None:
        forget_gather(group)  # gathered ahead but never used: the original would leave these copies allocated
        end_of_backward()

    group.unshard, group.wait_for_unshard = unshard, wait_for_unshard
    group.finalize_backward = finalize_backward


def move_shards(group: Group, move: Callable[[list[Tensor]], list[Tensor]]) -> None:
    """Replace the flat shards by ``move(flat shards)``, copies in other memory.

    Call this right after ``fully_shard``, before anybody has taken the shards. Empty shards are not moved.
    """
    params = [p for p in group.fsdp_params if p.sharded_param._local_tensor.numel()]
    moved = move([p._sharded_param_data for p in params]) if params else []
    for p, data in zip(params, moved, strict=True):
        rows = p.sharded_param._local_tensor.shape[0]
        p._sharded_param_data = data
        # .data: a view would keep the memory alive
        p.sharded_param._local_tensor = data.view(p.padded_sharded_param_size)[:rows].data


def drop_shard(p: ShardedParam) -> None:
    """Release the shard's memory, which another tensor holds or which nobody needs; shape and dtype stay."""
    shard = p.sharded_param._local_tensor
    p._sharded_param_data = p._sharded_param_data.new_empty(0)
    set_data(shard, shard.new_empty(1).expand(shard.shape) if shard.numel() else shard.new_empty(shard.shape))


def _stay(*unused: Any) -> None:
    """Do nothing; replaces methods that would free memory, reshard, or register another parameter."""


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Keep the engine's own computations out of any enclosing ``torch.func`` transform or ``TorchFunctionMode``."""
    with torch._C._DisableFuncTorch(), DisableTorchFunction():
        yield


def _await_gather(group: Group) -> None:
    outputs = tuple(output for p in group.fsdp_params for output in p.all_gather_outputs)
    with torch.autograd._unsafe_preserve_version_counter(outputs):  # a gather does not count as a write
        if group._all_gather_result.all_gather_work is not None:
            group._all_gather_result.all_gather_work.wait()


def reduce_now(group: Group) -> None:
    """Reduce the gradients on the group's gathered parameters, outside autograd's schedule."""
    type(group).post_backward(group)
    if VERSION >= (2, 15):  # in earlier versions finalize_backward waits for these events
        events = group.comm_ctx._last_post_reduce_events
        for event in events.values():
            group.device_handle.current_stream().wait_event(event)
        events.clear()
    group.finalize_backward()
    group._training_state = type(group._training_state).IDLE


def trainable(group: Group) -> list[ShardedParam]:
    """Return the group's parameters that take part in a backward on this rank."""
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad]


def has_grad(p: ShardedParam) -> bool:
    """Whether this rank has an unreduced gradient of the parameter."""
    return bool(_full_grads(p))


def full_bytes(p: ShardedParam) -> tuple[int, int]:
    """Return the allocated bytes of the gathered copy and of full gradients."""
    copies = sum(t.untyped_storage().nbytes() for t in p.all_gather_outputs)
    return copies, sum(g.numel() * g.element_size() for g in _full_grads(p))


def copies(group: Group) -> list[tuple[Tensor, DTensor]]:
    """Return the gathered copy and the shard of each parameter."""
    return [(p._unsharded_param, p.sharded_param) for p in group.fsdp_params]


def version(group: Group) -> int:
    """Return a number that grows with each in-place write to a gathered parameter, but not with gathers."""
    return sum(p._unsharded_param._version for p in group.fsdp_params)


def zero_grad(p: ShardedParam) -> None:
    """Set a gradient of zeros, so that this rank's message in the reduction has the same length as the others'."""
    full = p._unsharded_param
    full.grad = torch.zeros_like(full, dtype=full.grad_dtype)


def accumulate_alike(params: Sequence[ShardedParam]) -> None:
    """Give all gradients one dtype, which a reduction requires before torch 2.15: that in which earlier micro-batches
    wait, else the parameter's. A graph from a hook, where parameters have full precision, leaves another one."""
    if not _WAITS_APART:
        return
    for full in [p._unsharded_param for p in params]:
        if full.grad is not None and full.grad.dtype != full.dtype:
            full.grad = full.grad.to(full.dtype)
    if any(p.unsharded_accumulated_grad is not None for p in params):
        for p in params:
            if p.unsharded_accumulated_grad is None:
                p.to_accumulated_grad_if_needed()


def follow_requires_grad(group: Group) -> None:
    """Copy ``requires_grad`` from the shards, on which ``toggle_optimizer`` acts, to the gathered parameters."""
    for p in group.fsdp_params:
        if p._unsharded_param.requires_grad != p.sharded_param.requires_grad:
            p._unsharded_param.requires_grad_(p.sharded_param.requires_grad)


def is_gathered(group: Group) -> bool:
    return bool(group.is_unsharded)


def is_resharded(root: nn.Module, groups: list[Group]) -> bool:
    """Whether nothing is gathered, being gathered or recorded, so that neither :func:`reshard` nor
    :func:`forget_forwards` would have an effect."""
    state = _state(root)
    if state._state_ctx.iter_forward_root is not None or state._comm_ctx.post_forward_order:
        return False
    return all(g.is_sharded and g._all_gather_result is None and not g._post_forward_indices for g in groups)


def forget_forwards(root: nn.Module) -> None:
    """Clear the records and gathers for prefetching of forwards without backward; nothing else clears them."""
    state = _state(root)
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    for each in state._state_ctx.all_states:
        each._training_state = type(each._training_state).IDLE
        for module in each._modules:
            for group in groups(module):
                group._post_forward_indices.clear()
                forget_gather(group)  # gathered ahead, never used: its values become outdated


def forget_gather(group: Group) -> None:
    """Drop parameters that were gathered ahead and not used yet."""
    if group._all_gather_result is not None:
        _await_gather(group)
        group._all_gather_result = None
        if group.is_sharded:
            for p in group.fsdp_params:  # gather_in_place fills the parameters themselves
                p.free_unsharded_param()


def registrations(group: Group) -> Iterator[tuple[Tensor, list[tuple[nn.Module, str]]]]:
    """Yield each sharded parameter with every (module, attribute) under which it is registered."""
    for p in group.fsdp_params:
        yield p.sharded_param, _places(p)


def _places(p: ShardedParam) -> list[tuple[nn.Module, str]]:
    info = p._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def undo(module: nn.Module) -> None:
    """Remove ``fully_shard`` from one unit: hooks, class and state. Its parameters stay registered as they are."""
    state = _state(module)
    for group in groups(module):
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
        for p in group.fsdp_params:
            p._post_load_hook_handle.remove()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    if isinstance(module, FSDPModule):
        give_class_back(module)
    for key in STATE_KEYS:
        module.__dict__.pop(key, None)
    _composable_state._module_state_mapping.pop(module, None)


def _state(module: nn.Module) -> Any:
    state = _get_module_fsdp_state(module)
    assert state is not None
    return state
