"""ZeRO on ``deepspeed.initialize``.

[Tensors] (see ``private`` for flats, masters and pieces)
- *parameter*: always the user's own ``nn.Parameter`` object, of its full shape. At stages 1 and 2 a view of DeepSpeed's
  buffer; at stage 3 without memory between uses.
- *gradient*: averaged, one piece per rank, from the backward until ``zero_grad``; full only while user code reads it.
- *replicated parameter*: a frozen parameter that is empty or of another dtype than the trained ones. It stays full on
  every rank, because DeepSpeed's flats have one dtype. Such a parameter cannot be trained.

[Plan of one optimizer step, A micro-batches]

    stage   gather                          reduce (gradients)
    1       all, after the step             after the last one
    2       all, after the step             after each
    3       each module, forward, backward  after each

DeepSpeed reduces, gathers and offloads. Users' own optimizers step on DeepSpeed's masters (``optimizer_step``), so any
number of optimizers, any class, any schedule and any clipping behave as under DDP. DeepSpeed's own clipping and loss
scaling are off.

[Where DeepSpeed alone differs from DDP, and the repair]
- *Unused parameters.* DeepSpeed holds zeros or the previous step's gradient for them. Ranks agree (one small
  all-reduce) which parameters no rank used; these have no gradient and are not stepped. If only some ranks used a
  parameter, the others add zeros. Gradients are handed to DeepSpeed in one order on all ranks (``reductions``).
- *Modules that only some ranks run* cannot be gathered at stage 3. CPU ranks compare before each gather which module
  comes next; if they differ, every rank raises an error that names the modules.
- *Rank 0's values.* Parameters and buffers are broadcast at the start, buffers again at each synchronized forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lightning_zero.comm.agree import Agreement, broadcast_coalesced, run_agreement, shared_agreement
from lightning_zero.comm.shards import to_host
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.after_run import leave_states
from lightning_zero.engines.base import Engine, Root, refuse_late_hooks, undetached_state_dict
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.full_state import FullState
from lightning_zero.engines.deepspeed.gradients import Gradients
from lightning_zero.engines.deepspeed.optimizer_step import Joined, Pieces, parameters
from lightning_zero.engines.deepspeed.order import Order
from lightning_zero.engines.deepspeed.parameters import Parameters, Phase
from lightning_zero.engines.deepspeed.reductions import Reductions
from lightning_zero.engines.deepspeed.store import DeepSpeedStore
from lightning_zero.engines.materialize import Materializer, in_order_of_construction
from lightning_zero.engines.model_state import ModelState
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
from lightning_zero.private.torch import (
    DisableTorchFunction,
    forget_meshes,
    is_compiled,
    own_parameters,
)


class DeepSpeedEngine(Engine):
    """Runs ZeRO on DeepSpeed: the plan is in this module's docstring, the contract in
    :class:`~lightning_zero.engines.base.Engine`."""

    def __init__(self, config: ZeroConfig, device: torch.device, dtypes: DtypePolicy) -> None:
        super().__init__(config, device, dtypes)
        self._engine: Any = None  # DeepSpeed's, once attached
        self._agreement: Agreement | None = None
        self._optimizers: list[Optimizer] = []
        self._stage3 = config.stage == 3
        self.settings: dict[str, Any] = {}
        """The config for ``deepspeed.initialize``; set before :meth:`shard`."""

    # -- set-up --------------------------------------------------------------------------------------------------

    def shard(self, module: nn.Module) -> None:
        self.module = module
        self.root = Root(module)
        refuse_late_hooks(dict(module.named_parameters()))
        refuse_held_views(module)
        if self._stage3:
            refuse_script_modules(module)
            _refuse_compiled(module)
        self._params = Parameters(module, self._stage3)
        self.total_bytes = sum(p.nbytes for p in self._params.named.values())
        if dist.get_world_size() > 1 and self.config.find_unused_parameters:
            self._agreement = run_agreement() or shared_agreement(self.config.timeout_seconds)
        forget_meshes()
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        self._order = Order(self._params, self._agreement, self.device.type == "cpu")
        self._reductions = Reductions(self._params, self.config, self._agreement)
        self._begin_residency()
        self._start_from_rank_0()
        self._full = FullState(self._params, self._store.states, self.mesh)

    def _start_from_rank_0(self) -> None:
        """Broadcasts rank 0's values. At stage 3 parameters are sharded at once, module by module in the order of
        construction, so that a module on the meta device is never full (collective)."""
        params = self._params
        if not self._stage3:
            broadcast_coalesced([*params.named.values(), *self.module.buffers()])
            return
        materializer = Materializer(self.module, self.device, self._initializing)
        groups: dict[nn.Module, list[Any]] = {m: [] for m, _ in in_order_of_construction(self.module)}
        # The last module that has a tied parameter shards it.
        for p, owner in {p: m for m in groups for p in own_parameters(m).values() if p in params.held}.items():
            groups[owner].append(p)
        with private.environment(self.device):
            private.prepare(self.device)
            shard = private.sharder(self.settings)
            for m, group in groups.items():
                materializer.materialize(m, group)
                self._take_from_rank_0(group)
                shard(group)
        rest = [*params.replicated, *self.module.buffers()]
        materializer.materialize(self.module, rest)
        materializer.finish()
        self._take_from_rank_0(rest)

    def _take_from_rank_0(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.data = tensor.data.to(self.device)
        broadcast_coalesced(list(tensors))

    @contextmanager
    def _initializing(self) -> Iterator[None]:
        """Context of an initializer, which may write to parameters that are sharded already."""
        with self.view():
            yield
        self.end_window(waits=False)

    def _begin_residency(self) -> None:
        params = self._params
        self._views = Views({id(p): name for name, p in params.named.items()})
        self._gradients = Gradients(params, self._reductions)
        self._store = DeepSpeedStore(params, self._views, self._gradients, self.backward, self._order.gathers)
        self.reside(self._store, params.is_between)
        self._store.residency = self.residency

    def attach(self, optimizers: list[Optimizer], trainer: Any) -> None:
        """Hands the module to DeepSpeed, grouped as ``optimizers`` group its parameters."""
        params = self._params
        self._optimizers = self.optimizers = optimizers
        self.check_parameters()
        if optimizers:
            refuse_sparse_gradients(self.module)
            self._refuse_own_backward()
            params.refuse_training_replicated()
        self.end_window(waits=False)  # ends the window of configure_optimizers
        trainable = [p for p in params.named.values() if p.requires_grad and p in params.held]
        copies = PlainCopies(self.module, private.ON_MODULES.__contains__)
        joined = Joined(trainable, optimizers) if optimizers and trainable else None
        self._trained = set(trainable)
        self._engine = self._start(trainable, joined)
        if self._stage3:
            private.ModuleHooks(self._engine, self.root, params.is_between, self._before_module)
            if joined is not None:
                self._order.follow_buckets(self._engine)
        if joined is not None:
            params.shards = (private.Shards3 if self._stage3 else private.Shards12)(self._engine)
            self._reductions.follow(self._engine, trainable)
            for optimizer in optimizers:
                self.step_of(optimizer)  # shards the states that exist already
                optimizer.zero_grad = self._gradients.zero_grad_of(optimizer)  # type: ignore[method-assign]
        self._store.begin()
        copies.begin()  # undone by private.end
        private.pickle_plainly(params.held)

    def _start(self, trainable: list[nn.Parameter], joined: Joined | None) -> Any:
        """Returns DeepSpeed's engine, whose flats hold ``trainable``, grouped as in ``joined`` (collective)."""
        params = self._params
        with private.environment(self.device), params.without_others(self.root):
            deepspeed = private.prepare(self.device)
            sharded = params.held if self._stage3 else ()
            with DisableTorchFunction(), private.starting(Joined, sharded), private.marking(params.held):
                engine, *_ = deepspeed.initialize(
                    model=self.root,
                    optimizer=joined,
                    model_parameters=trainable,
                    config=self.settings,
                    dist_init_required=False,
                )
        return engine

    def _before_module(self, module: nn.Module) -> None:
        refuse_tracing()
        refuse_transforms("stage 3 of engine='deepspeed'", "stage=2, engine='fsdp2'")
        self._order.gathers(module)

    @property
    def known_parameters(self) -> Collection[Tensor]:
        return set(self._params.named.values())

    # -- forward -------------------------------------------------------------------------------------------------

    def close_windows(self) -> None:
        self._store_parameters()
        self._gradients.flush()

    def _store_parameters(self) -> None:
        with torch.no_grad(), DisableTorchFunction():
            self.residency.end_window()
            self._store.settle()

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        wants_grad = torch.is_grad_enabled()
        self.end_window(self.hooks.before_forward and wants_grad)
        if not wants_grad and self._stage3 and not self.residency.all_run():
            # This rank's loop is longer: the other ranks only serve the parameters that it touches.
            return getattr(self.module, method)(*args, **kwargs)
        self.broadcast_buffers()
        with self._in(Phase.STEP):
            with torch.inference_mode(False), torch.set_grad_enabled(wants_grad):
                output = self.root(method, *args, **kwargs)
                self._order.gathers()
            if not wants_grad and self._store.is_keeping:
                self._reshard_all()
            return output

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        with self._params.during(phase), private.linear_without_weights() if self._stage3 else nullcontext():
            yield

    # -- backward ------------------------------------------------------------------------------------------------

    def backward(self, run_backward: Callable[[], None], retains_graph: bool = False) -> None:
        self.end_window(self.hooks.before_backward)
        shards, reductions = self._params.attached, self._reductions
        self._refuse_unfrozen()
        # Must happen before DeepSpeed adds to the pieces: otherwise user writes to gradients are lost.
        self._gradients.flush(averages=True)
        sync = self.reduces
        if retains_graph and self._params.phase is Phase.STEP:
            self._store.keep_all()
        with DisableTorchFunction():
            with self._in(Phase.BACKWARD):
                if not reductions.window_open:
                    shards.before_backward()
                    reductions.window_open = True
                # Stage 2 reduces every micro-batch, and its gradients are taken at once: with offload, DeepSpeed's own
                # sum is wrong for parameters that some micro-batches do not use.
                reduces = sync or self.config.stage > 1
                if reduces:
                    shards.before_reductions()
                self._engine.set_gradient_accumulation_boundary(reduces and not self._stage3)
                reductions.begin(reduces)
                private.backward(self._engine, run_backward, reductions.end)
                if reduces:
                    shards.after_reductions()
            if sync:
                reductions.end_window(self._order)

    def _refuse_unfrozen(self) -> None:
        """Raises ``ValueError`` if a parameter was frozen when DeepSpeed laid out its flats and is trainable now."""
        with DisableTorchFunction():
            late = [n for n, p in self._params.named.items() if p.requires_grad and p not in self._trained]
        if late:
            raise ValueError(
                f"parameter {late[0]!r} was unfrozen after the run began, but DeepSpeed allocates memory only for"
                " parameters trained from the start: use engine='fsdp2', or unfreeze it before the fit."
            )

    def _refuse_own_backward(self) -> None:
        """Raises ``ValueError`` for an overridden ``LightningModule.backward``: DeepSpeed takes gradients as they
        arrive, so such code could neither read them nor go backward again."""
        if self.backward_is_users:
            raise ValueError(
                f"{type(self.module).__name__}.backward overrides LightningModule.backward, which engine='deepspeed'"
                " does not support: scale or combine losses in training_step, or use engine='fsdp2'."
            )

    # -- optimizer -----------------------------------------------------------------------------------------------

    def stepped(self, optimizer: Optimizer) -> None:
        with torch.no_grad(), DisableTorchFunction():
            self._store.stepped(self._params.attached.with_grad.intersection(parameters(optimizer)))

    def settle(self) -> None:
        self.end_window(self.hooks.before_step)
        self._reshard_all()
        self.close_windows()
        self._views.settle()

    def _reshard_all(self) -> None:
        """Reshards the parameters that are still gathered at stage 3, and stores what user code wrote to them."""
        if self._stage3:
            self._store.is_keeping = False
            with torch.no_grad(), DisableTorchFunction():
                private.release_all(self._engine)

    def sharded_step(self, optimizer: Optimizer, declared: Collection[str]) -> ShardedStep:
        parts = Pieces(self._params.attached, self._store.states, self.settle, self.close_windows, self.full_step)
        return ShardedStep(optimizer, parts, declared, self.config.offloads_optimizer)

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        shards = self._params.attached
        self.end_window(self.hooks.before_step)
        self._gradients.flush()
        return [shards.grad(p) for p in parameters(optimizer) if p in shards.with_grad], []

    # -- full state ----------------------------------------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Any]:
        self.end_window(self.hooks.anywhere)
        self._store_parameters()
        with torch.no_grad(), DisableTorchFunction():
            return self.in_shards(undetached_state_dict(self.module))

    def in_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        return self._full.in_rows(state)

    # -- the end -------------------------------------------------------------------------------------------------

    def model_state(self, optimizers: Iterable[Optimizer]) -> ModelState:
        with torch.no_grad(), DisableTorchFunction():
            return self._full.model_state(optimizers, self.config)

    def restore(self, full: bool) -> None:
        self.end_residency()
        self._store_parameters()  # before masters are read
        with torch.no_grad(), DisableTorchFunction():
            values = {p: to_host(private.gathered_copy(p)) for p in self._params.named.values()} if full else {}
            self._full.leave_states(self._optimizers, self.failed)
            leave_states(self._optimizers, full and self.config.after_fit == "whole")
            if self._stage3 and not full:
                self._full.leave_parameters(self.failed)
            self._take_off()
            for p in self._params.named.values():
                p.grad = None
            for p, value in values.items():
                p.data = value

    def _take_off(self) -> None:
        """Detaches DeepSpeed from the module and the optimizers, and drops its memory."""
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("zero_grad", None)  # which attach() has set, so that the class's own is used again
        private.end(self._engine, self.root, self.failed)
        self._store.end()
        self._params.shards = None
        self._steps.clear()
        self._engine = self._agreement = None


def _refuse_compiled(module: nn.Module) -> None:
    """Raises ``ValueError`` for compiled code of a module at stage 3.

    DeepSpeed's hooks break the graph before each submodule."""
    for name, each in module.named_modules():
        if is_compiled(each):
            raise ValueError(
                f"engine='deepspeed' at stage 3: module {name or type(each).__name__!r} is compiled, or holds a"
                " compiled function, but DeepSpeed gathers before each submodule, which breaks the graph there: use"
                " engine='fsdp2' or stage=2, or leave out torch.compile."
            )
