"""All uses of DeepSpeed's private names, as of 0.19.8; :func:`prepare` checks that :data:`DEEPSPEED` still holds.

DeepSpeed's public accessors (``deepspeed.utils.safe_get_full_fp32_param`` and the like) work on one tensor at a time
and support neither clipping, nor several optimizers, nor Adam's step count. Only :class:`Shards` knows where DeepSpeed
keeps its tensors.

[Tensors]
- *flat*: 1-D, this rank's parts of a group of parameters, concatenated.
- *master*: the flat that is stepped, in fp32; on the CPU with offload.
- *piece*: this rank's part of one parameter, given by its offsets in the flat and in the parameter. Stages 1 and 2 cut
  an entire group into N flats, so a rank may hold nothing of a parameter; stage 3 cuts every parameter into N.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm.direct import all_gather
from lightning_zero.engines.after_run import without_memory
from lightning_zero.engines.base import outside_inference_mode
from lightning_zero.engines.residency import store_changed
from lightning_zero.private.check import Library, check
from lightning_zero.private.torch import (
    DisableTorchFunction,
    EnableTorchFunction,
    in_backward,
    in_transform,
    own_parameters,
    pytree,
    set_data,
)

_ZERO = "deepspeed.runtime.zero"
_TO_RELEASE = "_PartitionedParameterCoordinator__params_to_release"
_REDUCE_BUCKET = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
DEEPSPEED = Library(
    "deepspeed",
    ">=0.19.8,<0.20",
    {
        # starting
        "deepspeed.comm.comm:init_distributed": "dist_backend dist_init_required cdb",
        "deepspeed.comm.torch": "build_shm_op",
        "deepspeed.utils.groups": "_release_process_group_references",
        "deepspeed.accelerator.cpu_accelerator": "CPU_Accelerator",
        f"{_ZERO}.parameter_offload": "_inject_parameters iter_params FWD_MODULE_STACK",
        f"{_ZERO}.partitioned_param_coordinator": "iter_params",
        f"{_ZERO}.stage3": "DeepSpeedCPUAdam",
        "deepspeed.utils": "z3_leaf_module",
        # sharding
        f"{_ZERO}.partition_parameters": "ZeroParamStatus.AVAILABLE free_param",
        f"{_ZERO}.partition_parameters:Init": "param_id config_dict_or_path tensor_overrides"
        " _convert_to_deepspeed_param local_device ds_id ds_numel ds_shape ds_status ds_tensor"
        " ds_active_sub_modules ds_zero_partition_rank ds_secondary_tensor all_gather partition",
        f"{_ZERO}.partition_parameters:_init_external_params": "_external_params all_parameters",
        f"{_ZERO}.linear": "zero3_linear_wrap",
        # one step
        "deepspeed.runtime.engine:DeepSpeedEngine": "_create_module_forward_pre_hook _create_module_forward_post_hook"
        " _broadcast_model allreduce_gradients set_gradient_accumulation_boundary device dp_world_size destroy",
        f"{_ZERO}.parameter_offload:DeepSpeedZeRoOffload": "_register_deepspeed_module partition_all_parameters"
        " get_param_coordinator forward_hooks ds_id ds_inflight_param_registry ds_recompute_parameters destroy",
        f"{_ZERO}.partitioned_param_coordinator:PartitionedParameterCoordinator": f"{_TO_RELEASE} hierarchy"
        " reset_step trace_prologue is_record_trace record_module fetch_sub_module release_sub_module",
        # stages 1 and 2
        f"{_ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer": "_grad_acc_hooks process_gradients backward_epilogue"
        " round_robin_bit16_groups round_robin_bit16_offsets single_partition_of_fp32_groups"
        " parallel_partitioned_bit16_groups bit16_groups bit16_groups_flat averaged_gradients all_grad_tensors"
        " cpu_offload micro_step_id _offload_accumulated_param_ids _wait_for_offload_copies reset_cpu_buffers",
        f"{_ZERO}.stage_1_and_2:GradPartitionBufferGroup": "flat_partition",
        # stage 3
        f"{_ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3": f"{_REDUCE_BUCKET} _grad_acc_hooks backward_epilogue"
        " fp16_groups grad_position fp32_partitioned_groups_flat fp16_partitioned_groups_flat ipg_buckets"
        " micro_step_id parameter_offload get_param_id"
        " _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition reduce_ready_partitions_and_remove_grads"
        " invalidate_secondary_tensor",
    },
)


class Piece(NamedTuple):
    """This rank's part of one parameter."""

    flat: int
    """Index of the flat."""
    start: int
    """Index of the first element in the flat."""
    numel: int
    """Number of elements without padding; may be 0."""
    offset: int
    """Index of the first element in the flattened parameter."""

    def of(self, flat: Tensor) -> Tensor:
        """Returns this piece of ``flat``, 1-D, a view."""
        return flat.detach().narrow(0, self.start, self.numel)


@dataclass(frozen=True)
class Assembly:
    """A function that assembles the full tensor of which ``part``, 1-D, is this rank's piece (collective), even when
    DeepSpeed is gone. The sum over ranks is exact, because each element is non-zero on one rank only."""

    shape: torch.Size
    first: int
    """Index of the first element of ``part`` in the flattened tensor."""
    part: Tensor

    def __call__(self) -> Tensor:
        full = self.part.new_zeros(self.shape.numel())
        self.of(full).copy_(self.part)
        if dist.get_world_size() > 1:
            dist.all_reduce(full)
        return full.view(self.shape)

    def of(self, full: Tensor) -> Tensor:
        """Returns this rank's piece of ``full``, 1-D; a view if ``full`` is contiguous."""
        return full.detach().reshape(-1).narrow(0, self.first, self.part.numel())


# -- starting and ending -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(device: torch.device) -> Iterator[None]:
    """Sets the environment variables that DeepSpeed reads while it starts."""
    before = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    if "LOCAL_WORLD_SIZE" in os.environ:  # the CPU accelerator's number of devices
        os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    try:
        yield
    finally:
        for name in ("DS_ACCELERATOR", "LOCAL_RANK", "LOCAL_SIZE"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def prepare(device: torch.device) -> Any:
    """Imports DeepSpeed for ``device`` on top of the existing process group, and returns the package.

    The patches stay for the life of the process. No patch may change how DeepSpeed works outside this package. The
    exception is the level of its loggers, which users can set again afterwards.
    """
    for name in ("DeepSpeed", "deepspeed"):  # they log a line per parameter group, also in the middle of a run
        logging.getLogger(name).setLevel(logging.WARNING)
    import deepspeed
    from deepspeed import comm

    check(DEEPSPEED)
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    deepspeed.utils.logger.setLevel(logging.WARNING)
    use_accelerator(device)
    _skip_replicated()
    _keep_shapes()
    world = getattr(comm.comm.cdb, "_lightning_zero_world", None)
    if comm.comm.cdb is None or world is not dist.group.WORLD:
        comm.comm.cdb = None  # the old backend belongs to a destroyed process group
        groups._release_process_group_references(group=None)
        # DeepSpeed's shared-memory all-reduce is compiled at its first use, never forgets the first process group, and
        # waits for a missing rank for ever.
        home: Any = import_module("deepspeed.comm.torch")  # the attribute deepspeed.comm.torch is the package torch
        with _instead(home, "build_shm_op", lambda: None):
            comm.init_distributed(dist_backend=get_accelerator().communication_backend_name(), dist_init_required=False)
        comm.comm.cdb._lightning_zero_world = dist.group.WORLD
    return deepspeed


@contextlib.contextmanager
def _instead(home: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of ``home`` inside the context."""
    before = getattr(home, name)
    setattr(home, name, value)
    try:
        yield
    finally:
        setattr(home, name, before)


def _patch(places: Sequence[Any], name: str, make: Callable[[Any], Any]) -> None:
    """Replaces a function, which all ``places`` have under ``name``, by ``make(function)``, once per process."""
    before = getattr(places[0], name)
    if not hasattr(before, "_lightning_zero"):
        after = make(before)
        after._lightning_zero = True
        for place in places:
            setattr(place, name, after)


def use_accelerator(device: torch.device) -> None:
    """Sets DeepSpeed's accelerator, which may be that of an earlier run in this process."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    kind = device.type
    if get_accelerator().device_name() != kind:
        home = import_module(f"deepspeed.accelerator.{kind}_accelerator")
        set_accelerator(getattr(home, f"{kind.upper()}_Accelerator")())


@contextlib.contextmanager
def starting(joined: type, sharded: Iterable[Any]) -> Iterator[None]:
    """Context of ``deepspeed.initialize``, which here leaves out

    - the broadcast of rank 0's parameters, which ranks have already: it fails on 0-dim ones;
    - hooks of the root, which time the forward and find parameters used outside of their module, as residency does;
    - stage 3's hooks of modules, which :class:`ModuleHooks` replaces, and its dictionaries of parameters;
    - the check for DeepSpeed's own CPU Adam if ``offload.ratio`` is below 1. DeepSpeed would step some masters on the
      device itself, but here users' own optimizers step all masters. ``joined`` is the optimizer that DeepSpeed gets.

    Stage 3 formats all parameters as text, so inside the context those that are ``sharded`` already are really empty.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import parameter_offload, stage3

    with contextlib.ExitStack() as stack:
        for home, name, value in (
            (DeepSpeedEngine, "_broadcast_model", lambda self: None),
            (DeepSpeedEngine, "_create_module_forward_pre_hook", lambda self: None),
            (DeepSpeedEngine, "_create_module_forward_post_hook", lambda self: None),
            (parameter_offload.DeepSpeedZeRoOffload, "_register_deepspeed_module", lambda self, module: None),
            (parameter_offload, "_inject_parameters", lambda module, cls: None),
            (stage3, "DeepSpeedCPUAdam", joined),
        ):
            stack.enter_context(_instead(home, name, value))
        for p in sharded:
            set_data(p, torch.empty(0, dtype=p.dtype, device=p.device))
            stack.callback(free, p)
        yield


def _skip_replicated() -> None:
    """Makes stage 3 skip parameters that it does not shard; DeepSpeed alone would fail on them."""
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    def make(every: Callable[..., Iterable[Any]]) -> Any:
        return lambda module, recurse=False: (p for p in every(module, recurse=recurse) if is_managed(p))

    _patch([parameter_offload, partitioned_param_coordinator], "iter_params", make)


def watch(p: Any, before_free: Callable[[Any], None]) -> None:
    """Has ``before_free`` called with ``p`` before stage 3 frees the memory of ``p``; ``p`` then keeps its shape."""
    p.ds_before_free = before_free


def _keep_shapes() -> None:
    """Patches how stage 3 frees parameters given to :func:`watch`; others get the shape (0,), as before."""
    from deepspeed.runtime.zero import partition_parameters as home

    def make(free_as_before: Callable[[Any], None]) -> Any:
        def free_param(param: Any) -> None:
            with DisableTorchFunction(), torch.no_grad():
                if (before_free := getattr(param, "ds_before_free", None)) is None:
                    free_as_before(param)
                    return
                before_free(param)
                free_as_before(param)
                if not hasattr(param, "ds_freed"):
                    like = torch.empty(param.ds_shape, dtype=param.dtype, device="meta")
                    param.ds_freed = without_memory(like, param.device)
                free(param)

        return free_param

    _patch([home], "free_param", make)


def free(p: Any) -> None:
    """Frees the memory of a stage-3 parameter, which keeps its shape."""
    set_data(p, p.ds_freed)


# -- sharding ------------------------------------------------------------------------------------------------------


def sharder(config: dict[str, Any]) -> Callable[[list[nn.Parameter]], None]:
    """Returns a function that shards full parameters on the device, which are the same on all ranks (collective)."""
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0  # so that ranks number parameters alike whatever ran in their processes before
    init = Init(config_dict_or_path=copy.deepcopy(config), tensor_overrides=())

    def shard(params: list[nn.Parameter]) -> None:
        with DisableTorchFunction(), marking(params):
            for p in params:
                init._convert_to_deepspeed_param(p)
                p.partition()  # type: ignore[attr-defined]

    return shard


ON_MODULES = frozenset(
    "_external_params all_parameters ds_external_parameters ds_id ds_recompute_parameters ds_inflight_param_registry"
    " ds_model_granularity _z3_leaf".split()
)
"""Names of the attributes that modules get from DeepSpeed and from this file."""
_ON_PARAMETERS = set("__reduce_ex__ ds_before_free ds_freed ds_in_flight ds_z3_leaf_module".split())


@contextlib.contextmanager
def marking(params: Iterable[Any]) -> Iterator[None]:
    """Takes all attributes that ``params`` get inside the context as DeepSpeed's, on any parameter."""
    before = {p: set(vars(p)) for p in params}
    yield
    for p, names in before.items():
        _ON_PARAMETERS.update(vars(p).keys() - names)


def attributes(p: Any) -> dict[str, Any]:
    """Returns the attributes that user code has set on ``p``."""
    return {name: value for name, value in vars(p).items() if name not in _ON_PARAMETERS}


def pickle_plainly(params: Iterable[Any]) -> None:
    """Has ``torch.save`` write the values and the user's attributes of ``params``, without DeepSpeed's buffer."""

    def reduced(p: Any, protocol: Any) -> Any:
        plain = nn.Parameter(p.data.clone(), p.requires_grad)
        vars(plain).update(attributes(p))
        return plain.__reduce_ex__(protocol)

    for p in params:
        p.__reduce_ex__ = partial(reduced, p)


# -- one backward --------------------------------------------------------------------------------------------------


def backward(engine: Any, run_backward: Callable[[], None], before_end: Callable[[], None]) -> None:
    """Does ``engine.backward(loss)`` with ``run_backward`` in place of its ``loss.backward()``.

    ``before_end`` runs after all gradients have arrived and before the last buckets are reduced.
    """
    with EnableTorchFunction():  # user code in it may touch resharded parameters
        run_backward()
    before_end()
    engine.allreduce_gradients()
    engine.optimizer.backward_epilogue()


def take_gradients(
    engine: Any, params: Iterable[nn.Parameter], arrives: Callable[[Any], None]
) -> Callable[[Any], None]:
    """Has ``arrives(p)`` called for each gradient of ``params`` in place of DeepSpeed's own hooks.

    The returned function puts the gradient of ``p`` into a bucket, if this backward reduces."""
    zero = engine.optimizer
    for hook in zero._grad_acc_hooks:
        hook.remove()
    arrived = _plainly(arrives)
    zero._grad_acc_hooks = [p.register_post_accumulate_grad_hook(arrived) for p in params]  # DeepSpeed removes them
    if not hasattr(zero, "process_gradients"):
        return zero.reduce_ready_partitions_and_remove_grads  # type: ignore[no-any-return]
    groups = {p: i for i, group in enumerate(zero.bit16_groups) for p in group}
    return lambda p: zero.process_gradients(p, groups[p])


def before_buckets(engine: Any, action: Callable[[Sequence[Any]], None]) -> None:
    """Calls ``action`` with the parameters whose gradients stage 3 is about to reduce together, in the order of the
    message: by number or, with ``reduce_scatter=False``, as they came."""
    zero = engine.optimizer
    original = getattr(zero, _REDUCE_BUCKET)

    def reduce(dtype: torch.dtype) -> Any:
        if params := zero.ipg_buckets[dtype].params:
            action(sorted(params, key=lambda p: p.ds_id) if zero.reduce_scatter else params)
        return original(dtype)

    setattr(zero, _REDUCE_BUCKET, reduce)


# -- locations of tensors ------------------------------------------------------------------------------------------


class Shards(ABC):
    """Reads and writes this rank's piece of every parameter that DeepSpeed steps, of its gradient and its master.

    Args:
        engine: From ``deepspeed.initialize``.

    Attributes:
        pieces: Parameter -> its piece.
        masters: The flats that optimizers step, 1-D.
        weights: The flats that the module computes with, 1-D.
        grads: The buffers that hold gradients on this rank, 1-D.
        with_grad: Parameters that have a gradient; alike on all ranks.
    """

    masters: list[Any]
    weights: list[Tensor]
    grads: dict[int, Tensor]

    def __init__(self, engine: Any) -> None:
        self.engine, self.zero = engine, engine.optimizer
        self.pieces: dict[Tensor, Piece] = {}
        self.with_grad: set[Tensor] = set()
        self._find_pieces()

    def __contains__(self, p: Any) -> bool:
        return p in self.pieces

    def assembly(self, p: Tensor, local: Tensor) -> Assembly:
        """Returns the function that assembles the full tensor of which ``local`` is this rank's piece."""
        return Assembly(p.shape, self.pieces[p].offset, local)

    def cut(self, p: Tensor, full: Tensor) -> Tensor:
        """Returns this rank's piece of ``full``, a tensor of the full shape of ``p``, 1-D; a view if ``full`` is
        contiguous."""
        piece = self.pieces[p]
        return full.detach().reshape(-1).narrow(0, piece.offset, piece.numel)

    def master(self, p: Tensor) -> Tensor:
        """Returns this rank's piece of the master of ``p``, 1-D."""
        piece = self.pieces[p]
        return piece.of(self.masters[piece.flat])

    @abstractmethod
    def _find_pieces(self) -> None: ...

    @abstractmethod
    def grad(self, p: Tensor) -> Tensor:
        """Returns this rank's piece of the averaged gradient, 1-D, to be read and written in place."""

    @abstractmethod
    def before_backward(self) -> None:
        """Clears all gradients except those of :attr:`with_grad`, to which the backward adds."""

    def before_reductions(self) -> None:  # noqa: B027
        """Prepares a backward that reduces its gradients."""

    def after_reductions(self) -> None:  # noqa: B027
        """Takes over the reduced gradients."""

    def publish(self, params: Iterable[Tensor]) -> None:
        """Copies the masters' values of ``params`` to the module (collective)."""
        flats = sorted({self.pieces[p].flat for p in params})
        for i in flats:
            self.weights[i].copy_(self.masters[i])
        self._spread(flats)

    @abstractmethod
    def _spread(self, flats: list[int]) -> None:
        """Makes modules compute with the new ``weights``."""

    def adopt(self, p: Tensor) -> None:
        """Copies the module's values of ``p`` to the master, after user code wrote to the parameter."""
        piece = self.pieces[p]
        store_changed(piece.of(self.weights[piece.flat]), self.master(p))


class Shards12(Shards):
    """Stages 1 and 2: parameters are full, views of one buffer per group; gradients and masters are sharded."""

    def _find_pieces(self) -> None:
        zero = self.zero
        self.masters, self.grads = zero.single_partition_of_fp32_groups, {}
        self.weights = [parts[dist.get_rank()] for parts in zero.parallel_partitioned_bit16_groups]
        for i, group in enumerate(zero.round_robin_bit16_groups):
            size = self.masters[i].numel()
            first = size * dist.get_rank()
            for p, begin in zip(group, zero.round_robin_bit16_offsets[i], strict=True):
                start = min(max(begin, first), first + size)
                stop = min(max(begin + p.numel(), first), first + size)
                self.pieces[p] = Piece(i, start - first, stop - start, start - begin if stop > start else 0)

    def grad(self, p: Tensor) -> Tensor:
        piece = self.pieces[p]
        if piece.flat not in self.grads:
            self.grads[piece.flat] = torch.zeros_like(self.masters[piece.flat])
        return piece.of(self.grads[piece.flat])

    def before_backward(self) -> None:
        needed = {self.pieces[p].flat for p in self.with_grad}
        self.grads = {i: grads for i, grads in self.grads.items() if i in needed}
        for p, piece in self.pieces.items():
            if piece.flat in self.grads and p not in self.with_grad:
                piece.of(self.grads[piece.flat]).zero_()

    def before_reductions(self) -> None:
        """Clears the offload buffers (one per flat): DeepSpeed writes only what it reduces, and leaves old values."""
        if not self.zero.cpu_offload:
            return
        for i, flat in enumerate(self.masters):
            if i in self.grads and self.grads[i].data_ptr() == flat.grad.data_ptr():
                self.grads[i] = flat.grad.clone()
            flat.grad.zero_()

    def after_reductions(self) -> None:
        zero = self.zero
        if zero.cpu_offload:
            zero._wait_for_offload_copies()
        for i in range(len(zero.bit16_groups)):
            new = self._take(i)
            self.grads[i] = new.add_(self.grads[i]) if i in self.grads else new
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()
        zero.micro_step_id = -1  # the next backward begins a new window

    def _take(self, i: int) -> Tensor:
        zero = self.zero
        if zero.cpu_offload:
            flat = self.masters[i].grad
        else:
            averaged = zero.averaged_gradients[i]
            flat = getattr(averaged, "flat_partition", None)
            if flat is None:
                flat = torch.cat([t.reshape(-1) for t in averaged])
        zero.averaged_gradients[i] = None
        zero.all_grad_tensors[i] = None
        return flat

    def _spread(self, flats: list[int]) -> None:
        for i in flats:
            all_gather(self.zero.bit16_groups_flat[i], self.weights[i], _world()).wait()


class Shards3(Shards):
    """Stage 3: every parameter is cut into N equal parts, the last ones padded."""

    def _find_pieces(self) -> None:
        self.masters, self.weights = self.zero.fp32_partitioned_groups_flat, self.zero.fp16_partitioned_groups_flat
        self.grads = self.zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for i, group in enumerate(self.zero.fp16_groups):
            for p in group:
                _, start, each = self.zero.grad_position[self.zero.get_param_id(p)]
                offset = min(p.ds_zero_partition_rank * each, p.ds_numel)
                self.pieces[p] = Piece(i, start, min(each, p.ds_numel - offset), offset)
        self.zero.micro_step_id = 1  # not 0, so that DeepSpeed adds to the gradients instead of replacing them

    def grad(self, p: Tensor) -> Tensor:
        return self.grads[p.ds_id].narrow(0, 0, self.pieces[p].numel)  # type: ignore[attr-defined]

    def before_backward(self) -> None:
        fresh = [self.grads[p.ds_id] for p in self.pieces if p not in self.with_grad]  # type: ignore[attr-defined]
        if fresh:
            torch._foreach_zero_(fresh)

    def _spread(self, flats: list[int]) -> None:
        self.zero.invalidate_secondary_tensor()


def _world() -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.group.WORLD)


@outside_inference_mode()
def gathered_copy(p: Any) -> Tensor:
    """Returns a copy of the full parameter (at stage 3 collective): of the shards, as DeepSpeed's gather may round."""
    land(p)
    if not is_partitioned(p):
        return p.detach().clone()
    mine = p.ds_tensor.detach().to(p.device)
    full = mine.new_empty(mine.numel() * _world().size())
    all_gather(full, mine, _world()).wait()
    # Not `full` itself: gloo's thread holds it a moment longer, so user code would seem to hold views of it.
    return full[: p.ds_numel].clone().view(p.ds_shape)


def leave_shard(p: Any) -> None:
    """Gives a gathered parameter memory of its own: with one rank DeepSpeed makes it an alias of its shard, which user
    code would write to through views."""
    with DisableTorchFunction(), torch.no_grad(), outside_inference_mode():
        shard = cut_of(p)
        if shard is not None and p.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
            set_data(p, p.detach().clone())


def assembly(p: Any) -> Assembly:
    """Returns the function that assembles a stage-3 parameter from its shards."""
    shard = p.ds_tensor
    first = min(shard.ds_numel * p.ds_zero_partition_rank, p.ds_numel)
    return Assembly(p.ds_shape, first, shard.detach().narrow(0, 0, min(shard.ds_numel, p.ds_numel - first)))


def store_part(p: Any) -> None:
    """Copies this rank's part of the full values in ``p`` to its shard of the stage-3 parameter."""
    mine = assembly(p)
    mine.part.copy_(mine.of(p))
    p.ds_secondary_tensor = None


def is_managed(p: Any) -> bool:
    """Whether stage 3 shards this parameter."""
    return hasattr(p, "ds_id")


def cut_of(p: Any) -> Tensor | None:
    """Returns this rank's shard of a stage-3 parameter, 1-D, padded; ``None`` for others."""
    return getattr(p, "ds_tensor", None)


def is_partitioned(p: Any) -> bool:
    """Whether ``p`` is a stage-3 parameter that is resharded or still being gathered."""
    status = getattr(p, "ds_status", None)
    return status is not None and status.name != "AVAILABLE"


def is_ahead(p: Any) -> bool:
    """Whether ``p`` was gathered ahead for a module that has not run yet.

    ``p`` may be full already, because parameters gathered together are waited for together. DeepSpeed releases ``p`` if
    the module never runs."""
    ahead: Any = getattr(p, "ds_in_flight", ())
    return len(ahead) > 0 and p in ahead


def linear_without_weights() -> AbstractContextManager[None]:
    """Sets DeepSpeed's ``torch.nn.functional.linear`` inside the context: graphs then hold no full weights.

    ``memory_efficient_linear`` would set it for good, and it fails on weights that other engines have sharded."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    return _instead(nn.functional, "linear", zero3_linear_wrap)


def land(p: Any) -> None:
    """Waits for ``p`` if it was gathered ahead."""
    if is_ahead(p):
        p.ds_in_flight.pop(p).wait()


class ModuleHooks:
    """Gathers each module's parameters for its forward and its backward at stage 3, in place of DeepSpeed's own hooks.

    DeepSpeed's hooks copy lists among inputs and outputs, pass aliases of inputs whose gradients are wrong after an
    in-place change, and fail on outputs of unknown types. Only its coordinator is used, which gathers, gathers ahead in
    the recorded order, and releases.

    Args:
        engine: From ``deepspeed.initialize``.
        root: The module that was passed to ``deepspeed.initialize``.
        rests: Whether modules run without being gathered.
        begins: Called with each module before its forward.
    """

    def __init__(
        self, engine: Any, root: nn.Module, rests: Callable[[], bool], begins: Callable[[nn.Module], None]
    ) -> None:
        offload = _offload(engine)
        self._coordinator = offload.get_param_coordinator()
        self._rests, self._begins, self._is_alone = rests, begins, engine.dp_world_size == 1
        self._in_backward: set[nn.Module] = set()
        # Parameters gathered ahead are not ready until their module waits for them, and that module never runs if a
        # step ends early. User code's reads and writes must wait as well.
        for p in filter(is_managed, root.parameters()):
            p.ds_in_flight = root.ds_inflight_param_registry  # type: ignore[attr-defined]
        for number, module in enumerate(dict.fromkeys(_gathered_modules(root))):
            module.ds_id, module.ds_recompute_parameters = number, set()  # type: ignore[assignment]
            offload.forward_hooks += [  # which DeepSpeed removes
                module.register_forward_pre_hook(partial(self._before_forward, module)),
                module.register_forward_hook(partial(self._after_forward, module)),
            ]
        reset = _plainly(self._coordinator.reset_step)

        def reset_step() -> None:  # at the start of a pass: waits for gathers ahead for modules that never ran
            self._in_backward.clear()
            with environment(engine.device):  # ranks compare their orders on the device that LOCAL_RANK names
                reset()

        self._coordinator.reset_step = reset_step

    def _gather(self, module: nn.Module, forward: bool) -> None:
        self._coordinator.trace_prologue(module)
        if self._coordinator.is_record_trace():
            self._coordinator.record_module(module)
        self._coordinator.fetch_sub_module(module, forward=forward)
        for p in own_parameters(module).values() if self._is_alone else ():
            leave_shard(p)

    def _before_forward(self, module: nn.Module, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._begins(module)
        if not self._rests():
            _plainly(self._gather)(module, forward=True)
        # Views, because the gradient of an input itself is complete only after the backward of all that use it. An
        # input that is given twice stays one object, which attention asks for.
        views = {id(each): each.view_as(each) for each in args if _gets_gradient(each)}
        after_all = _after_all(len(views), partial(self._after_backward, module))
        for view in views.values():
            view.register_hook(after_all)
        return tuple(views.get(id(each), each) for each in args)

    def _after_forward(self, module: nn.Module, _: nn.Module, args: Any, output: Any) -> None:
        # Parameters gathered for a recomputation stay gathered for their module's backward, which follows.
        if not in_backward() and not self._rests():
            _plainly(self._coordinator.release_sub_module)(module, forward=True)
        for each in pytree.tree_leaves(output) if torch.is_grad_enabled() and not in_transform() else ():
            if isinstance(each, Tensor) and each.grad_fn is not None:
                each.register_hook(partial(self._before_backward, module))

    def _before_backward(self, module: nn.Module, grad: Tensor) -> None:
        if not self._rests():
            self._in_backward.add(module)
            _plainly(self._gather)(module, forward=False)

    def _after_backward(self, module: nn.Module) -> None:
        if module in self._in_backward and not self._rests():
            self._in_backward.discard(module)
            _plainly(self._coordinator.release_sub_module)(module, forward=False)


def _after_all(num: int, action: Callable[[], None]) -> Callable[[Tensor], None]:
    """Makes a hook of ``num`` tensors that calls ``action`` when all their gradients have arrived.

    Not ``register_multi_grad_hook``: its hooks refer to the nodes that hold them, so that each pass would leak."""
    numbers = itertools.count(1)  # goes on, because a retained graph may be gone through again

    def hook(grad: Tensor) -> None:
        if next(numbers) % num == 0:
            action()

    return hook


def _plainly(method: Callable[..., None]) -> Callable[..., None]:
    """Runs DeepSpeed's ``method`` without residency's interception."""

    def call(*args: Any, **kwargs: Any) -> None:
        with DisableTorchFunction(), outside_inference_mode():
            method(*args, **kwargs)

    return call


def _gathered_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that are gathered one by one: those with sharded parameters of their own, but of a
    ``leaf_module`` of the config only itself."""
    from deepspeed.utils import z3_leaf_module

    is_leaf = z3_leaf_module(module)
    if is_leaf or any(map(is_managed, own_parameters(module).values())):
        yield module
    if is_leaf:
        for p in module.parameters():
            p.ds_z3_leaf_module = module  # type: ignore[attr-defined]
        return
    for child in module.children():
        yield from _gathered_modules(child)


def _gets_gradient(value: Any) -> bool:
    is_input = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.layout == torch.strided
    return is_input and value.requires_grad and torch.is_grad_enabled() and not in_transform()


@outside_inference_mode()
def keep(p: Any) -> None:
    """Unshards a stage-3 parameter until all parameters are released, after the step."""
    land(p)
    p.ds_active_sub_modules.add(-1)  # -1 is no module's number, so no module releases p
    p.all_gather()
    leave_shard(p)


def release_all(engine: Any) -> None:
    """Reshards all parameters, so that every rank holds only its shards."""
    _offload(engine).partition_all_parameters()


def _offload(engine: Any) -> Any:
    """Returns the object that gathers and releases at stage 3; without optimizers it is in ``engine.optimizer``."""
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer)


def end(engine: Any, root: nn.Module, failed: bool) -> None:
    """Removes DeepSpeed's hooks and its attributes on modules and parameters.

    Args:
        engine: From ``deepspeed.initialize``; ``None`` if that was never called.
        root: The module that was passed to ``deepspeed.initialize``.
        failed: Whether the run failed. The device may then wait for ranks that are gone, so nothing waits for it.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    if engine is not None:
        if failed:
            for hook in getattr(engine.optimizer, "_grad_acc_hooks", ()):
                hook.remove()
            if hasattr(offload := _offload(engine), "partition_all_parameters"):
                offload.destroy()
        else:
            engine.destroy()
    FWD_MODULE_STACK.clear()
    released = getattr(PartitionedParameterCoordinator, _TO_RELEASE)
    inspect.getclosurevars(released).nonlocals["func"].cache_clear()  # a cache by module, which keeps modules alive
    for module in root.modules():
        for name in ON_MODULES | {"__reduce_ex__"}:  # the latter is set by plain_copies
            vars(module).pop(name, None)
    for p in root.parameters():
        for name in _ON_PARAMETERS:
            vars(p).pop(name, None)
