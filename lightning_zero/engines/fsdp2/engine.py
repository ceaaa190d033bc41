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
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.agree import broadcast_coalesced
from lightning_zero.comm.shards import gathered, local, shard_like
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.base import Engine, Root
from lightning_zero.engines.fsdp2 import private
from lightning_zero.engines.fsdp2.mesh import make_mesh
from lightning_zero.engines.fsdp2.transport import make_transport
from lightning_zero.engines.fsdp2.usage import Usage
from lightning_zero.engines.fsdp2.view import WholeView
from lightning_zero.engines.fsdp2.writes import Writes
from lightning_zero.engines.gradients import Gradients
from lightning_zero.engines.model_state import ModelState, place_of, states_of
from lightning_zero.engines.optimizer_step import ShardedStep, hand_back
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.units import UnitPlan, plan_units
from lightning_zero.private.torch import (
    BatchNorm,
    DisableTorchFunction,
    backward_hooks,
    has_accumulation_hooks,
    own_parameters,
    version_of,
)


class Phase(Enum):
    """What a unit's hooks do; one at a time, an inner phase inside an outer one."""

    IDLE = auto()
    """Between steps: a forward without gradients is resharded when it ends, so hooks find shards."""
    STEP = auto()
    """Inside :meth:`Fsdp2Engine.run`: gathered parameters live until ``fully_shard`` drops them."""
    BACKWARD = auto()
    """Inside :meth:`Fsdp2Engine.backward`: gradients are reduced; units run again in another order (recomputation)."""
    WHOLE = auto()
    """Inside :meth:`Fsdp2Engine.full_parameters`: parameters are plain and whole, hooks do nothing."""


class Fsdp2Engine(Engine):
    """See the module's text for the plan and :class:`~lightning_zero.engines.base.Engine` for the contract."""

    def __init__(self, config: ZeroConfig, device: torch.device, dtypes: DtypePolicy) -> None:
        super().__init__(config, device, dtypes)
        self._policy = offload_policy(config, device)
        self._on_host = isinstance(self._policy, CPUOffloadPolicy)
        self._apart = self._on_host and device.type != "cpu"  # the host's memory is another one than the device's
        self._phase = Phase.IDLE
        self._reduced: set[int] = set()  # ids of the groups whose reduction this backward has begun
        self._raw_state_dict = False
        self._steps: weakref.WeakKeyDictionary[Optimizer, ShardedStep] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        outer, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = outer

    # -- sharding ------------------------------------------------------------------------------------------------

    @property
    def root(self) -> nn.Module:
        return self._root

    def shard(self, module: nn.Module) -> None:
        self.mesh = make_mesh(self.device.type, self.config.shard_size, self.config.timeout_seconds)
        self._transport = make_transport(self.config, self.device, self.mesh, may_alias=not self._on_host)
        # autocast keeps BatchNorm in fp32, and its kernels refuse low-precision weights beside fp32 statistics
        keep_whole = (BatchNorm,) if self.dtypes.is_mixed else ()
        self._plan: UnitPlan = plan_units(module, self.config.units, self.config.min_unit_numel, keep_whole)
        self.units_table = self._plan.table()
        self.module = module
        self._root = Root(module)
        self._originals: dict[Tensor, nn.Parameter] = {}
        self._replicated = list(self._plan.replicated.values())
        self._start_from_rank_0([*self._replicated, *module.buffers()])
        self._shard_units()
        self._follow_backward()
        self._follow_forward()
        self._writes = Writes(self._groups, self._transport)
        self._usage = self._make_usage()
        self._transport.connect(self._usage)

    def _make_usage(self) -> Usage:
        group = None
        if self.mesh.size() > 1 and (self.config.find_unused_parameters or self._transport.agrees):
            # A group of its own, so that an agreement never meets an engine's collective
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.config.timeout_seconds))
        repair = ", or use stage=2" if self.device.type == "cpu" and self.config.transport != "torch" else ""
        return Usage(self.config, self._plan, self._originals, self._replicated, group, repair)

    def _start_from_rank_0(self, tensors: list[Tensor]) -> None:
        """Rank 0's values, on the device. Unit by unit: a module that is offloaded need not fit there."""
        for tensor in tensors:
            tensor.data = tensor.data.to(self.device)
        broadcast_coalesced(tensors)

    def _shard_units(self) -> None:
        stage = self.config.stage
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtypes.param_dtype, reduce_dtype=self.dtypes.reduce_dtype, cast_forward_inputs=False
        )
        everything = set(self.module.parameters())
        self.unit_modules: list[nn.Module] = []  # the root last
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
            private.set_reshard_after_backward(target, stage == 3)
            self.unit_modules.append(target)
        self._transport.attach(self.unit_modules)
        private.init_now(self._root)
        self._groups = [g for unit in self.unit_modules for g in private.groups(unit)]
        self._transport.alias_shards(self._groups)
        self._carry_hooks_over()
        self._root_groups = private.groups(self._root)

    def _carry_hooks_over(self) -> None:
        """Hooks that the user registered on parameters see this rank's gradient before it is reduced, as under DDP."""
        for unit, target in zip(self._plan.units, self.unit_modules, strict=True):
            hooked = {name for name, p in unit.parameters.items() if backward_hooks(p)}
            late = [name for name, p in unit.parameters.items() if has_accumulation_hooks(p)]
            if late:
                raise ValueError(
                    f"parameter {late[0]!r} has a post-accumulate-grad hook, which would see a gradient that is never"
                    " complete: use on_after_backward or on_before_optimizer_step."
                )
            if hooked:
                private.unshard(target)  # makes the gathered parameters, which live as long as the engine
                gathered_now = dict(self.module.named_parameters())
                for name in hooked:
                    for hook in backward_hooks(unit.parameters[name]).values():  # type: ignore[union-attr]
                        gathered_now[name].register_hook(hook)
                private.reshard(target)

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

    def _unit_hook(self, index: int, unit: nn.Module) -> Callable[..., None]:
        def before_forward(*unused: Any) -> None:
            if self._phase is Phase.WHOLE:
                return
            self._usage.ran[index] = 1
            self._transport.unit_begins(index, recomputes=self._phase is Phase.BACKWARD)
            if torch.is_inference_mode_enabled():  # storage made here could never be trained on
                with torch.inference_mode(False):
                    private.unshard(unit)

        return before_forward

    def _gather_root(self, *unused: Any) -> None:
        for group in self._root_groups if self._phase is not Phase.WHOLE else ():
            if not private.is_gathered(group):
                with torch.inference_mode(False):
                    private.unshard(self._root)
            elif not self.automatic:
                private.follow_requires_grad(group)

    def _after_entry(self, *unused: Any) -> None:
        if self._phase is Phase.IDLE and not torch.is_grad_enabled():
            self.reshard()

    def _whole_state_dict(self, module: nn.Module, state: dict[str, Any], *unused: Any) -> None:
        if not self._raw_state_dict:
            for name, value in state.items():
                if isinstance(value, DTensor):
                    state[name] = gathered(value)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            self._broadcast_buffers()
        wants_grad = torch.is_grad_enabled()
        with self._in(Phase.STEP), torch.inference_mode(False), torch.set_grad_enabled(wants_grad):
            if not self.automatic and wants_grad:
                # Units and the root are gathered as they are used, after toggle_optimizer had its say.
                output = getattr(self.module, method)(*args, **kwargs)
            else:
                self._transport.gather_up_front(recurs=not (wants_grad and self.keep_gathered))
                output = self._root(method, *args, **kwargs)
            self._transport.forward_ends()
        if not wants_grad or output is None or not self.automatic:
            self.reshard()
        return output

    def reshard(self) -> None:
        self._drop_gathered()
        self._transport.await_readers()

    def _drop_gathered(self) -> None:
        self._transport.resharded()
        if private.is_resharded(self._root, self._groups):
            return
        for unit in self.unit_modules:
            private.reshard(unit)
        private.forget_forwards(self._root)

    def view(self) -> AbstractContextManager[Any]:
        return WholeView(self._transport.before_write, self._writes.take_data)

    # -- backward ------------------------------------------------------------------------------------------------

    def _follow_backward(self) -> None:
        for group in self._groups:
            private.before_reduce(group, self._before_reduce)
            private.before_backward(group, self._transport.before_backward)
            private.without_translation(group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.config.stage > 1:
            with super().no_sync():
                yield
            return
        private.set_requires_gradient_sync(self.unit_modules, False)
        try:
            with super().no_sync():
                yield
        finally:
            private.set_requires_gradient_sync(self.unit_modules, True)

    def backward(self, run_backward: Callable[[], None]) -> None:
        self._transport.before_backward()
        with DisableTorchFunction():
            deferred = self._transport.backward_begins(may_defer=self._sync and self.automatic)
            if deferred:
                private.set_requires_gradient_sync(self.unit_modules, False)
            self._reduced.clear()
            with self._in(Phase.BACKWARD):
                run_backward()
            if deferred:
                private.set_requires_gradient_sync(self.unit_modules, True)
            self._after_backward(deferred)
        self._transport.awaits_step(self._sync and self.automatic)

    def _before_reduce(self, group: private.Group) -> bool:
        """Completes the gradients of a group that is about to be reduced.

        A ``torch.autograd.grad`` of the user's own must leave everything as it is: gathered, and unreduced. So does a
        plain ``loss.backward()`` under manual optimization, whose gradients are reduced when the optimizer steps.
        """
        if self._phase is not Phase.BACKWARD:
            return False
        if group.reduce_grads:
            params = private.trainable(group)
            if group in self._root_groups or any(private.has_grad(p) for p in params):
                self._usage.complete(params)
                self._reduced.add(id(group))
                self._transport.reduction_begins(group)
        return True

    def _after_backward(self, deferred: bool) -> None:
        self._transport.backward_ends()
        for group in self._groups if self._sync or self.config.stage > 1 else ():
            params = private.trainable(group)
            late = any(private.has_grad(p) for p in params)
            missed = group in self._root_groups and id(group) not in self._reduced
            if params and (late or missed or deferred):
                self._usage.complete(params)
                private.reduce_now(group)
        if self._sync or not self.keep_gathered:
            self.reshard()
        if self._sync:
            self._usage.reduce_replicated()
            self._usage.close_window(requires_same_units=not self._transport.gathers_up_front)

    # -- optimizer -----------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        try:
            return self._sharded_step(optimizer).step(self._closure(closure), **kwargs)
        finally:
            self._transport.step_ends()

    def _wait_for_host_copies(self) -> None:
        """Parameters on their way up must leave before the step writes to them. The backward has waited for the last
        gradient to come down, so mostly nothing is left; a forward without backward may be."""
        if self._apart:
            torch.get_device_module(self.device).synchronize(self.device)

    def _closure(self, closure: Callable[[], Any] | None) -> Callable[[], Any]:
        def evaluate() -> Any:
            result = None if closure is None else closure()
            with DisableTorchFunction():
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
            self._transport.step_ends()

    def gradients(self, optimizer: Optimizer) -> Gradients:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        shards = [local(grad) for grad in grads if isinstance(grad, DTensor)]
        wholes = [grad for grad in grads if not isinstance(grad, DTensor)]
        home = torch.device("cpu") if self._on_host else self.device
        # Along the shard axis only: replicas hold the same shards, and each counts once
        return Gradients(shards, wholes, home, self.mesh.get_group("shard") if self.mesh.size() > 1 else None)

    # -- whole state ---------------------------------------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Any]:
        with torch.no_grad(), DisableTorchFunction():
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
        with DisableTorchFunction():
            return self._sharded_step(optimizer).state_dict()

    @contextmanager
    def full_parameters(self, modify: bool = False) -> Iterator[None]:
        with torch.no_grad(), DisableTorchFunction():
            self.reshard()
            whole = {p: nn.Parameter(gathered(p), p.requires_grad) for p in self._originals}
            versions = {p: version_of(w) for p, w in whole.items()}
            self._register(whole)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._in(Phase.WHOLE))
                for unit in self.unit_modules:
                    stack.enter_context(private.without_hooks(unit))
                yield
        finally:
            with torch.no_grad(), DisableTorchFunction():
                self._register({p: p for p in whole})
                if modify:
                    broadcast_coalesced([*whole.values(), *self._replicated])
                    self._wait_for_host_copies()
                    for p, w in whole.items():
                        local(p).copy_(local(shard_like(w, p)))  # type: ignore[arg-type]
        if not modify and any(version_of(w) != versions[p] for p, w in whole.items()):
            raise RuntimeError(
                "full_parameters(module): parameters were written to, and what was written is lost: use"
                " full_parameters(module, modify=True)."
            )

    def _register(self, instead: Mapping[Tensor, Tensor]) -> None:
        for group in self._groups:
            for sharded, places in list(private.registrations(group)):
                for module, name in places:
                    own_parameters(module)[name] = instead[sharded]  # type: ignore[assignment]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self._sharded_step(optimizer).load_state_dict(state)

    # -- the end -------------------------------------------------------------------------------------------------

    def model_state(self, optimizers: Iterable[Optimizer]) -> ModelState:
        state = ModelState()
        with DisableTorchFunction():
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
        with torch.no_grad(), DisableTorchFunction():
            self._drop_gathered()
            if not whole:  # maybe after an error: others need not come any more
                return
            self._transport.await_readers()
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
            self._transport.close()
            self._usage.close()
            for unit in self.unit_modules:
                private.undo(unit)
            for optimizer in optimizers:
                hand_back(optimizer, self._originals, self.states_whole_after_fit)


def _unpadded(whole: Tensor) -> Tensor:
    """``whole`` in memory of its own size: what it lies in may have room for larger shards."""
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


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
