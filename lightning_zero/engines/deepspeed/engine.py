"""ZeRO on ``deepspeed.initialize``.

[Tensors] (see ``private`` for flats, masters and pieces)
- *parameter*: always the user's own ``nn.Parameter`` object. At stages 1 and 2 a full tensor, a view of DeepSpeed's
  buffer; at stage 3 empty between uses.
- *gradient*: averaged, one piece per rank, from the backward until ``zero_grad``; full only while user code reads it.
- *odd parameter*: a parameter that cannot be sharded, because DeepSpeed's flats do not take it (0-dim, empty, or of a
  dtype other than that of most elements). It stays full on every rank, and this engine averages its gradient.

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

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lightning_zero.comm.agree import Agreement, broadcast_coalesced, run_agreement, shared_agreement
from lightning_zero.comm.barrier import Barrier
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.after_run import leave_states
from lightning_zero.engines.base import Engine, Root, refuse_late_hooks
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.gradients import Gradients
from lightning_zero.engines.deepspeed.optimizer_step import Joined, Managed, Pieces, parameters
from lightning_zero.engines.deepspeed.order import Order
from lightning_zero.engines.deepspeed.parameters import Parameters
from lightning_zero.engines.deepspeed.phase import Phase, UnderWay
from lightning_zero.engines.deepspeed.reductions import Reductions
from lightning_zero.engines.deepspeed.start import flat_groups, start
from lightning_zero.engines.deepspeed.state import Account
from lightning_zero.engines.deepspeed.store import DeepSpeedStore
from lightning_zero.engines.deepspeed.usage import Usage
from lightning_zero.engines.deepspeed.whole import Whole
from lightning_zero.engines.graph_inputs import GraphInputs
from lightning_zero.engines.graphs import outside_graphs
from lightning_zero.engines.model_state import ModelState
from lightning_zero.engines.optimizer_step import ShardedStep
from lightning_zero.engines.plain_copies import PlainCopies, pickle_plainly
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.refusals import (
    refuse_held_views,
    refuse_script_modules,
    refuse_sparse_gradients,
    refuse_tracing,
    refuse_transforms,
)
from lightning_zero.engines.residency import Guards, Memories, Mode, Residency, budget_bytes
from lightning_zero.private.torch import (
    DisableTorchFunction,
    EnableTorchFunction,
    forget_meshes,
    is_compiled,
    translate_transformed,
)


class _Root(Root):
    """Returns a list, because DeepSpeed inspects results of other types."""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [super().forward(method, *args, **kwargs)]


class DeepSpeedEngine(Engine):
    """Runs ZeRO on DeepSpeed: the plan is in this module's docstring, the contract in
    :class:`~lightning_zero.engines.base.Engine`."""

    stays_after_run = True

    def __init__(self, config: ZeroConfig, device: torch.device, dtypes: DtypePolicy) -> None:
        super().__init__(config, device, dtypes)
        self._engine: Any = None  # DeepSpeed's, once attached
        self._accumulators: list[Node] = []  # keeps them alive: otherwise autograd creates new ones
        self._handles: list[Any] = []
        self._agreement: Agreement | None = None
        self._optimizers: list[Optimizer] = []
        self._steps: weakref.WeakKeyDictionary[Optimizer, ShardedStep] = weakref.WeakKeyDictionary()
        self._stage3 = config.stage == 3
        self._under_way = UnderWay()

    # -- set-up --------------------------------------------------------------------------------------------------

    def view(self) -> Mode:
        return self._residency.mode

    def shard(self, module: nn.Module) -> None:
        self.module = module
        self.root = _Root(module)
        refuse_late_hooks(dict(module.named_parameters()))
        refuse_held_views(module)
        if self._stage3:
            refuse_script_modules(module)
            _refuse_compiled(module)
        self._params = Parameters(module, self._stage3)
        self.whole_bytes = sum(shape.numel() * p.element_size() for p, shape in self._params.shapes.items())
        if dist.get_world_size() > 1 and self.config.find_unused_parameters:
            self._agreement = run_agreement() or shared_agreement(self.config.timeout_seconds)
        forget_meshes()
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        self._order = Order(self._params, self._agreement, self.device.type == "cpu", self._under_way)
        self._usage = Usage(self._params, self.config, self._agreement)
        self._begin_residency()
        self._whole = Whole(self._params, self.mesh)
        self._graphs = GraphInputs(self._store.own, self._residency)

    def _begin_residency(self) -> None:
        params, memories = self._params, Memories()
        self._gradients = Gradients(params, self._under_way, self._usage)
        self._store = DeepSpeedStore(
            params.held, params.named, self._stage3, self._under_way, memories, self._gradients,
            lambda: params.managed, self.backward, self._before_bring,
        )  # fmt: skip
        agreement = run_agreement()  # None in a bare loop, where every rank makes the same reads
        meets = agreement is not None and dist.get_world_size() > 1
        barrier = Barrier(agreement) if meets and agreement is not None else None
        budget = budget_bytes(self.config.hook_budget_bytes, self.device, agreement)
        self._residency = Residency(self._store, self._under_way.is_between, barrier, memories, budget)
        self._store.residency = self._residency
        self._guards = Guards(self._residency, params.held)
        self._store.watch = self._guards.watch_all
        self._end_transforms = translate_transformed(self._touched)

    def _touched(self, value: Any) -> Any:
        """Touches ``value`` before ``torch.func`` wraps it in another object, and returns ``value``."""
        if id(value) in self._store.own:
            self._residency.touch([value], brings=torch.is_grad_enabled())
        return value

    def _before_bring(self, p: Tensor) -> None:
        self._order.gathers(p)

    def attach(self, optimizers: list[Optimizer], trainer: Mapping[str, Any]) -> None:
        """Hands the module to DeepSpeed, grouped as ``optimizers`` group its parameters."""
        params = self._params
        self._optimizers = self.optimizers = optimizers
        self.trainer_facts = trainer
        self.check_parameters()
        if optimizers:
            refuse_sparse_gradients(self.module)
        self.end_window(meets=False)  # ends the window of configure_optimizers
        params.before_start()
        trainable = [p for p in params.named.values() if p.requires_grad and p in params.held]
        for p in params.held:
            p.data = p.data.contiguous()  # DeepSpeed views the memory as bytes
        copies = PlainCopies(params.module, private.is_on_modules)
        joined = Joined(flat_groups(trainable, optimizers)) if optimizers and trainable else None
        self._usage.follow(trainable)
        self._engine = start(
            self.root, params, trainable, joined, self.config, self.device, self.dtypes.is_mixed, trainer
        )
        if self._stage3:
            self._linear = private.take_linear()
            private.expect_in_flight(self._engine, self.root, params.held)
            private.let_inputs_change(self._engine, self.root)
            private.without_residency(self._engine, self._rests)
            private.after_modules(self._engine, self._gathered)
            # Must follow without_residency, which replaces the same hooks: ranks agree before DeepSpeed sees a module.
            self._order.follow(self._engine, joined is not None)
            private.before_modules(self._engine, self._refuse_gather)  # the hook added last runs first
            self._handles = [
                m.register_forward_pre_hook(self._store.bring_given, prepend=True, with_kwargs=True)
                for m in self.module.modules()
            ]
            self._accumulators = [_whole_accumulator(p, self._params.shapes[p]) for p in trainable]
        if joined is not None:
            shards = (private.Shards3 if self._stage3 else private.Shards12)(self._engine)
            params.managed = Managed(shards, params.shapes, params.attributes)
            self._reductions = Reductions(
                self._engine, trainable, self.config.stage, self.config.find_unused_parameters, self._under_way
            )
            for optimizer in optimizers:
                self._step_of(optimizer)  # shards the states that exist already
                optimizer.zero_grad = self._gradients.zero_grad_of(optimizer)  # type: ignore[method-assign]
        self._store.begin()
        copies.begin()  # undone by private.end
        pickle_plainly(params.held, self._plain, params.attributes)
        params.after_start()

    def _rests(self) -> bool:
        """Whether DeepSpeed's module hooks do nothing: between steps parameters are gathered when touched."""
        return self._under_way.is_between() or Phase.WHOLE in self._under_way

    def _gathered(self, module: nn.Module) -> None:
        if not self._rests():
            with torch.no_grad(), DisableTorchFunction():
                self._store.go_where_it_is_held()  # for all parameters: this gather may include another module's

    def _refuse_gather(self, module: nn.Module) -> None:
        if Phase.WHOLE not in self._under_way:
            refuse_tracing()
            refuse_transforms("stage 3 of engine='deepspeed'", "stage=2, engine='fsdp2'")

    def _plain(self, p: Tensor) -> Tensor:
        """Returns a copy of the full values of ``p`` (collective at stage 3)."""
        self._residency.touch([p])
        with torch.no_grad(), DisableTorchFunction():
            return p.detach().clone()

    @property
    def known_parameters(self) -> Collection[Tensor]:
        return self._params.shapes

    # -- forward -------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        if self.hooks.anywhere:
            self._residency.meet()

    def end_window(self, meets: bool = True) -> None:
        with torch.no_grad(), DisableTorchFunction():
            self._residency.end_window()
            if meets:
                self._residency.meet()

    def _settle(self) -> None:
        """Stores all that user code wrote to parameters and gradients. Call before a master or a piece is read."""
        self._settle_parameters()
        self._gradients.flush()

    def _settle_parameters(self) -> None:
        with torch.no_grad(), DisableTorchFunction():
            self._residency.end_window()
            self._store.settle()

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        wants_grad = torch.is_grad_enabled()
        self.end_window(self.hooks.before_forward and wants_grad)
        if not wants_grad and self._stage3 and not self._residency.all_run():
            # This rank's loop is longer: the other ranks only serve the parameters that it touches.
            return getattr(self.module, method)(*args, **kwargs)
        self.broadcast_buffers()
        with self._in(Phase.STEP):
            with torch.inference_mode(False), torch.set_grad_enabled(wants_grad):
                with torch.no_grad(), DisableTorchFunction():
                    self._store.go_where_it_is_held()
                output = self.root(method, *args, **kwargs)[0]
                self._order.gathers()
                return output

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        linear = private.linear(self._linear) if self._stage3 else nullcontext()
        with self._under_way.during(phase), self._guards.instead_of_mode(), linear:
            yield

    def reshard(self) -> None:
        """Does nothing: DeepSpeed reshards after each module and in each step, and user writes are tracked at once."""

    # -- backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.reduces = False
        try:
            yield
        finally:
            self.reduces = True

    def backward(self, run_backward: Callable[[], None], retains_graph: bool = False) -> None:
        self.end_window(self.hooks.before_backward)
        shards, usage = self._params.attached.shards, self._usage
        if (name := usage.unfrozen()) is not None:
            raise ValueError(
                f"parameter {name!r} was unfrozen after the run began, but DeepSpeed allocates memory only for"
                " parameters trained from the start: use engine='fsdp2', or unfreeze it before the fit."
            )
        # Must happen before DeepSpeed adds to the pieces: otherwise user writes to gradients are lost.
        self._gradients.flush(averages=True)
        sync = self.reduces
        if retains_graph and Phase.STEP in self._under_way:
            self._store.keep_all()
        with DisableTorchFunction():
            with self._in(Phase.BACKWARD):
                if not usage.window_open:
                    shards.before_backward(self._params.attached.with_grad)
                    usage.window_open = True
                usage.begin_backward()
                # Stage 2 reduces every micro-batch, and its gradients are taken at once: with offload, DeepSpeed's own
                # sum is wrong for parameters that some micro-batches do not use.
                takes = not self._stage3 and (sync or self.config.stage == 2)
                if takes:
                    shards.before_reductions()
                self._engine.set_gradient_accumulation_boundary(takes)
                self._reductions.begin(takes or self._stage3, waits=self.backward_is_users)
                run = self._seen_by_user(run_backward) if self.backward_is_users else run_backward
                private.backward(self._engine, run, self._reductions.end)
                usage.end_backward()
                shards.after_backward(takes)
            if sync:
                usage.end_window(self._reductions, self._order)

    def end_reads(self, together: bool) -> None:
        self.end_window(together and self.hooks.anywhere)

    def _seen_by_user(self, run_backward: Callable[[], None]) -> Callable[[], None]:
        """Keeps user-code checks on in an overridden ``LightningModule.backward``, which may read ``p.grad`` early."""

        def run() -> None:
            with EnableTorchFunction():
                run_backward()

        return run

    # -- optimizer -----------------------------------------------------------------------------------------------

    @outside_graphs
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        result = self._step_of(optimizer).step(closure, **kwargs)
        self._stepped(optimizer)
        return result

    def _stepped(self, optimizer: Optimizer) -> None:
        with torch.no_grad(), DisableTorchFunction():
            self._store.stepped(self._params.attached.with_grad.intersection(parameters(optimizer)))

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        with self._step_of(optimizer).stepping():
            yield
        self._stepped(optimizer)

    @contextmanager
    def on_shards(self, optimizer: Optimizer) -> Iterator[None]:
        self._settle_all()
        with self._step_of(optimizer).on_shards():
            yield

    def _settle_all(self) -> None:
        self.end_window(self.hooks.before_step)
        self._settle()

    @contextmanager
    def _full_step(self, is_running: bool) -> Iterator[None]:
        self._settle()
        with self._residency.together(is_running):
            yield
        self._settle()

    def _step_of(self, optimizer: Optimizer) -> ShardedStep:
        if optimizer not in self._steps:
            parts = Pieces(
                self._params.attached, self._piece_of, self._store.state, self._settle_all, self._settle,
                self._full_step,
            )  # fmt: skip
            declared = self.config.elementwise_optimizers or ()
            self._steps[optimizer] = ShardedStep(optimizer, parts, declared, self.config.offloads_optimizer)
        return self._steps[optimizer]

    def _piece_of(self, value: Any) -> Tensor | None:
        found = self._store.known_state(value)
        return None if found is None else found.piece

    def _leave_states(self, full: bool) -> None:
        self._whole.states_as_rows(self._optimizers, self._store.known_state)
        leave_states(self._optimizers, full)

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        managed = self._params.attached
        self.end_window(self.hooks.before_step)
        self._gradients.flush()
        odd = [p.grad for p in parameters(optimizer) if p not in managed and p.grad is not None]
        return list(managed.grads(optimizer)), odd

    # -- full state ----------------------------------------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Any]:
        self.end_window(self.hooks.anywhere)
        self._settle_parameters()
        with torch.no_grad(), DisableTorchFunction():
            return self._whole.state_dict()

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.end_window(self.hooks.anywhere)
        with torch.no_grad(), self.view():
            state = optimizer.state_dict()
        with torch.no_grad(), DisableTorchFunction():
            self._residency.end_window()
            return self._whole.optimizer_state(state, self._store.known_state)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self.end_window(self.hooks.anywhere)
        with self.view():
            self._step_of(optimizer).load_state_dict(state)

    def whole_parameters(self) -> dict[Tensor, nn.Parameter]:
        self.end_window(self.hooks.anywhere)
        self._settle_parameters()
        return self._whole.parameters()

    def whole_on_module(self) -> AbstractContextManager[None]:
        return self._under_way.during(Phase.WHOLE)

    def store_whole(self, whole: Mapping[Any, Tensor]) -> None:
        broadcast_coalesced([*whole.values(), *self._params.odd])
        with torch.no_grad(), DisableTorchFunction():
            for p, w in whole.items():
                self._store.put(p, w.detach())

    # -- the end -------------------------------------------------------------------------------------------------

    def model_state(self, optimizers: Iterable[Optimizer]) -> ModelState:
        params = self._params
        with torch.no_grad(), DisableTorchFunction():
            account = Account(self.config, self.device, params.shapes)
            account.parameters(params.odd)
            account.odd_gradients(params.odd)
            if params.managed is not None:
                account.managed(params.managed)
            account.optimizers(optimizers, self._store.known_state, params.odd)
        return account.state

    def restore(self, whole: bool) -> None:
        self._graphs.end()
        self._end_transforms()
        self._settle_parameters()  # before masters are read
        _give_methods_back(self._optimizers)  # even if the module stays sharded
        if not whole:
            return
        with torch.no_grad(), DisableTorchFunction():
            values = self._whole.values_afterwards()
            self._leave_states(self.config.after_fit == "whole")
            held = self._residency.held()
            self._take_off(values)
            self._store.end()
            for place, p in held:
                place.copy_(p)
            self._agreement = None

    def _take_off(self, values: Mapping[Tensor, Tensor]) -> None:
        """Detaches DeepSpeed from the module and the optimizers; parameters hold ``values`` and no gradients.

        ``values`` must be read before this call, which drops the layout of the pieces.
        """
        _give_methods_back(self._optimizers)
        self._usage.close()
        private.end(self._engine, self.root, {id(p): set(self._params.attributes(p)) for p in self._params.shapes})
        for p, value in values.items():
            p.grad = None
            p.data = value
        self._params.managed = None
        self._accumulators.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._steps.clear()
        self._engine = None


def _whole_accumulator(p: Tensor, shape: torch.Size) -> Node:
    """Creates the autograd node that adds to ``p.grad``, for gradients of the full ``shape``.

    The node takes its shape from ``p`` at the first use in a graph, and an ``autograd.Function`` (including DeepSpeed's
    own around each module) may receive parameters that are still resharded, hence empty."""
    cut = p.data
    try:
        p.data = cut.new_empty(1).expand(shape)
        return get_gradient_edge(p).node
    finally:
        p.data = cut


def _give_methods_back(optimizers: Iterable[Optimizer]) -> None:
    """Removes the ``zero_grad`` that :meth:`DeepSpeedEngine.attach` sets, so that the class's own is used again."""
    for optimizer in optimizers:
        optimizer.__dict__.pop("zero_grad", None)


def _refuse_compiled(module: nn.Module) -> None:
    """Raises ``ValueError`` for a compiled module at stage 3.

    DeepSpeed's hooks break the graph before each submodule, and parameters change their shape from use to use."""
    for name, each in module.named_modules():
        if is_compiled(each):
            raise ValueError(
                f"engine='deepspeed' at stage 3: module {name or type(each).__name__!r} is compiled, but DeepSpeed"
                " gathers before each submodule, which breaks the graph there: use engine='fsdp2' or stage=2, or"
                " leave the module uncompiled."
            )
