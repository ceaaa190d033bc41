"""ZeRO on PyTorch's own ``torch.distributed.fsdp.fully_shard``.

[Tensors]
- *the user's parameter*: the ``nn.Parameter`` that the user made; always on its module and in optimizers. Inside a
  step it is the *gathered parameter*, plain and unsharded. Between steps it is resharded and empty; user code that
  touches it gets it gathered again (see ``residency``).
- *sharded parameter*: a ``DTensor``, authoritative between steps; optimizers hold its local tensor during a step.
  Each rank owns ``ceil(rows / N)`` rows of dim 0.
- *shard axis*: the N ranks over which one copy is sharded: all ranks, or with ``shard_size`` (HSDP) groups of that
  many consecutive ranks. The groups are replicas of each other along the *replicate axis*: gradients are
  reduce-scattered along the shard axis and all-reduced along the replicate axis.
- *replicated parameter*: always plain and full on every rank, because it cannot be sharded (see ``units``).
- *host shard*: with ``offload="cpu"`` the sharded parameters (the master weights), their gradients and the optimizer's
  states are in host memory, pinned on an accelerator, and the optimizer steps there. The device holds the gathered
  parameters inside a step, stage 1's unsharded gradients until the last micro-batch, and the replicated parameters,
  which are small and would each need a copy of their own. With ``offload="nvme"`` the sharded parameters and the
  states are in the memory of mapped files, not pinned (see ``files``).

[Plan of one optimizer step, A micro-batches]

    stage   gather             reduce (gradients)     gathered parameters are dropped
    1       once               after the last one     after the last backward
    2       once               after each             after the last backward
    3       forward, backward  after each             after each use (the root unit's: after each backward)

At stage 3 the unit that ran last in the previous forward stays gathered until the backward, which starts with that
unit: dropping it would mean gathering it again at once.

With host shards each gather begins with a copy to the device, on the stream that gathers ahead of the compute. Each
reduction ends with a copy to host memory, which only the end of the backward waits for. Norms of gradients are
combined in host memory, over the gloo half of the process group.

Between micro-batches, stages 1 and 2 keep units gathered only if no user hook reads the module there
(``keep_gathered``).

This is the path of an accelerator, and of the CPU with ``transport="torch"``: collectives, streams and schedule are
``fully_shard``'s own. Whatever else processes on CPUs do is done by calls of ``self._transport`` (see ``cpu``).

[Parity with DDP, added to ``fully_shard``]
- *Unused parameters.* A rank that lacks a gradient which another rank has would send a shorter message. Every reduction
  therefore covers all trainable parameters of its unit, with zeros for missing gradients. Afterwards the ranks agree
  (one small all-reduce) which parameters no rank used, and their gradients become ``None`` again.
- *Units that only some ranks ran.* All ranks must run the same units in the same order. One agreement per forward
  raises an error instead of mixing up gathers (see ``order``).
- *Late gradients.* A parameter used outside its unit's forward (a penalty over ``parameters()``) receives its gradient
  after its unit was reduced; a second reduction adds that gradient.
- *Rank 0's values.* Parameters and buffers are broadcast before sharding, buffers again at each synchronized forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.comm.shards import finish_copies, gathered, local, to_host
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.after_run import entries, leave_states
from lightning_zero.engines.base import Engine, undetached_state_dict
from lightning_zero.engines.forwards import Forwards
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.assigned import AssignedGradients
from lightning_zero.engines.fsdp2.cpu import Direct
from lightning_zero.engines.fsdp2.files import FileShards
from lightning_zero.engines.fsdp2.identity import Identity
from lightning_zero.engines.fsdp2.parts import Rows
from lightning_zero.engines.fsdp2.sharding import (
    Marks,
    Sharded,
    ShardPlan,
    before_owner,
    make_mesh,
    offload_policy,
    plan_shards,
    root_owners,
    shard_units,
)
from lightning_zero.engines.fsdp2.store import Fsdp2Store
from lightning_zero.engines.fsdp2.transport import Transport
from lightning_zero.engines.fsdp2.usage import LastUnit, Usage
from lightning_zero.engines.fsdp2.writes import Writes
from lightning_zero.engines.graphs import untraced
from lightning_zero.engines.model_state import ModelState, place_of, states_of
from lightning_zero.engines.optimizer_step import ShardedStep
from lightning_zero.engines.plain_copies import PlainCopies
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.refusals import (
    refuse_held_views,
    refuse_script_modules,
    refuse_sparse_gradients,
    refuse_tracing,
    refuse_transforms,
)
from lightning_zero.engines.residency import Views
from lightning_zero.private.torch import DisableTorchFunction, DisableTorchFunctionSubclass, outside_modes


class Phase(Enum):
    """The engine's current activity, which decides what the engine's hooks on the module do.

    One phase at a time; when a nested phase ends, the enclosing one resumes.
    """

    BETWEEN = auto()
    """Parameters are resharded. Touching one gathers it; hooks gather nothing, even in a forward by user code."""
    STEP = auto()
    """Inside :meth:`Fsdp2Engine.run`: gathered units stay gathered as long as the plan says."""
    BACKWARD = auto()
    """Units run in autograd's order; their gradients are reduced as they become complete."""
    DUMP = auto()
    """``state_dict`` returns the shards themselves, whereas user code would get full tensors."""


class Fsdp2Engine(Engine):
    """See the module docstring for the plan and :class:`~lightning_zero.engines.base.Engine` for the contract."""

    def __init__(self, config: ZeroConfig, device: torch.device, dtypes: DtypePolicy) -> None:
        super().__init__(config, device, dtypes)
        self._on_host = isinstance(offload_policy(config, device), CPUOffloadPolicy)
        if self._on_host:
            self.shards_device = torch.device("cpu")
        self._phase = Phase.BETWEEN
        self._marks = Marks()
        self._reduced: set[int] = set()  # groups that autograd's own schedule reduced in this backward, by id
        self._last = LastUnit()
        self._handles: list[Any] = []
        self._is_accumulating = False  # current gradients wait for those of later micro-batches

    # -- sharding ------------------------------------------------------------------------------------------------

    def shard(self, module: nn.Module) -> None:
        plan = self._plan(module)
        self._sharded = self._shard(plan)
        self._begin_residency(self._sharded)
        self._register_hooks(self._sharded)
        self._usage = Usage(self._transport, self._sharded.parameters, self._sharded.names)

    def _plan(self, module: nn.Module) -> ShardPlan:
        """Plan the shards and refuse what cannot be sharded; ``module`` stays unchanged."""
        refuse_script_modules(module)
        with DisableTorchFunctionSubclass():  # inspecting memory must not open what an earlier run left sharded
            refuse_held_views(module, self.device)
        self.module, self.mesh = module, make_mesh(self.config, self.device)
        plan = plan_shards(module, self.mesh, self.config, self.dtypes, self.device)
        self._forwards = Forwards(
            *(self.config.activation_checkpointing, self.config.compile, module, plan.blocks, self.device),
            before=self._before_recomputation,
        )
        self._transport = choose_transport(self.config, self.device, self.mesh)
        return plan

    def _shard(self, plan: ShardPlan) -> Sharded:
        """Shard the parameters (collective)."""
        self._copies = PlainCopies(plan.module, private.STATE_KEYS.__contains__)  # now, while all hooks are user hooks
        self._files = FileShards(self.offload_path) if self.offload_path is not None else None
        sharded = shard_units(plan, self._transport, self._files)
        self.units, self.root, self.peer_memory = sharded.units, sharded.root, self._transport.peer_memory
        self.total_bytes = sum(p.numel() * p.element_size() for p in sharded.originals)
        self._unit_of = sharded.unit_of
        self._groups, self._root_groups = [*self._unit_of], private.groups(sharded.root)
        self._identity = Identity(self._groups, sharded.originals)
        self.shards: Mapping[Tensor, DTensor] = self._identity.shards
        return sharded

    def _begin_residency(self, sharded: Sharded) -> None:
        """Set up the objects that gather parameters, gradients and states when user code touches them."""
        in_backward, accumulates = lambda: self._phase is Phase.BACKWARD, lambda: self._is_accumulating
        self._assigned = AssignedGradients(self.config.stage, accumulates, in_backward)
        names = {id(p): name for name, p in self.module.named_parameters()}
        self._views = Views(names, self.refill if self.config.stage == 3 else None)
        self._writes = Writes(self._groups, self._views, self.shards_change, self.shards_have_changed)
        self._store = Fsdp2Store(
            self._identity.own, self._groups, self._assigned, self._writes, self._views, names, self
        )
        self.reside(self._store, lambda: self._phase is Phase.BETWEEN)
        self._assigned.residency = self.residency

    def _register_hooks(self, sharded: Sharded) -> None:
        """Register every engine hook: on groups of ``fully_shard``, units, modules, torch.func, copies and graphs."""
        for key, group in enumerate(self._groups):
            hooks = private.GroupHooks(
                before_unshard=partial(self._before_unshard, key),
                before_reshard=partial(self._before_reshard, key),
                before_backward=self._before_backward,
                before_reduce=self._before_reduce,
            )
            private.hook_group(group, hooks, is_root=group in self._root_groups)
        for index, unit in enumerate(sharded.units):
            private.hook_unit(unit, self._is_in_step)
            if unit is not sharded.root:
                before_unit = untraced(partial(self._before_unit, index))
                self._handles.append(unit.register_forward_pre_hook(before_unit, prepend=True))
        gather_root = before_owner(self._marks, self._gather_root)
        for owner in root_owners(sharded.root):
            self._handles.append(owner.register_forward_pre_hook(gather_root, prepend=True))
        self._copies.begin()
        self._forwards.begin()

    # -- what user code touches ----------------------------------------------------------------------------------

    def _before_unshard(self, key: int, group: private.Group) -> None:
        self.residency.close(key)  # user code may have opened the memory into which the group is gathered

    def _before_reshard(self, key: int, group: private.Group) -> None:
        self._writes.dropped(key, group)

    def touches(self, key: int) -> None:
        if self._is_in_step():
            self._transport.touches(key, self._phase is Phase.BACKWARD)

    def shards_change(self) -> None:
        self._transport.await_readers()

    def shards_have_changed(self) -> None:
        if self.device.type != "cpu":
            private.gather_after_this(self.root)

    def bring(self, group: private.Group) -> None:
        private.gather_now(group)
        private.pin(group)
        private.follow_requires_grad(group)

    def refill(self, p: Tensor) -> None:
        """Gather the unit of ``p``, if needed, before the backward of an operator that used ``p``."""
        group = self._identity.group_of[id(p)]
        private.gather_now(group)
        if torch.is_grad_enabled():  # the backward has a graph of its own, whose backward no hook precedes
            private.pin(group)

    def _before_recomputation(self, module: nn.Module) -> None:
        """Gather what ``module`` computes with when it runs in the backward; its inner units have their own hooks."""
        if self._is_in_step():
            inner = {*module.modules()} - {module}
            found = dict.fromkeys(self._identity.group_of.get(id(p)) for p in module.parameters())
            for group in found:
                if group is not None and self.units[self._unit_of[group]] not in inner:
                    with outside_modes():  # the mode of selective recomputation counts operators
                        private.gather_now(group)

    def _is_in_step(self) -> bool:
        return self._phase in (Phase.STEP, Phase.BACKWARD)

    @property
    def known_parameters(self) -> Collection[Tensor]:
        return {*self._identity.shards, *self._sharded.replicated}

    def attach(self, optimizers: list[Optimizer], trainer: Any) -> None:
        if optimizers:
            refuse_sparse_gradients(self.module)
        self.optimizers = optimizers
        for optimizer in optimizers:
            self.step_of(optimizer)  # shards the states that already exist
            if type(optimizer).zero_grad is Optimizer.zero_grad:
                optimizer.zero_grad = partial(self._zero_grad, optimizer)  # type: ignore[method-assign]

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """``Optimizer.zero_grad`` without a look at each gradient, for which user code would get a full tensor."""
        if not set_to_none:
            return Optimizer.zero_grad(optimizer, set_to_none)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p in self._identity.shards:
                self._store.assign_grad(p, None)
            else:
                with DisableTorchFunction():
                    p.grad = None
        return None

    # -- forward -------------------------------------------------------------------------------------------------

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        before = self._phase
        self._begin(phase)
        try:
            yield
        finally:
            self._begin(before)

    def _begin(self, phase: Phase) -> None:
        self._phase = phase
        in_step = self.automatic and phase in (Phase.STEP, Phase.BACKWARD)  # the root's hooks have gathered the root
        self._marks.root_is_full = in_step

    def _before_unit(self, index: int, *unused: Any) -> None:
        if not self._is_in_step():
            return
        unit = self.units[index]  # not the hook's module argument: a shallow copy of a unit shares the unit's hooks
        refuse_tracing()
        if not private.KNOWS_TRANSFORMS:
            refuse_transforms("fully_shard of torch below 2.13", "torch>=2.13, units=[]")
        self.residency.end_window()
        if self._phase is Phase.STEP:
            self._transport.unit_begins(index)
        if not self.automatic:
            if self._phase is Phase.STEP:
                private.begin_forward(self.root)
            for group in private.groups(unit):
                private.follow_requires_grad(group)
        if self._phase is Phase.STEP and torch.is_grad_enabled():
            self._last.ran = unit
        if torch.is_inference_mode_enabled():  # storage made here could never be trained on
            with torch.inference_mode(False):
                private.unshard(unit)

    def _gather_root(self) -> None:
        if not self._is_in_step():
            return
        refuse_tracing()
        for group in self._root_groups:
            if not private.is_gathered(group):
                self.residency.end_window()
                with torch.inference_mode(False):
                    private.unshard(self.root)
            elif not self.automatic:
                private.follow_requires_grad(group)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        wants_grad = torch.is_grad_enabled()
        self.end_window(self.hooks.before_forward and wants_grad)
        if not wants_grad and not self.residency.all_run():
            return getattr(self.module, method)(*args, **kwargs)  # this rank's loop is longer: others serve its reads
        with DisableTorchFunction():
            self.broadcast_buffers()
        self._transport.run_begins()
        with self._in(Phase.STEP), torch.inference_mode(False), torch.set_grad_enabled(wants_grad):
            if not self.automatic and wants_grad:
                # Units and the root are gathered on use: toggle_optimizer changes requires_grad before that.
                output = getattr(self.module, method)(*args, **kwargs)
            else:
                output = self.root(method, *args, **kwargs)
            self.residency.end_window()
            self._transport.forward_ends()
        if self.config.stage == 3 and self.automatic and wants_grad:
            self._last.keep_until_backward()
        if not torch.is_grad_enabled() or output is None or not self.automatic:
            self.reshard()
        return output

    def reshard(self) -> None:
        self._drop_gathered()
        self._transport.await_readers()  # from here on user code may write to shards

    def _drop_gathered(self) -> None:
        if private.is_resharded(self.root, self._groups):
            return
        for group in self._groups:
            private.unpin(group)
        for unit in self._sharded.units:
            private.reshard(unit)
        private.forget_forwards(self.root)

    # -- backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.config.stage == 1:
            private.set_requires_gradient_sync(self._sharded.units, False)
        try:
            with super().no_sync():
                yield
        finally:
            private.set_requires_gradient_sync(self._sharded.units, True)

    def backward(self, run_backward: Callable[[], None], retains_graph: bool = False) -> None:
        self.end_window(self.hooks.before_backward)
        with DisableTorchFunction():
            if not self.automatic:
                private.end_forward(self.root)
            self._assigned.join_backward()
            self._transport.close_forward()
            self._reduced.clear()
            if retains_graph or self.backward_is_users:  # neither a forward nor a root hook would gather the root again
                for group in self._root_groups:
                    private.pin(group)
        with self._in(Phase.BACKWARD):  # user code inside may touch resharded parameters
            run_backward()
            self.residency.end_window()
        with DisableTorchFunction():
            self._after_backward(retains_graph)

    def _before_backward(self, group: private.Group) -> None:
        """Prepare the group's part of a backward, which user code may have started in the forward (``autograd.grad``).

        Pin the group in that case: the result may be differentiated again after the group has run another time, and
        then no hook gathers the group.
        """
        if self._phase is not Phase.BACKWARD:
            private.pin(group)
        self._transport.close_forward()

    def _before_reduce(self, group: private.Group) -> bool:
        """Complete the gradients of a group that is about to be reduced; return whether to reduce now.

        A ``torch.autograd.grad`` called by user code must leave parameters gathered and gradients unreduced. So must a
        plain ``loss.backward()`` under manual optimization; its gradients are reduced when the optimizer steps.
        """
        if self._phase is not Phase.BACKWARD:
            return False
        if group.reduce_grads:
            params = private.trainable(group)
            if group in self._root_groups or any(private.has_grad(p) for p in params):
                self._usage.complete(params)
                if group not in self._root_groups:
                    self._usage.reduces(self._unit_of[group])
                self._reduced.add(id(group))
        return True

    def _after_backward(self, retains_graph: bool = False) -> None:
        """Reduce the gradients that autograd's schedule left, drop gathered parameters, and agree on unused ones.

        Keep this order: late gradients lie on gathered parameters, so reduce before dropping. The message about used
        parameters is sent early and received last, to overlap with reductions. With ``retains_graph`` parameters stay
        gathered for another backward.
        """
        every = self._groups if self.reduces or self.config.stage > 1 else ()
        left = [(group, params) for group in every if (params := self._left_of(group))]
        sent = None
        if self.reduces and self.config.find_unused_parameters:
            sent = self._usage.send(chain.from_iterable(params for _, params in left), self._sharded.replicated)
        for group, params in left:
            self._usage.complete(params)
            private.reduce_now(group)
        if (self.reduces or not self.keep_gathered) and not retains_graph:
            self.reshard()
        if self.reduces:
            self._usage.reduce_replicated(self._sharded.replicated)
            if sent is not None:
                self._usage.recv(*sent)
            self._usage.start_window()
        self._is_accumulating = not self.reduces

    def _left_of(self, group: private.Group) -> list[private.ShardedParam]:
        """Return the parameters of ``group`` if autograd's schedule has not reduced their gradients, else none."""
        params = private.trainable(group)
        missed = group in self._root_groups and id(group) not in self._reduced
        return params if missed or any(map(private.has_grad, params)) else []

    # -- optimizer -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Complete the gradients, and store in the shards everything that user code wrote to parameters."""
        self.end_window(self.hooks.before_step)
        with DisableTorchFunction():
            # A plain loss.backward() under manual optimization leaves unreduced gradients and gathered parameters.
            if any(private.has_grad(p) for g in self._groups for p in private.trainable(g)):
                self._reduced.clear()
                self._after_backward()
            self._assigned.settle()
            self.reshard()
            self._views.settle()
            if self._on_host:
                finish_copies(self.device)  # of shards to the device: the step writes to the shards

    def _begin_full(self) -> None:
        self.reshard() if self.automatic else self.settle()

    def _stepped(self, optimizer: Optimizer) -> None:
        """Have a backward through a graph from before the step raise, as under DDP."""
        shards = self._identity.shards
        held = (p for group in optimizer.param_groups for p in group["params"])
        with DisableTorchFunction():
            increment_version([p for p in held if (shard := shards.get(p)) is not None and shard.grad is not None])
        self._writes.disregard()

    def sharded_step(self, optimizer: Optimizer, declared: Collection[str]) -> ShardedStep:
        events = self.settle, self._begin_full, self.full_step, self._stepped
        shards, states = self._identity.shards, self._store.states
        if self._files is None:
            return ShardedStep(optimizer, Rows(shards, states, *events), declared, self._on_host)
        parts = Rows(shards, states, *events, keep=self._files.keep)
        return ShardedStep(optimizer, parts, declared, self._on_host, self._files.creating_states)

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        self.end_window(self.hooks.before_step)
        self._assigned.settle()
        held = [self.shards.get(p, p) for group in optimizer.param_groups for p in group["params"]]
        shards = [local(p.grad) for p in held if isinstance(p, DTensor) and p.grad is not None]
        return shards, [p.grad for p in held if not isinstance(p, DTensor) and p.grad is not None]

    # -- full state ----------------------------------------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Any]:
        self.end_window(self.hooks.anywhere)
        with self._in(Phase.DUMP), self.residency.dumping(), torch.no_grad(), self.view():
            state = undetached_state_dict(self.module)
        with torch.no_grad(), DisableTorchFunction():
            return self.in_shards(state)

    def in_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replaces tensors by detached shards; a tied one stays one object under all its names."""
        detached: dict[int, Tensor] = {}
        shards: dict[str, Any] = map_tensors(
            lambda path, t: detached.setdefault(id(t), self._shard_of(t).detach()), state
        )
        return shards

    def _shard_of(self, tensor: Tensor) -> Tensor:
        """The shard of a parameter or of a state; any other ``tensor`` itself."""
        shard: Tensor | None = self._store.states.part_of(tensor)
        return self._identity.shards.get(tensor, tensor) if shard is None else shard

    # -- the end -------------------------------------------------------------------------------------------------

    def model_state(self, optimizers: Iterable[Optimizer]) -> ModelState:
        self._assigned.settle()
        state, replicated = ModelState(), set(self._sharded.replicated)
        in_files = None if self._files is None else self._files.holds
        place = partial(place_of, device=self.device, shards_on_host=self._on_host, in_files=in_files)
        with DisableTorchFunction():
            for p in self._sharded.parameters:
                state.add("parameters", p, place(p))
                if p.grad is not None:
                    state.add("gradients", p.grad, place(p.grad))
            for each in (p for group in self._groups for p in group.fsdp_params):
                copies, gradients = private.full_bytes(each)
                state.add_bytes("parameters", copies, "device")
                state.add_bytes("gradients", gradients, "device")
            for p, value in states_of(optimizers):
                shard = self._shard_of(value)
                # other states, such as counters, are placed with their parameter
                state.add(
                    "optimizer", shard, place(shard if shard is not value or p in replicated else self._shard_of(p))
                )
            return state

    def restore(self, full: bool) -> None:
        self.end_residency()
        self._assigned.end()
        with torch.no_grad(), DisableTorchFunction():
            self.residency.end_window()
            self._assigned.settle()
            # A lost rank never joins a gather ahead.
            with suppress(RuntimeError) if self.failed else nullcontext():
                self._drop_gathered()
            if full:
                self._transport.await_readers()
                self._identity.release(lambda shard: to_host(gathered(shard)))
            else:  # no collectives: after an error other ranks may be gone
                self._identity.release(None)
            self._copies.undo()
            for handle in self._handles:
                handle.remove()
            self._forwards.undo()
            for optimizer in self.optimizers or ():
                optimizer.__dict__.pop("zero_grad", None)
            for unit in self._sharded.units:
                private.undo(unit)
            self._store.states.end(entries(self.optimizers or ()), lambda shard, full: shard)
            leave_states(self.optimizers or (), self.config.after_fit == "whole" and full, moves=full)
            if full:
                self._transport.close()


def choose_transport(config: ZeroConfig, device: torch.device, mesh: DeviceMesh) -> Transport:
    """Return the transport that ``config.transport`` selects for this device and process group.

    Raises:
        ValueError: On all ranks, for ``"direct"`` where direct exchange is not available.
    """
    axis = mesh.get_group("shard")
    backend = dist.get_backend(axis)
    between_cpus = device.type == "cpu" and backend == "gloo"
    if config.comm_buffers != "torch" and device.type != "cuda":
        raise ValueError(
            f"comm_buffers={config.comm_buffers!r} on {device.type!r}: only NCCL allocates such buffers; use 'torch'."
        )
    if config.transport == "direct" and not between_cpus:
        raise ValueError(
            f"transport='direct' on {device.type!r} over {str(backend)!r}: direct exchange works only between processes"
            " on CPUs over gloo; use transport='auto'."
        )
    if between_cpus and config.transport != "torch":
        peer_memory = PeerMemory(axis, config.timeout_seconds)
        apart = torch.tensor(int(axis.size() > 1 and not peer_memory.ranks), device="cpu")
        if mesh.ndim > 1:  # of several groups of shards, some may be on one host and some not
            dist.all_reduce(apart, dist.ReduceOp.MAX)
        if not apart.item():
            return Direct(config, mesh, peer_memory)
        peer_memory.close()
        if config.transport == "direct":
            raise ValueError(
                "transport='direct': ranks that share a module's shards cannot read each other's memory, because they"
                " are on several hosts, not on Linux, or in a container that forbids it; use transport='auto', which"
                " takes gloo's collectives there."
            )
    return Transport(config, mesh)
