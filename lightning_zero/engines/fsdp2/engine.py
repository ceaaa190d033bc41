"""ZeRO on PyTorch's own ``torch.distributed.fsdp.fully_shard``.

[Tensors]
- *original parameter*: the ``nn.Parameter`` the user made. Kept, emptied, for the length of a run, so that the very
  object is back on the module afterwards.
- *sharded parameter*: ``DTensor`` on the module between steps and in every hook; what optimizers hold. Each rank owns
  ``ceil(rows / N)`` rows of dim 0.
- *gathered parameter*: plain, whole, on the module only inside a step, owned by ``fully_shard``. On CPUs, where it has
  the shard's dtype, the shard is a part of it at stages 1 and 2, and at any stage of a process alone: it stays
  allocated, and gathering fills in what other ranks have written.
- *shard axis*: the N ranks that one copy is shared out over. All of them, or with ``shard_size`` (HSDP) groups of so
  many consecutive ranks, which are replicas of each other along the *replicate axis*: gradients are reduce-scattered
  along the first and all-reduced along the second.
- *replicated parameter*: plain and whole on every rank all the time, because it cannot be split (see ``units``).
- *host shard*: with ``offload="cpu"`` the sharded parameters (the master weights), their gradients and the optimizer's
  states lie in host memory, pinned on an accelerator, and the optimizer steps there. On the device are the gathered
  parameters inside a step, stage 1's whole gradients until the last micro-batch, and what is replicated: it is small,
  and moving it would take a copy for each.

[Plan of one optimizer step, A micro-batches]

    stage   gather             reduce (gradients)     gathered parameters are dropped
    1       once               after the last one     after the last backward
    2       once               after each             after the last backward
    3       forward, backward  after each             after each use (the root unit's: after each backward)

With host shards each gather begins with a copy to the device, on the stream that gathers ahead of the compute, and
each reduction ends with a copy to host memory, which only the end of the backward waits for. Norms of gradients are
joined in host memory, over the gloo half of the process group.

Between micro-batches stages 1 and 2 stay gathered only if no user hook looks at the module there (``keep_gathered``).
Where shards lie in their copies these stay all the same, and so they do from one evaluated batch to the next: ranks
ask each other whether any has changed a shard, and gather again only then.

[What DDP does that ``fully_shard`` alone does not]
- *Unused parameters.* A rank without a gradient where another has one would send a shorter message. Every reduction
  therefore covers all trainable parameters of its unit, zeros where there is nothing; afterwards the ranks agree (one
  small all-reduce) which parameters nobody used, and their gradients become ``None`` again.
- *Units that only some ranks ran.* On the CPU, stages 1 and 2 gather everything up front and agree before backward
  whether all ranks ran the same units; if not, this backward reduces at its end, in fixed order. At stage 3 (and at
  1 and 2 on an accelerator) all ranks must run the same units, and an error before the optimizer's step says if not.
- *Late gradients.* A parameter used outside its unit's forward (a penalty over ``parameters()``) receives its gradient
  after its unit was reduced; a second reduction adds it.
- *Rank 0's values.* Parameters and buffers are broadcast before sharding, buffers again at each synchronized forward.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm import direct
from lightning_zero.comm.agree import all_reduce_mean, broadcast_coalesced
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.comm.shards import gathered, local, rows_of, shard_like
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.base import Engine
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.view import WholeView
from lightning_zero.engines.model_state import ModelState, place_of, states_of
from lightning_zero.engines.optimizer_step import ShardedStep, hand_back
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.units import UnitPlan, plan_units


class _Root(nn.Module):
    """Calls any method of the user's module; the root unit's hooks hang here, so the module itself stays untouched."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, method)(*args, **kwargs)


class Fsdp2Engine(Engine):
    """See the module's text for the plan and :class:`~lightning_zero.engines.base.Engine` for the contract."""

    def __init__(self, config: ZeroConfig, device: torch.device, dtypes: DtypePolicy) -> None:
        super().__init__(config, device, dtypes)
        self._policy = offload_policy(config, device)
        self._on_host = isinstance(self._policy, CPUOffloadPolicy)
        self._apart = self._on_host and device.type != "cpu"  # the host's memory is another one than the device's
        self._sync = True
        self._sync_buffers_next = True
        self._in_step = False
        self._in_backward = False
        self._reduced: set[int] = set()
        self._latest = -1  # the unit that ran before this one, -1 for none
        self._follower: dict[int, int] = {}  # unit -> the one that always ran after it, -1 for none
        self._writes = 0  # to sharded parameters, by user code
        self._sent: dict[int, int] = {}  # unit that may be gathered ahead -> writes before that
        self._unheard: tuple[int, int, dist.Work, Tensor] | None = None  # what ranks say of the latest unit
        self._versions: dict[int, int] = {}  # index of a group -> its version when it was last looked at
        self._data_taken: set[Tensor] = set()  # gathered parameters that may have been written through .data
        self._gathered_params: set[Tensor] = set()
        self._raw_state_dict = False
        self._is_whole = False  # inside full_parameters
        self._steps: weakref.WeakKeyDictionary[Optimizer, ShardedStep] = weakref.WeakKeyDictionary()
        self._reduce: direct.ReduceScatter | None = None
        self._peer_memory: PeerMemory | None = None  # along the shard axis
        self._agreeing: PeerMemory | None = None  # of all ranks
        self._keeps_copies = False  # all shards lie in their gathered copies, on every rank
        self._shards_in_copies = False  # some do
        self._gathered_marks: Any = None  # what _marks() said when the copies were last gathered and looked after
        self._skips_gathers = False  # what is gathered now has not changed anywhere
        self._step_is_due = False  # on all ranks, between a synchronized backward and the next gather
        self._accumulators: dict[Tensor, Any] = {}  # shards -> where autograd adds their gradients
        self._handles: list[Any] = []

    # -- sharding ------------------------------------------------------------------------------------------------

    @property
    def root(self) -> nn.Module:
        return self._root

    def shard(self, module: nn.Module) -> None:
        self.mesh = self._make_mesh()
        # autocast keeps BatchNorm in fp32, and its kernels refuse low-precision weights beside fp32 statistics
        keep_whole = (nn.modules.batchnorm._BatchNorm,) if self.dtypes.is_mixed else ()
        self._plan: UnitPlan = plan_units(module, self.config.units, self.config.min_unit_numel, keep_whole)
        self.units_table = self._plan.table()
        self.module = module
        self._root = _Root(module)
        self._originals: dict[Tensor, nn.Parameter] = {}
        self._replicated = list(self._plan.replicated.values())
        self._start_from_rank_0([*self._replicated, *module.buffers()])
        self._shard_units()
        self._follow_backward()
        self._follow_forward()
        self._follow_writes()
        # A group of its own, so that an agreement never meets an engine's collective
        self._agreement = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=self.config.timeout_seconds))
            if self.mesh.size() > 1
            and (self.config.find_unused_parameters or self._follows_order or self._keeps_copies)
            else None
        )
        if self._agreement and self._reduce is not None:
            self._agreeing = PeerMemory(self._agreement, self.config.timeout_seconds)
        self._order = {p: i for i, p in enumerate([*self._originals, *self._replicated])}
        self._start_window()

    def _start_from_rank_0(self, tensors: list[Tensor]) -> None:
        """Rank 0's values, on the device. Unit by unit: a module that is offloaded need not fit there."""
        for tensor in tensors:
            tensor.data = tensor.data.to(self.device)
        broadcast_coalesced(tensors)

    def _make_mesh(self) -> DeviceMesh:
        """Axis "shard" over all ranks; with ``shard_size``, axes "replicate" and "shard" (consecutive ranks)."""
        world_size, size = dist.get_world_size(), self.config.shard_size
        if size is None or size == world_size:
            return init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("shard",))
        if world_size % size:
            divisors = [n for n in range(2, world_size + 1) if world_size % n == 0]
            raise ValueError(
                f"shard_size={size} does not divide the {world_size} ranks of this run into equal groups: use one of"
                f" {', '.join(map(str, divisors)) or 'None'}, or None."
            )
        grid = torch.arange(world_size).view(-1, size)
        timeout = timedelta(seconds=self.config.timeout_seconds)  # init_device_mesh would take the default
        shard, _ = dist.new_subgroups_by_enumeration(grid.tolist(), timeout=timeout)
        replicate, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), timeout=timeout)
        return DeviceMesh.from_group(
            [replicate, shard], self.device.type, mesh=grid, mesh_dim_names=("replicate", "shard")
        )

    def _shard_units(self) -> None:
        stage = self.config.stage
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtypes.param_dtype, reduce_dtype=self.dtypes.reduce_dtype, cast_forward_inputs=False
        )
        everything = set(self.module.parameters())
        self.unit_modules: list[Any] = []  # each an nn.Module and an FSDPModule; the root last
        for unit in self._plan.units:
            is_root = unit.module is self.module
            target: Any = self._root if is_root else unit.module
            mine = dict(unit.parameters)
            self._start_from_rank_0(list(mine.values()))
            fully_shard(
                target,
                mesh=self.mesh,
                mp_policy=policy,
                offload_policy=self._policy,
                reshard_after_forward=stage == 3 and not is_root,  # the root is needed again at once
                ignored_params=everything - set(mine.values()),
            )
            sharded = dict(self.module.named_parameters())
            for name, original in mine.items():
                self._originals[sharded[name]] = original
                original.data = original.data.new_empty(0)  # the shards are all that is kept
            # Dropping them inside a backward would pull saved tensors from under uses outside the unit's forward.
            target.set_reshard_after_backward(stage == 3, recurse=False)
            self.unit_modules.append(target)
        self._exchange_directly()
        private.init_now(self._root)
        self._groups = [g for unit in self.unit_modules for g in private.groups(unit)]
        self._keep_shards_in_copies()
        self._carry_hooks_over()
        self._root_groups = private.groups(self._root)

    def _keep_shards_in_copies(self) -> None:
        """Before an optimizer takes the shards; where copies are whole for most of a step anyway."""
        alone = self.mesh["shard"].size() == 1
        if self._reduce is None or self._on_host or (self.config.stage == 3 and not alone):
            return
        for group in self._groups:
            private.alias_shards(group)
        lie = [private.is_aliased(p) for group in self._groups for p in group.fsdp_params]
        self._keeps_copies, self._shards_in_copies = all(lie), any(lie)

    def _exchange_directly(self) -> None:
        """On CPUs gloo's own collectives take longer and more memory than they must."""
        axis = self.mesh.get_group("shard")
        if self.device.type != "cpu" or dist.get_backend(axis) != "gloo":
            return
        pool = direct.Pool()
        self._peer_memory = PeerMemory(axis, self.config.timeout_seconds)
        self._reduce = direct.ReduceScatter(pool, self._peer_memory)

        def gather(outputs: list[Tensor], shards: list[Tensor], process_group: dist.ProcessGroup) -> dist.Work:
            if self._skips_gathers:
                return direct.Begun(iter(()))
            work = direct.all_gather_each(outputs, shards, process_group, pool, self._peer_memory)
            # Who writes to a copy that shards lie in writes to what neighbours read.
            return direct.Begun((w.wait() for w in [work]), self._await_readers) if self._shards_in_copies else work

        for unit in self.unit_modules:
            unit.set_custom_reduce_scatter(self._reduce)
            for group in private.groups(unit):
                private.gather_in_place(group, gather)

    def _carry_hooks_over(self) -> None:
        """Hooks that the user registered on parameters see this rank's gradient before it is reduced, as under DDP."""
        for unit, target in zip(self._plan.units, self.unit_modules, strict=True):
            hooked = {name for name, p in unit.parameters.items() if p._backward_hooks}
            late = [name for name, p in unit.parameters.items() if getattr(p, "_post_accumulate_grad_hooks", None)]
            if late:
                raise ValueError(
                    f"parameter {late[0]!r} has a post-accumulate-grad hook, which would see a gradient that is never"
                    " complete: use on_after_backward or on_before_optimizer_step."
                )
            if hooked:
                target.unshard()  # makes the gathered parameters, which live as long as the engine
                gathered_now = dict(self.module.named_parameters())
                for name in hooked:
                    for hook in unit.parameters[name]._backward_hooks.values():  # type: ignore[union-attr]
                        gathered_now[name].register_hook(hook)
                target.reshard()

    @property
    def known_parameters(self) -> Container[Tensor]:
        return {*self._originals, *self._replicated}

    # -- forward -------------------------------------------------------------------------------------------------

    def _follow_forward(self) -> None:
        """Root parameters are gathered for any forward that needs them, also outside a step."""
        for index, unit in enumerate(self.unit_modules[:-1]):
            self._handles.append(unit.register_forward_pre_hook(self._unit_hook(index, unit), prepend=True))
        owners = {m for g in self._root_groups for _, places in private.registrations(g) for m, _ in places}
        for owner in owners:
            self._handles.append(owner.register_forward_pre_hook(self._gather_root, prepend=True))
        for entry in (self.module, *self.module.children()):
            self._handles.append(entry.register_forward_hook(self._after_entry))
        self._handles.append(self.module.register_state_dict_post_hook(lambda *args: self._whole_state_dict(*args)))

    def _unit_hook(self, index: int, unit: Any) -> Callable[..., None]:
        def before_forward(*unused: Any) -> None:
            if self._is_whole:
                return
            self._ran[index] = 1
            self._require_same_order(index)
            if torch.is_inference_mode_enabled():  # storage made here could never be trained on
                with torch.inference_mode(False):
                    unit.unshard()

        return before_forward

    @property
    def _follows_order(self) -> bool:
        """Stage 3 on the CPU: ranks say which unit they gather next, before gathers could be mixed up.

        Costs one message of 16 bytes for each unit. On an accelerator the host would have to wait, so there
        :meth:`_require_same_units` finds out after the backward.
        """
        return self.config.stage == 3 and self.device.type == "cpu"

    def _require_same_order(self, index: int) -> None:
        """This rank is about to run unit ``index``, or at the end (-1).

        A unit that has travelled ahead runs without waiting for the others: what they say of it is heard at the next
        one. Nothing is gathered on a guess: all ranks have heard of the unit before, and what has followed it two
        units on is what all of them send for here, wherever they have gone meanwhile.
        """
        if self._agreement is None or not self._follows_order:
            return
        with torch._C.DisableTorchFunction():
            self._hear_order()
            if not self._in_backward:  # where activations are recomputed, units run in another order
                self._gather_ahead(self._followed_by(self._followed_by(self._latest)))
            is_ahead = index in self._sent and not self._in_backward
            is_old = self._sent.pop(index, self._writes) != self._writes
            self._say_order(index, is_old)
            if is_ahead and not is_old:
                return
            self._hear_order()
            if is_old:
                for group in private.groups(self.unit_modules[index]):
                    private.forget_gather(group)
            if index >= 0 and not self._in_backward:
                self._gather_now(index)
                self._gather_ahead(self._followed_by(index))

    def _say_order(self, index: int, is_old: bool) -> None:
        before = -1
        if not self._in_backward:
            before, self._latest = self._latest, index
        ends = torch.tensor([index, is_old, -index, -is_old], dtype=torch.int32)
        work = self._begin_agreement(ends, dist.ReduceOp.MAX)
        self._unheard = before, index, work, ends

    def _hear_order(self) -> None:
        """Waits for what all ranks have said of the latest unit.

        Raises:
            ValueError: On all ranks, when they run different units, or some have written to what has travelled ahead.
        """
        if self._unheard is None:
            return
        (before, index, work, ends), self._unheard = self._unheard, None
        work.wait()
        highest, lowest = ends[:2].tolist(), (-ends[2:]).tolist()  # on the CPU: no device waits
        if highest[0] != lowest[0]:
            self._refuse_different_units([i for i in (lowest[0], highest[0]) if i >= 0])
        if highest[1] != lowest[1]:
            raise ValueError(
                f"stage={self.config.stage}: some ranks only have written to parameters while those of"
                f" {self._plan.units[index].name!r} travelled ahead in a forward, so that ranks would go on with"
                " different ones: write on every rank, or between two forwards."
            )
        if before >= 0 and self._follower.setdefault(before, index) != index:
            self._follower[before] = -1

    def _close_order(self) -> None:
        """A backward is about to begin, maybe inside the forward; it gathers in an order of its own."""
        if self._latest >= 0:
            self._require_same_order(-1)

    def _followed_by(self, index: int) -> int:
        """The unit that has always followed this one; -1 for good, where another one, or none, followed once."""
        return self._follower.get(index, -1)

    def _gather_ahead(self, index: int) -> None:
        if index >= 0:
            self._sent.setdefault(index, self._writes)
            self._gather_now(index)

    def _gather_now(self, index: int) -> None:
        with torch.inference_mode(False):  # storage made inside could never be trained on
            self.unit_modules[index].unshard(async_op=True)

    def _gather_root(self, *unused: Any) -> None:
        for group in self._root_groups if not self._is_whole else ():
            if not private.is_gathered(group):
                with torch.inference_mode(False):
                    self._root.unshard()  # type: ignore[operator]
            elif not self.automatic:
                private.follow_requires_grad(group)

    def _after_entry(self, *unused: Any) -> None:
        if not self._in_step and not torch.is_grad_enabled():
            self.reshard()

    def _whole_state_dict(self, module: nn.Module, state: dict[str, Any], *unused: Any) -> None:
        if not self._raw_state_dict:
            for name, value in state.items():
                if isinstance(value, DTensor):
                    state[name] = gathered(value)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            self._broadcast_buffers()
        self._in_step = True
        wants_grad = torch.is_grad_enabled()
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(wants_grad):
                if not self.automatic and torch.is_grad_enabled():
                    # Units and the root are gathered as they are used, after toggle_optimizer had its say.
                    output = getattr(self.module, method)(*args, **kwargs)
                else:
                    if self._gathers_up_front:
                        with torch._C.DisableTorchFunction():
                            self._gather_all()
                    output = self._root(method, *args, **kwargs)
                self._require_same_order(-1)
        finally:
            self._in_step = False
        if not torch.is_grad_enabled() or output is None or not self.automatic:
            self.reshard()
        return output

    @property
    def _gathers_up_front(self) -> bool:
        return self.config.stage < 3 and self.device.type == "cpu"

    def _gather_all(self) -> None:
        """Each unit travels while the one before it arrives; more at once would need room for their messages.

        Nothing travels where copies stay from one micro-batch or evaluated batch to the next (the shards lie in them)
        and no rank has changed a shard since, which they ask each other unless they have just stepped.
        """
        recurs = not (torch.is_grad_enabled() and self.keep_gathered)
        looks = recurs and self._keeps_copies and self._agreement is not None
        self._skips_gathers = looks and not self._step_is_due and self._copies_are_current()
        self._step_is_due = False
        try:
            begun = (unit.unshard(async_op=True) for unit in self.unit_modules)
            for arriving, _ in pairwise(chain(begun, [None])):  # the second of a pair has begun as well
                arriving.wait()
        finally:
            self._skips_gathers = False
        if looks:
            self._gathered_marks = self._marks()

    def _marks(self) -> Any:
        return [private.shard_marks(group) for group in self._groups]

    def _copies_are_current(self) -> bool:
        """Whether the copies are still what the shards are, on all ranks."""
        changed = torch.tensor([self._gathered_marks != self._marks()], dtype=torch.int32)
        self._begin_agreement(changed, dist.ReduceOp.MAX).wait()
        return changed.tolist() == [0]  # on the CPU: no device waits

    def _broadcast_buffers(self) -> None:
        """DDP's rule: once before each forward that follows a synchronized training forward."""
        if self._sync_buffers_next and self.config.broadcast_buffers:
            broadcast_coalesced(list(self.module.buffers()))
        self._sync_buffers_next = torch.is_grad_enabled() and self._sync

    def reshard(self) -> None:
        self._drop_gathered()
        self._await_readers()

    def _drop_gathered(self) -> None:
        self._latest = -1
        self._sent.clear()
        if private.is_resharded(self._root, self._groups):
            return
        for unit in self.unit_modules:
            unit.reshard()
        private.forget_forwards(self._root)

    def _await_readers(self) -> None:
        """What neighbours may still be reading is neither written to nor freed."""
        if self._peer_memory is not None:
            self._peer_memory.await_readers()

    # -- writes --------------------------------------------------------------------------------------------------

    def view(self) -> AbstractContextManager[Any]:
        return WholeView(self._before_write, self._on_data)

    def _before_write(self) -> None:
        self._writes += 1
        self._await_readers()

    def _on_data(self, tensor: Tensor) -> bool:
        """``tensor.data`` is taken: what is written through it does not show in the version."""
        if len(self._gathered_params) < len(self._originals):  # some have not been gathered yet
            self._gathered_params = {copy for group in self._groups for copy, _ in private.copies(group)}
        if tensor not in self._gathered_params:
            return False
        self._data_taken.add(tensor)
        return True

    def _follow_writes(self) -> None:
        for index, group in enumerate(self._groups):
            private.before_reshard(group, partial(self._keep_writes, index))

    def _keep_writes(self, index: int, group: private.Group) -> None:
        """What a step or a forward has written to gathered parameters goes to the shards before the copies go."""
        version = private.version(group)
        if version == self._versions.get(index, 0) and not self._data_taken:
            return
        self._versions[index] = version
        self._gathered_marks = None  # other ranks' rows may differ from their shards now
        self._await_readers()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for copy, shard in private.copies(group):
                _store_rows(copy, shard)
        self._data_taken.difference_update(copy for copy, _ in private.copies(group))

    # -- backward ------------------------------------------------------------------------------------------------

    def _follow_backward(self) -> None:
        for group in self._groups:
            private.before_reduce(group, self._before_reduce)
            private.before_backward(group, self._close_order)
            private.without_translation(group)

    def _start_window(self) -> None:
        """A window is what lies between two agreements."""
        self._used: set[Tensor] = set()
        self._zeroed: list[Tensor] = []
        self._ran = [0] * (len(self.unit_modules) - 1)  # 1 for each unit that ran on this rank, the root left out

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._sync = False
        if self.config.stage == 1:
            self._root.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            self._sync = True
            self._root.set_requires_gradient_sync(True)  # type: ignore[operator]

    def backward(self, run_backward: Callable[[], None]) -> None:
        self._close_order()
        with torch._C.DisableTorchFunction():
            deferred = self._ranks_ran_different_units()
            if deferred:
                self._root.set_requires_gradient_sync(False)  # type: ignore[operator]
            self._reduced.clear()
            self._in_backward = True
            try:
                run_backward()
            finally:
                self._in_backward = False
            if deferred:
                self._root.set_requires_gradient_sync(True)  # type: ignore[operator]
            self._after_backward(deferred)
        self._step_is_due = self._sync and self.automatic

    def _ranks_ran_different_units(self) -> bool:
        if self._agreement is None or not (self.config.find_unused_parameters and self._ran):
            return False
        if not (self._sync and self._gathers_up_front and self.automatic):
            return False
        ran = torch.tensor(self._ran, dtype=torch.int32)
        self._begin_agreement(ran, dist.ReduceOp.SUM).wait()
        return bool(((ran > 0) & (ran < self.mesh.size())).any())

    def _before_reduce(self, group: private.Group) -> bool:
        """Completes the gradients of a group that is about to be reduced.

        A ``torch.autograd.grad`` of the user's own must leave everything as it is: gathered, and unreduced. So does a
        plain ``loss.backward()`` under manual optimization, whose gradients are reduced when the optimizer steps.
        """
        if not self._in_backward:
            return False
        if group.reduce_grads:
            params = private.trainable(group)
            if group in self._root_groups or any(private.has_grad(p) for p in params):
                self._complete(params)
                self._reduced.add(id(group))
                if self._reduce is not None:
                    self._reduce.may_wait = self.mesh.ndim == 1 and private.keeps_what_is_reduced(group)
                    if self._reduce.may_wait:
                        self._finish_before_adding(self._reduce, params)
        return True

    def _finish_before_adding(self, reduce: direct.ReduceScatter, params: list[private.ShardedParam]) -> None:
        """A gradient that reaches the shards by itself (a penalty over parameters) is added to a complete one."""
        for p in params:
            if p.sharded_param not in self._accumulators:
                node = get_gradient_edge(p.sharded_param).node
                node.register_prehook(lambda grads: reduce.finish())
                self._accumulators[p.sharded_param] = node

    def _complete(self, params: list[private.ShardedParam]) -> None:
        for p in params:
            if private.has_grad(p):
                self._used.add(p.sharded_param)
            else:
                if p.sharded_param.grad is None:
                    self._zeroed.append(p.sharded_param)
                private.zero_grad(p)

    def _after_backward(self, deferred: bool) -> None:
        stage_reduces = self._sync or self.config.stage > 1
        if self._reduce is not None:
            self._reduce.may_wait = False
            self._reduce.finish()
        for group in self._groups if stage_reduces else ():
            params = private.trainable(group)
            late = any(private.has_grad(p) for p in params)
            missed = group in self._root_groups and id(group) not in self._reduced
            if params and (late or missed or deferred):
                self._complete(params)
                private.reduce_now(group)
        if self._sync or not self.keep_gathered:
            self.reshard()
        if self._sync:
            self._reduce_replicated()
            self._agree_on_unused()
            self._start_window()

    def _reduce_replicated(self) -> None:
        trainable = [p for p in self._replicated if p.requires_grad]
        for p in trainable:
            if p.grad is None:
                self._zeroed.append(p)
                p.grad = torch.zeros_like(p)
            else:
                self._used.add(p)
        grads = [p.grad for p in trainable if p.grad is not None]
        if grads:
            all_reduce_mean(grads)

    def _begin_agreement(self, message: Tensor, op: Any) -> dist.Work:
        """``message`` becomes what all ranks agree on, when this has been waited for."""
        assert self._agreement is not None
        return direct.all_reduce(message, op, self._agreement, self._agreeing)

    def _agree_on_unused(self) -> None:
        """One message on the CPU: which units this rank ran, which parameters it used."""
        if not self.config.find_unused_parameters:
            return
        used = torch.zeros(len(self._order), dtype=torch.int32)
        if self._used:
            used[[self._order[p] for p in self._used]] = 1
        votes = torch.cat([torch.tensor(self._ran, dtype=torch.int32), used])
        if self._agreement:
            self._begin_agreement(votes, dist.ReduceOp.SUM).wait()
        ran, used = votes.split([len(self._ran), len(self._order)])
        if not self._gathers_up_front:
            self._require_same_units(ran)
        if self._zeroed:
            for p, count in zip(self._zeroed, used[[self._order[p] for p in self._zeroed]].tolist(), strict=True):
                if not count:
                    p.grad = None

    def _require_same_units(self, ran: Tensor) -> None:
        partly = ((ran > 0) & (ran < self.mesh.size())).nonzero().flatten().tolist()
        if partly:
            self._refuse_different_units(partly)

    def _refuse_different_units(self, indices: list[int]) -> None:
        names = [self._plan.units[i].name for i in indices]
        others = [u.name for u in self._plan.units[:-1] if u.name not in names]
        raise ValueError(
            f"stage={self.config.stage}: the units {', '.join(map(repr, names))} ran on some ranks only, or in another"
            " order, but all ranks must gather the same parameters together. Run them on every rank, or keep them out"
            f" of the units, as units={others!r} does" + (", or use stage=2." if self.device.type == "cpu" else ".")
        )

    # -- optimizer -----------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        try:
            return self._sharded_step(optimizer).step(self._closure(closure), **kwargs)
        finally:
            self._gathered_marks = None  # a kernel of the optimizer's own need not tell a tensor that it writes to it

    def _wait_for_host_copies(self) -> None:
        """Parameters on their way up must leave before the step writes to them. The backward has waited for the last
        gradient to come down, so mostly nothing is left; a forward without backward may be."""
        if self._apart:
            torch.get_device_module(self.device).synchronize(self.device)

    def _closure(self, closure: Callable[[], Any] | None) -> Callable[[], Any]:
        def evaluate() -> Any:
            result = None if closure is None else closure()
            with torch._C.DisableTorchFunction():
                # Gradients of a plain loss.backward() under manual optimization, and gathered copies of old values.
                if any(private.has_grad(p) for g in self._groups for p in private.trainable(g)):
                    self._reduced.clear()
                    self._after_backward(deferred=False)
                self.reshard()
                self._wait_for_host_copies()
            return result

        return evaluate

    def _before_step(self) -> None:
        """User code or an optimizer looks before the closure has run. Under manual optimization backward is over."""
        if self.automatic:
            self.reshard()
        else:
            self._closure(None)()

    def _sharded_step(self, optimizer: Optimizer) -> ShardedStep:
        if optimizer not in self._steps:
            declared, before = self.config.elementwise_optimizers or (), self._before_step
            self._steps[optimizer] = ShardedStep(optimizer, self._on_host, declared, before, self._originals)
        return self._steps[optimizer]

    @contextmanager
    def stand_ins(self, optimizer: Optimizer, on_shards: bool | None = None) -> Iterator[Any]:
        self._wait_for_host_copies()
        try:
            with self._sharded_step(optimizer).stand_ins(on_shards) as swap:
                yield swap
        finally:
            self._gathered_marks = None

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            shards = [local(p.grad) for p in params if isinstance(p, DTensor) and p.grad is not None]
            wholes = [p.grad for p in params if not isinstance(p, DTensor)]
            home = torch.device("cpu") if self._on_host else self.device
            squared = _sum_of_squares(shards, home)
            if self.mesh.size() > 1:  # replicas hold the same shards: each counts once
                dist.all_reduce(squared, group=self.mesh.get_group("shard"))
            if wholes:
                squared = squared + _sum_of_squares(wholes, self.device).to(home)
            norm = squared.sqrt()
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
            for grads in _by_kind(shards + wholes):
                torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].dtype))
            return norm

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            params = [p for group in optimizer.param_groups for p in group["params"]]
            grads: list[Tensor] = [p.grad for p in params if p.grad is not None]
            for shards in _by_kind([local(grad) for grad in grads]):
                torch._foreach_clamp_min_(shards, -clip_value)
                torch._foreach_clamp_max_(shards, clip_value)

    def any_rank(self, flag: Tensor) -> None:
        if self.mesh.size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)

    # -- whole state ---------------------------------------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Any]:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            # Detached tensors would no longer tell what is tied; an override may not know the argument.
            accepted = inspect.signature(self.module.state_dict).parameters.values()
            knows = any(p.name == "keep_vars" or p.kind is p.VAR_KEYWORD for p in accepted)
            self._raw_state_dict = True
            try:
                state = self.module.state_dict(keep_vars=True) if knows else self.module.state_dict()
            finally:
                self._raw_state_dict = False
            detached: dict[int, Tensor] = {}
            return map_tensors(lambda path, t: detached.setdefault(id(t), t.detach()), state)

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with torch._C.DisableTorchFunction():
            return self._sharded_step(optimizer).state_dict()

    @contextmanager
    def full_parameters(self, modify: bool = False) -> Iterator[None]:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self.reshard()
            whole = {p: nn.Parameter(gathered(p), p.requires_grad) for p in self._originals}
            versions = {p: w._version for p, w in whole.items()}
            self._register(whole)
        self._is_whole = True
        try:
            with ExitStack() as stack:
                for unit in self.unit_modules:
                    stack.enter_context(private.without_hooks(unit))
                yield
        finally:
            self._is_whole = False
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self._register({p: p for p in whole})
                if modify:
                    broadcast_coalesced([*whole.values(), *self._replicated])
                    self._wait_for_host_copies()
                    for p, w in whole.items():
                        local(p).copy_(local(shard_like(w, p)))  # type: ignore[arg-type]
        if not modify and any(w._version != versions[p] for p, w in whole.items()):
            raise RuntimeError(
                "full_parameters(module): parameters were written to, and what was written is lost: use"
                " full_parameters(module, modify=True)."
            )

    def _register(self, instead: Mapping[Tensor, Tensor]) -> None:
        for group in self._groups:
            for sharded, places in list(private.registrations(group)):
                for module, name in places:
                    module._parameters[name] = instead[sharded]  # type: ignore[assignment]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self._sharded_step(optimizer).load_state_dict(state)

    # -- the end -------------------------------------------------------------------------------------------------

    def model_state(self, optimizers: Iterable[Optimizer]) -> ModelState:
        state = ModelState()
        with torch._C.DisableTorchFunction():
            for p in [*self._originals, *self._replicated]:
                state.add("parameters", p, self._place(p))
                if p.grad is not None:
                    state.add("gradients", p.grad, self._place(p.grad))
            for group in self._groups:
                for sharded in group.fsdp_params:
                    copies, gradients = private.whole_bytes(sharded)
                    state.add_bytes("parameters", copies, "device")
                    state.add_bytes("gradients", gradients, "device")
            replicated = set(self._replicated)
            for p, value in states_of(optimizers):  # counters lie with what they count
                state.add("optimizer", value, self._place(value if p in replicated else p))
        return state

    def _place(self, tensor: Tensor) -> str:
        return place_of(tensor, self.device, self._on_host)

    @property
    def whole_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._originals)

    def restore(self, whole: bool, optimizers: list[Optimizer]) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self._drop_gathered()
            if not whole:  # maybe after an error: others need not come any more
                return
            self._await_readers()
            for group in self._groups:
                copies = private.gather_for_good(group)
                for sharded, places in list(private.registrations(group)):
                    original = self._originals[sharded]
                    assert isinstance(sharded, DTensor)
                    original.data = _unpadded(copies.pop(sharded)) if sharded in copies else gathered(sharded).to("cpu")
                    original.requires_grad_(sharded.requires_grad)
                    for module, name in places:
                        setattr(module, name, original)
            for handle in self._handles:
                handle.remove()
            for peer_memory in (self._peer_memory, self._agreeing):
                if peer_memory is not None:
                    peer_memory.close()
            if self._agreement:
                dist.destroy_process_group(self._agreement)
            for unit in self.unit_modules:
                private.undo(unit)
            for optimizer in optimizers:
                hand_back(optimizer, self._originals, self.states_whole_after_fit)


def _store_rows(whole: Tensor, sharded: DTensor) -> None:
    """This rank's rows of ``whole``; of a gathered copy in low precision only those elements that have changed."""
    shard, (start, length) = local(sharded), rows_of(sharded)
    if not length:
        return
    rows = whole.detach().narrow(0, start, length).to(shard.device)
    if rows.dtype != shard.dtype:
        rows = torch.where(shard.to(rows.dtype) == rows, shard, rows.to(shard.dtype))
    shard.copy_(rows)


def _unpadded(whole: Tensor) -> Tensor:
    """``whole`` in memory of its own size: what it lies in may have room for larger shards."""
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """In a dtype that all ranks choose alike, though some shards are empty."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return torch.zeros((), device=device, dtype=dtype)
    norms = torch._foreach_norm(tensors)
    return torch.stack([n if n.dtype == dtype else n.to(dtype) for n in norms]).square().sum()


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Together what is of one dtype, on one device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.dtype, t.device), []).append(t)
    return list(groups.values())


def offload_policy(config: ZeroConfig, device: torch.device) -> OffloadPolicy:
    """Where ``fully_shard`` keeps the shards.

    Raises:
        ValueError: For pinned memory where there is no accelerator to pin it for.
    """
    if config.offload.target != "cpu":
        return OffloadPolicy()
    pin_memory = config.offload.pin_memory
    if pin_memory and device.type == "cpu":
        raise ValueError(
            "offload.pin_memory=True on accelerator='cpu': memory is pinned for copies to an accelerator; leave it"
            " unset."
        )
    return CPUOffloadPolicy(pin_memory=device.type != "cpu" if pin_memory is None else pin_memory)
