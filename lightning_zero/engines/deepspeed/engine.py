"""ZeRO on ``deepspeed.initialize``.

[Tensors] (see ``deepspeed_private`` for flats, masters and pieces)
- *parameter*: the user's own ``nn.Parameter`` object all the time. At stages 1 and 2 whole, a view of DeepSpeed's
  buffer; at stage 3 empty between uses.
- *gradient*: averaged, one piece per rank, from the backward until ``zero_grad``; whole only while user code looks.
- *odd parameter*: one that DeepSpeed's flats do not take (0-dim, empty, of another dtype than most): whole on every
  rank all the time, its gradient averaged by us.

[Plan of one optimizer step, A micro-batches]

    stage   gather                          reduce (gradients)
    1       all, after the step             after the last one
    2       all, after the step             after each
    3       each module, forward, backward  after each

DeepSpeed reduces, gathers, offloads and swaps; users' own optimizers step on its masters (``deepspeed_optim``), so any
number of them, any class, any schedule and any clipping do what they do under DDP. DeepSpeed's own clipping and loss
scaling are off.

[What DDP does that DeepSpeed alone does not]
- *Unused parameters.* DeepSpeed has zeros or the step before's gradient there. Ranks agree (one small all-reduce) which
  parameters nobody used; these have no gradient and are not stepped. Where only some ranks used one, the others add
  zeros; stages 1 and 2 therefore reduce at the end of the backward, in fixed order.
- *Modules that only some ranks run* cannot be gathered at stage 3: on the CPU ranks say before each gather which module
  comes next, and an error on all of them names it.
- *Rank 0's values.* Parameters and buffers are broadcast at the start, buffers again at each synchronized forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm import direct
from lightning_zero.comm.agree import all_reduce_mean, broadcast_coalesced
from lightning_zero.comm.shards import gathered
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.base import (
    Engine,
    Root,
    refuse_late_hooks,
    require_same_parameters,
    undetached_state_dict,
)
from lightning_zero.engines.deepspeed import private
from lightning_zero.engines.deepspeed.ds_config import RunFacts, ds_config, gathered_together
from lightning_zero.engines.deepspeed.optimizer_step import (
    CpuAdam,
    Cut,
    Joined,
    Managed,
    Only,
    PieceStep,
    fused,
    parameters,
)
from lightning_zero.engines.deepspeed.state import Account
from lightning_zero.engines.deepspeed.view import ShardView
from lightning_zero.engines.elementwise import is_known
from lightning_zero.engines.model_state import ModelState
from lightning_zero.engines.optimizer_family import family, own_methods
from lightning_zero.engines.optimizer_step import between_hooks
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.private.torch import DisableTorchFunction, own_parameters, version_of

_BUCKETS = -(2**40)
"""Numbers from here downwards stand for buckets of gradients."""


class _Root(Root):
    """What it returns is a list, because DeepSpeed looks into results of other kinds."""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [super().forward(method, *args, **kwargs)]


class DeepSpeedEngine(Engine):
    """See the module's text for the plan and :class:`~lightning_zero.engines.base.Engine` for the contract."""

    def __init__(self, config: ZeroConfig, device: torch.device, dtypes: DtypePolicy) -> None:
        super().__init__(config, device, dtypes)
        self._in_step = False
        self._busy = False
        self._is_whole = False
        self._touched: set[Tensor] = set()  # since the last agreement
        self._touched_now: set[Tensor] = set()  # in this backward
        self._window_open = False  # between the first backward of a window and its agreement
        self._seen: dict[Tensor, tuple[Tensor, int]] = {}
        self._dirty: dict[Tensor, None] = {}  # in order, because ranks gather in it
        self._steps: weakref.WeakKeyDictionary[Optimizer, PieceStep] = weakref.WeakKeyDictionary()
        self._kernels: weakref.WeakKeyDictionary[Optimizer, CpuAdam] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._trained: set[Tensor] = set()  # at the last attach
        self._engine: Any = None  # DeepSpeed's, once attached
        self._attributes: dict[int, set[str]] = {}
        self._agreement: dist.ProcessGroup | None = None
        self._managed: Managed | None = None
        self._optimizers: list[Optimizer] = []
        self._stage3 = config.stage == 3
        self._follows_order = False

    # -- set-up --------------------------------------------------------------------------------------------------

    @property
    def root(self) -> nn.Module:
        return self._root

    def view(self) -> Any:
        return ShardView(self)

    def shard(self, module: nn.Module) -> None:
        self.module = module
        self._root = _Root(module)
        self._parameters = dict(module.named_parameters())
        refuse_late_hooks(self._parameters)
        self._shapes: dict[Tensor, torch.Size] = {p: _shape(p) for p in self._parameters.values()}
        self._dtypes: dict[Tensor, torch.dtype] = {p: p.dtype for p in self._parameters.values()}
        self._odd = _odd_parameters(self._shapes)
        self._take_built()
        self._strides: dict[Tensor, Any] = {p: _stride(p) for p in self._parameters.values()}
        # In order, because ranks gather in it
        self._held = dict.fromkeys(p for p in self._parameters.values() if p not in set(self._odd))
        # A group of its own, so that an agreement never meets an engine's collective
        if dist.get_world_size() > 1 and self.config.find_unused_parameters:
            self._agreement = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.config.timeout_seconds))
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))

    def _take_built(self) -> None:
        """Everybody has rank 0's values; what was built sharded (``deepspeed_build``) has them already."""
        with torch.no_grad():
            for p in self._odd:
                private.make_whole(p)
            for p in self._parameters.values():
                private.keep_dtype(p)
        here = [p for p in self._parameters.values() if not private.is_partitioned(p)]
        broadcast_coalesced([*here, *self.module.buffers()])

    def attach(self, optimizers: list[Optimizer], trainer: Mapping[str, Any]) -> None:
        """Hands the module to DeepSpeed, grouped as ``optimizers`` group its parameters."""
        self._optimizers, self.trainer_facts = optimizers, trainer
        self.check_parameters()
        self._attributes = {id(p): private.own_attributes(p) for p in self._parameters.values()}
        trainable = [p for p in self._parameters.values() if p.requires_grad and p in self._held]
        for p in self._held:
            p.data = p.data.contiguous()  # DeepSpeed looks at it as bytes
        joined = Joined(_flat_groups(trainable, optimizers)) if optimizers and trainable else None
        self._order: dict[Tensor, int] = {p: i for i, p in enumerate([*trainable, *self._odd])}
        self._trained = {p for p in self._order if p.requires_grad}
        self._handles = [p.register_post_accumulate_grad_hook(self._touch) for p in self._order if p.requires_grad]
        with private.environment(self.device), self._without(self._odd):
            deepspeed = private.prepare(self.device)
            private.count_modules_from_zero()
            if self.config.parameters_in_files:
                private.shard_again(self._held, self._config(trainer))
            elif not any(map(private.is_managed, self._held)):
                private.count_parameters_from_zero()
            with DisableTorchFunction(), private.partial_offload(Joined):
                self._engine, *_ = deepspeed.initialize(
                    model=self._root,
                    optimizer=joined,
                    model_parameters=trainable,
                    config=self._config(trainer),
                    dist_init_required=False,
                )
        if self._stage3:
            private.without_view(self._engine, lambda: self._is_whole)
            self._follows_order = self._agreement is not None and self.device.type == "cpu"
            if self._follows_order:
                private.before_gathers(self._engine, self._require_same_order)
            if joined is not None and self._agreement is not None:
                private.before_buckets(self._engine, self._require_same_bucket)
        if joined is not None:
            shards = (private.Shards3 if self._stage3 else private.Shards12)(self._engine)
            self._managed = Managed(shards, joined, self._shapes)
            for optimizer in optimizers:
                inner = [type(member).__name__ for member in family(optimizer)[1:]]
                if inner:
                    raise ValueError(
                        f"engine='deepspeed' with {type(optimizer).__name__}, an optimizer around {inner[0]}: states"
                        " lie in DeepSpeed's flats, one optimizer's for each parameter; use engine='fsdp2', or"
                        f" {inner[0]} alone."
                    )
                step = PieceStep(optimizer, self._managed, self.config.elementwise_optimizers or ())
                if not step.elementwise and any(map(shards.is_swapped, self._managed.flats(parameters(optimizer)))):
                    raise ValueError(
                        f"offload='nvme' with {type(optimizer).__name__}, which looks across elements and so needs"
                        " whole masters and states: use offload='cpu', or an element-wise optimizer such as AdamW."
                    )
                self._steps[optimizer] = step
                optimizer.zero_grad = self._zero_grad_of(optimizer)  # type: ignore[method-assign]
                for name in () if is_known(optimizer) else own_methods(optimizer):
                    vars(optimizer)[name] = partial(self._on_wholes, optimizer, name)
                optimizer.state_dict = partial(self._state_dict_of, optimizer)  # type: ignore[method-assign]
        self.units_table = self._table()

    @contextmanager
    def _without(self, hidden: list[nn.Parameter]) -> Iterator[None]:
        """``hidden`` are not the module's parameters for a while, so that DeepSpeed does not take them."""
        mine = set(hidden)
        places = [
            (m, name, p)
            for m in self.module.modules()
            for name, p in own_parameters(m).items()
            if p is not None and p in mine
        ]
        for m, name, _ in places:
            own_parameters(m)[name] = None
        try:
            yield
        finally:
            for m, name, p in places:
                own_parameters(m)[name] = p

    def _config(self, trainer: Mapping[str, Any]) -> dict[str, Any]:
        config = ds_config(self.config, self._facts(trainer))
        if self.dtypes.is_mixed:  # as under DDP: fp32 parameters, Lightning's autocast and loss scaling
            for section in ("bf16", "fp16", "data_types"):
                config.pop(section, None)
        elif self.config.stage == 1 and "data_types" in config:
            # DeepSpeed would take another optimizer, without pieces, to sum 16-bit gradients in fp32 at stage 1
            config["data_types"]["grad_accum_dtype"] = None
        return config

    def _facts(self, trainer: Mapping[str, Any]) -> RunFacts:
        sizes = [shape.numel() for shape in self._shapes.values()]
        return RunFacts(
            world_size=dist.get_world_size(),
            device_type=self.device.type,
            numel=sum(sizes),
            largest_numel=max(sizes),
            num_together=gathered_together(self.module),
            offload_path=self.offload_path,
            **trainer,
        )

    def _table(self) -> str:
        """Stages 1 and 2: one row per flat. Stage 3: one per module that is gathered by itself."""
        if self._stage3:
            named = [(n or "(root)", list(m.parameters(recurse=False))) for n, m in self.module.named_modules()]
            rows = [(name, [p for p in params if p in self._held]) for name, params in named]
        else:
            flats: dict[int, list[Any]] = {}
            for p, piece in self._managed.shards.pieces.items() if self._managed is not None else ():
                flats.setdefault(piece.flat, []).append(p)
            rows = [(f"flat {i}", params) for i, params in flats.items()]
        lines = [f"{'unit':<40}{'tensors':>8}{'elements':>14}{'bytes':>14}"]
        for name, params in rows:
            numel = [self._shapes[p].numel() for p in params]
            size = sum(n * p.element_size() for n, p in zip(numel, params, strict=True))
            if params:
                lines.append(f"{name:<40}{len(params):>8}{sum(numel):>14}{size:>14}")
        return "\n".join(lines)

    @property
    def known_parameters(self) -> Container[Tensor]:
        return self._shapes

    # -- forward -------------------------------------------------------------------------------------------------

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.broadcast_buffers()
        self._adopt()
        wants_grad = torch.is_grad_enabled()
        if wants_grad and self._unfrozen() is not None:
            self._attach_again()
        self._in_step = True
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(wants_grad):
                output = self._root(method, *args, **kwargs)[0]
                if self._follows_order:
                    self._require_same_order()
                return output
        finally:
            self._in_step = False

    def _require_same_order(self, unit: Any = None) -> None:
        """Stage 3 on the CPU: ranks say what they gather next, a module or a parameter, before it could be mixed up."""
        if self._is_whole:
            return

        def number_of(unit: Any) -> int:  # none: -1, parameters: below
            its: int = private.number_of(unit)
            return -2 - its if isinstance(unit, Tensor) else its

        said = self._say_to_all(number_of(unit))
        if len(said) > 1:
            units = [*self.module.named_modules(), *((n, p) for n, p in self._parameters.items() if p in self._held)]
            names = [n for n, u in units if n and number_of(u) in said - {-1}]
            raise ValueError(
                f"stage=3: the units {', '.join(map(repr, names))} ran on some ranks only, or in another order, but all"
                " ranks must gather the same parameters together. Run them on every rank, or use stage=2."
            )

    def _require_same_bucket(self, numbers: list[int]) -> None:
        """Stage 3: ranks say which parameters' gradients they reduce next, before they could be mixed up."""
        self._say_to_all(_BUCKETS - hash(tuple(sorted(numbers))) % 2**40)

    def _say_to_all(self, number: int) -> set[int]:
        """The largest and the smallest number that a rank has said, between the hosts; not about buckets."""
        assert self._agreement is not None
        ends = torch.tensor([number, -number])
        direct.all_reduce(ends, dist.ReduceOp.MAX, self._agreement).wait()
        high, low = ends.tolist()
        said = {high, -low}
        if len(said) > 1 and min(said) <= _BUCKETS:
            numel = sum(self._shapes[p].numel() for p in self._trained)
            raise ValueError(
                "stage=3: in this backward ranks used different parameters of modules that all of them ran, so their"
                " gradients would come in different buckets. With deepspeed.reduce_bucket_numel="
                f"{numel} all of them fit into one; or use stage=2."
            )
        return said

    def reshard(self) -> None:
        pass

    # -- backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.reduces = False
        try:
            yield
        finally:
            self.reduces = True

    def _touch(self, p: Tensor) -> None:
        self._touched_now.add(p)

    def backward(self, run_backward: Callable[[], None]) -> None:
        managed = self._managed
        assert managed is not None
        if (name := self._unfrozen()) is not None:
            raise ValueError(
                f"parameter {name!r} was unfrozen inside training_step, between its forward and its backward or while"
                " micro-batches accumulate: unfreeze it in on_train_epoch_start or another hook between two steps, or"
                " use engine='fsdp2'."
            )
        self._flush_grads()
        first = not self._window_open
        sync = self.reduces
        with DisableTorchFunction():
            self._busy = True
            try:
                if first:
                    managed.shards.before_backward(managed.with_grad)
                    self._window_open = True
                self._touched_now.clear()
                # Stage 2 reduces every micro-batch: each is taken at once, because with offload DeepSpeed's own sum
                # is wrong for parameters that not every micro-batch uses.
                takes = not self._stage3 and (sync or self.config.stage == 2)
                # Reduced as they come, ranks' gradients would not fit together where they used other parameters, and
                # those of earlier micro-batches would be passed over.
                at_end = takes and self.config.find_unused_parameters
                if takes:
                    managed.shards.before_reductions()
                self._engine.set_gradient_accumulation_boundary(takes)
                with private.reduced_at_end(self._engine, managed.shards.pieces) if at_end else nullcontext():
                    private.backward(self._engine, run_backward, lambda: self._complete(sync))
                self._touched |= self._touched_now
                managed.shards.after_backward(takes)
            finally:
                self._busy = False
            if sync:
                self._agree_on_used(self._reduce_odd())
                self._window_open = False

    @property
    def _fills(self) -> bool:
        """Whether parameters without a gradient on this rank take part in reductions, with zeros."""
        return self.config.find_unused_parameters and dist.get_world_size() > 1

    def _complete(self, sync: bool) -> None:
        """All gradients of this backward are there; some are not yet reduced."""
        managed = self._managed
        assert managed is not None
        if self._fills and (sync or self.config.stage > 1):
            here = self._touched_now if self._stage3 else {p for p in managed.shards.pieces if p.grad is not None}
            missing = [p for p in managed.shards.pieces if p.requires_grad and p not in here]
            managed.shards.add_late(missing)

    def _reduce_odd(self) -> set[Tensor]:
        """Averages the gradients of odd parameters; those that had none here have zeros now, and are returned."""
        trainable = [p for p in self._odd if p.requires_grad]
        filled = {p for p in trainable if p.grad is None}
        for p in filled:
            p.grad = torch.zeros_like(p)
        grads = [p.grad for p in trainable if p.grad is not None]
        if grads:
            all_reduce_mean(grads)
        return filled

    def _agree_on_used(self, filled: set[Tensor]) -> None:
        """One message on the CPU: which parameters any rank used since the last agreement."""
        managed = self._managed
        assert managed is not None
        used = torch.zeros(len(self._order), dtype=torch.int32)
        used[[self._order[p] for p in self._touched]] = 1
        if not self.config.find_unused_parameters:
            used[[i for p, i in self._order.items() if p.requires_grad]] = 1
        if self._agreement is not None:
            direct.all_reduce(used, dist.ReduceOp.MAX, self._agreement).wait()
        for (p, _), count in zip(self._order.items(), used.tolist(), strict=True):
            if count and p in managed:
                managed.with_grad.add(p)
            elif p in filled and not count:  # what had a gradient before keeps it
                p.grad = None
        self._touched.clear()

    # -- gradients as user code sees them ------------------------------------------------------------------------

    def holds(self, p: Any) -> bool:
        return p in self._held

    def is_away(self, p: Any) -> bool:
        return self._stage3 and private.is_partitioned(p)

    def in_step(self) -> bool:
        return self._in_step

    def busy(self) -> bool:
        return self._busy or self._is_whole

    def fetch(self, p: Any) -> None:
        with DisableTorchFunction(), torch.no_grad():
            if self._follows_order:
                self._require_same_order(p)
            private.fetch(p)

    def keep_all(self) -> None:
        """A gradient is to be differentiated: the second backward passes through parameters in no module's order."""
        if self._stage3:
            with DisableTorchFunction(), torch.no_grad():
                for p in self._held:
                    private.keep(p)

    def whole(self, p: Any) -> Tensor:
        with DisableTorchFunction(), torch.no_grad():
            return private.gathered_copy(p)

    def shape_of(self, p: Any) -> torch.Size:
        return self._shapes[p]

    def written(self, p: Any, value: Tensor | None) -> None:
        """User code wrote to ``p``: ``value`` is to be it, or (``None``) ``p`` holds it already."""
        with DisableTorchFunction(), torch.no_grad():
            if self._stage3:
                private.store(p, p.detach().clone() if value is None else value)
                if self._in_step:  # it may be used again before DeepSpeed fetches it
                    private.fetch(p)
            elif value is not None and value.data_ptr() != p.data_ptr():
                p.detach().copy_(value)
        if self._managed is not None and p in self._managed:
            self._dirty[p] = None

    def _adopt(self) -> None:
        """What user code wrote to parameters reaches the masters."""
        if self._dirty and self._managed is not None:
            with DisableTorchFunction(), torch.no_grad():
                for p in self._dirty:
                    self._managed.shards.adopt(p)
            self._dirty.clear()

    def see_grad(self, p: Any) -> Tensor | None:
        managed = self._managed
        if managed is None or p not in managed.with_grad:
            return None
        if p not in self._seen:
            with DisableTorchFunction(), torch.no_grad():
                grad = managed.assemble(p, managed.shards.grad(p)).to(dtype=p.dtype, device=p.device)
            self._seen[p] = grad, version_of(grad)
        return self._seen[p][0]

    def set_grad(self, p: Any, value: Tensor | None) -> None:
        managed = self._managed
        with DisableTorchFunction():
            p.grad = None
        self._seen.pop(p, None)
        if managed is None or p not in managed:
            return
        if value is None:
            managed.with_grad.discard(p)
            return
        with DisableTorchFunction(), torch.no_grad():
            managed.shards.grad(p).copy_(managed.cut(p, value))
        managed.with_grad.add(p)

    def _flush_grads(self) -> None:
        """What user code wrote into gradients counts."""
        managed = self._managed
        if self._seen and managed is not None:
            with DisableTorchFunction(), torch.no_grad():
                for p, (grad, version) in self._seen.items():
                    if version_of(grad) != version:
                        managed.shards.grad(p).copy_(managed.cut(p, grad))
        self._seen.clear()

    def user_backward(self, run: Callable[[], None]) -> None:
        """A plain ``loss.backward()`` in a step of manual optimization."""
        if self._managed is None or not self._in_step:
            run()
        else:
            self.backward(run)

    def _zero_grad_of(self, optimizer: Optimizer) -> Callable[..., None]:
        def zero_grad(set_to_none: bool = True) -> None:
            managed = self._managed
            assert managed is not None
            with DisableTorchFunction():
                for p in parameters(optimizer):
                    self._seen.pop(p, None)
                    if p not in managed:
                        if set_to_none:
                            p.grad = None
                        elif p.grad is not None:
                            p.grad.detach_().zero_()
                        continue
                    p.grad = None
                    if set_to_none:
                        managed.with_grad.discard(p)
                    elif p in managed.with_grad:
                        managed.shards.grad(p).zero_()

        return zero_grad

    # -- optimizer -----------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return between_hooks(optimizer, partial(self._step_one, optimizer), self._before_step, closure, **kwargs)

    def _step_one(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        step = self._steps[optimizer]
        if step.calls_closure and closure is not None:
            return self._step_with_closure(step, closure, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        with DisableTorchFunction():
            result = self._step_on(step, **kwargs)
        return loss if result is None else result

    def _on_wholes(self, optimizer: Optimizer, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the optimizer's own: it finds whole parameters and states, and what it writes counts."""
        step, method = self._steps.get(optimizer), getattr(type(optimizer), name)
        if step is None or step.holds_stand_ins:
            return method(optimizer, *args, **kwargs)
        self._before_step()
        with step.stand_ins(on_shards=False):
            result = method(optimizer, *args, **kwargs)
        with DisableTorchFunction(), torch.no_grad():
            self._publish_all(optimizer)
        return result

    def _before_step(self) -> None:
        self._flush_grads()
        self._adopt()

    def _step_on(self, step: PieceStep, **kwargs: Any) -> Any:
        """Steps what is in memory at once, then flat by flat what lies in files."""
        managed, optimizer = self._managed, step.optimizer
        assert managed is not None
        shards = managed.shards
        flats = managed.flats(p for p in parameters(optimizer) if p in managed.with_grad)
        in_files = [i for i in flats if shards.is_swapped(i)]
        result = None
        here = set(flats) - set(in_files)
        if not in_files:
            result = self._call(step, None, **kwargs)
        elif here or any(p not in managed for p in parameters(optimizer)):
            result = self._call(step, lambda p: p not in managed or managed.piece(p).flat in here, **kwargs)
        with torch.no_grad():
            shards.publish(here)
            for i in in_files:
                with shards.loaded(i, write=True):
                    in_it = {p for p in managed.shards.pieces if managed.piece(p).flat == i}
                    result = self._call(step, in_it.__contains__, **kwargs)
                    shards.publish([i])
        return result

    def _call(self, step: PieceStep, only: Only | None, **kwargs: Any) -> Any:
        """One ``optimizer.step`` on the parameters of ``only``, masters in host memory by a kernel made for it."""
        optimizer = step.optimizer
        if not self.config.offloads_optimizer or not step.elementwise or not CpuAdam.knows(optimizer):
            with step.stand_ins(only=only):
                return optimizer.step(**kwargs)
        chosen = [p for p in parameters(optimizer) if only is None or only(p)]
        in_host = {p for p in chosen if self._is_in_host(p)}
        rest = set(chosen) - in_host
        if in_host and self.cpu_adam:
            kernel = self._kernels.get(optimizer)
            if kernel is None or kernel.decoupled != CpuAdam.is_decoupled(optimizer):
                with private.environment(self.device):
                    self._kernels[optimizer] = CpuAdam(optimizer)
            with step.stand_ins(only=in_host.__contains__):
                self._kernels[optimizer].step()
        elif in_host:
            with step.stand_ins(only=in_host.__contains__), fused(optimizer):
                optimizer.step(**kwargs)
        if rest:
            with step.stand_ins(only=rest.__contains__):
                return optimizer.step(**kwargs)
        return None

    def _is_in_host(self, p: Tensor) -> bool:
        managed = self._managed
        assert managed is not None
        if p not in managed:
            return False
        master = managed.shards.master(managed.piece(p).flat)
        return master.device.type == "cpu" and master.dtype == torch.float32

    def _after_step(self, optimizer: Optimizer) -> None:
        managed = self._managed
        assert managed is not None
        with DisableTorchFunction(), torch.no_grad():
            managed.shards.publish(managed.flats(p for p in parameters(optimizer) if p in managed.with_grad))

    def _step_with_closure(self, step: PieceStep, closure: Callable[[], Any], **kwargs: Any) -> Any:
        self._before_step()
        with step.stand_ins() as swap:

            def evaluate() -> Any:
                with DisableTorchFunction(), torch.no_grad():
                    swap.release()
                    self._publish_all(step.optimizer)
                loss = closure()
                self._before_step()
                with DisableTorchFunction():
                    swap.take()
                return loss

            result = step.optimizer.step(closure=evaluate, **kwargs)
        with DisableTorchFunction(), torch.no_grad():
            self._publish_all(step.optimizer)
        return result

    def _publish_all(self, optimizer: Optimizer) -> None:
        managed = self._managed
        assert managed is not None
        managed.shards.publish(managed.flats(parameters(optimizer)))

    @contextmanager
    def stand_ins(self, optimizer: Optimizer, on_shards: bool | None = None) -> Iterator[Any]:  # type: ignore[override]
        self._before_step()
        with self._steps[optimizer].stand_ins(on_shards) as swap:
            yield swap
        if on_shards is None:
            self._after_step(optimizer)

    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        managed = self._managed
        assert managed is not None
        self._flush_grads()
        odd = [p.grad for p in parameters(optimizer) if p not in managed and p.grad is not None]
        return list(managed.grads(optimizer)), odd

    # -- parameters that are unfrozen during a run -----------------------------------------------------------------

    def _unfrozen(self) -> str | None:
        """A parameter that was frozen when DeepSpeed laid its flats out, and is no longer."""
        if self._managed is None:
            return None
        with DisableTorchFunction():
            return next((n for n, p in self._parameters.items() if p.requires_grad and p not in self._trained), None)

    def _attach_again(self) -> None:
        """DeepSpeed's flats are fixed, so it starts anew with the parameters that are trained now (collective).

        Weights pass through host memory whole; masters, states and gradients as this rank's rows.
        """
        managed = self._managed
        if managed is None or self._window_open:  # the backward will say so
            return
        with torch.no_grad(), DisableTorchFunction():
            self._flush_grads()
            masters = self._rows_of_masters(own_dtype=False)
            states = {optimizer: self._rows_of_states(optimizer) for optimizer in self._optimizers}
            grads = {p: self._rows(p, managed.assemble(p, managed.shards.grad(p))) for p in self._order_of_grads()}
            odd_grads = {p: p.grad for p in self._odd}
            self._take_off({p: value.to(self.device) for p, value in self._values_afterwards().items()})
            by_id = {id(p): p for p in self._held}
        with DisableTorchFunction():
            self.attach(self._optimizers, self.trainer_facts)
        managed = self._managed
        assert managed is not None
        with torch.no_grad(), DisableTorchFunction():
            for i, rows in masters.items():
                p, whole = by_id[i], gathered(rows)
                with managed.shards.loaded(managed.piece(p).flat, write=True):
                    managed.master(p).copy_(managed.cut(p, whole))
            for optimizer, of_params in states.items():
                for one, state in of_params.items():
                    self._steps[optimizer].put_states({one: {k: _gathered_if_rows(v) for k, v in state.items()}})
            for one, rows in grads.items():
                managed.shards.grad(one).copy_(managed.cut(one, gathered(rows)))
                managed.with_grad.add(one)
            for odd, grad in odd_grads.items():
                odd.grad = grad

    def _order_of_grads(self) -> list[Tensor]:
        managed = self._managed
        assert managed is not None
        return [p for p in managed.shards.pieces if p in managed.with_grad]

    # -- whole state ---------------------------------------------------------------------------------------------

    def _rows(self, p: Tensor, whole: Tensor) -> DTensor:
        """This rank's rows of a whole tensor, as ``fully_shard`` would lay them out; a copy."""
        each = -(-whole.shape[0] // self.mesh.size())
        first = min(each * self.mesh.get_rank(), whole.shape[0])
        mine = whole.narrow(0, first, min(each, whole.shape[0] - first)).clone()
        return DTensor.from_local(
            mine, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def sharded_state_dict(self) -> dict[str, Any]:
        self._adopt()
        with torch.no_grad(), DisableTorchFunction():
            state = undetached_state_dict(self.module)
            done = self._rows_of_masters()

            def one(path: Any, tensor: Tensor) -> Tensor:
                if id(tensor) not in done:
                    done[id(tensor)] = self._rows_of(tensor) if self.holds(tensor) else tensor.detach()
                return done[id(tensor)]

            return map_tensors(one, state)

    def _rows_of_masters(self, own_dtype: bool = True) -> dict[int, Tensor]:
        """By the parameter's identity; in its own dtype, or as they are stepped."""
        managed = self._managed
        if managed is None:
            return {}
        rows: dict[int, Tensor] = {}
        for i in managed.flats(managed.shards.pieces):
            with managed.shards.loaded(i):
                for p, piece in managed.shards.pieces.items():
                    if piece.flat == i:
                        whole = managed.assemble(p, managed.master(p))
                        rows[id(p)] = self._rows(p, whole.to(self._dtypes[p]) if own_dtype else whole)
        return rows

    def _rows_of(self, p: Tensor) -> Tensor:
        return self._rows(p, private.gathered_copy(p) if self._stage3 else p.detach())

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._managed is None:  # after the run: DTensors
            return optimizer.state_dict()
        with torch.no_grad(), DisableTorchFunction():
            before = optimizer.state
            try:
                optimizer.state = {**before, **self._rows_of_states(optimizer)}  # type: ignore[assignment]
                return type(optimizer).state_dict(optimizer)
            finally:
                optimizer.state = before

    def _state_dict_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """What user code sees (collective)."""
        return self.full(self.sharded_optimizer_state(optimizer))

    def _rows_of_states(self, optimizer: Optimizer, whole: bool = False) -> dict[Tensor, dict[str, Any]]:
        """Its states, as this rank's rows or ``whole`` on the CPU (collective)."""
        managed, step = self._managed, self._steps[optimizer]
        assert managed is not None
        step.take_given()

        def laid_out(p: Tensor, value: Any) -> Any:
            if type(value) is not Cut:
                return value
            assembled = managed.assemble(p, value.piece)
            return assembled.cpu() if whole else self._rows(p, assembled)

        rows: dict[Tensor, dict[str, Any]] = {}
        for i in managed.flats(parameters(optimizer)):
            with managed.shards.loaded(i):
                for p in parameters(optimizer):
                    if p in step.states and managed.piece(p).flat == i:
                        rows[p] = {key: laid_out(p, value) for key, value in step.state(p).items()}
        return rows

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        managed = self._managed
        assert managed is not None
        params = require_same_parameters(optimizer, state)
        step = self._steps[optimizer]
        with torch.no_grad(), DisableTorchFunction():
            odd = {i: values for i, values in state["state"].items() if params[i] not in managed}
            optimizer.load_state_dict({**state, "state": odd})
            whole = {params[i]: values for i, values in state["state"].items() if params[i] in managed}
            step.put_states(whole, casts=True)

    def whole_parameters(self) -> dict[Tensor, nn.Parameter]:
        self._adopt()
        return {
            p: nn.Parameter(private.gathered_copy(p) if self._stage3 else p.detach().clone(), p.requires_grad)
            for p in self._parameters.values()
            if p in self._held
        }

    @contextmanager
    def whole_on_module(self) -> Iterator[None]:
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    def store_whole(self, whole: Mapping[Any, Tensor]) -> None:
        broadcast_coalesced([*whole.values(), *self._odd])
        for p, w in whole.items():
            self.written(p, w.detach())

    # -- the end -------------------------------------------------------------------------------------------------

    def model_state(self, optimizers: Iterable[Optimizer]) -> ModelState:
        with torch.no_grad(), DisableTorchFunction():
            account = Account(self.config, self.device, self._shapes)
            account.parameters(self._odd)
            account.odd_gradients(self._odd)
            if self._managed is not None:
                account.managed(self._managed)
            for optimizer in optimizers:
                account.optimizer(self._steps[optimizer])
            account.files(self.offload_path, self._managed)
        return account.state

    @property
    def whole_bytes(self) -> int:
        return sum(shape.numel() * p.element_size() for p, shape in self._shapes.items())

    def restore(self, whole: bool, optimizers: list[Optimizer]) -> None:
        self._adopt()
        if not whole:
            return
        with torch.no_grad(), DisableTorchFunction():
            values = self._values_afterwards()
            for optimizer in optimizers:
                if self._managed is not None and optimizer in self._steps:
                    optimizer.state.update(self._rows_of_states(optimizer, self.states_whole_after_fit))
            self._take_off(values)
            if self._agreement:
                dist.destroy_process_group(self._agreement)

    def _take_off(self, values: Mapping[Tensor, Tensor]) -> None:
        """DeepSpeed lets go of the module and the optimizers; parameters hold ``values`` and no gradients."""
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("zero_grad", None)
            optimizer.__dict__.pop("state_dict", None)
            for name in own_methods(optimizer):
                optimizer.__dict__.pop(name, None)
        for handle in self._handles:
            handle.remove()
        attributes = {id(p): private.own_attributes(p) for p in self._shapes} | self._attributes
        private.end(self._engine, self._root, attributes)
        for p, value in values.items():
            p.grad = None
            p.data = value
        self._managed = None
        self._steps.clear()
        self._engine = None

    def _values_afterwards(self) -> dict[Tensor, Tensor]:
        """Whole parameters on the CPU, of their own dtype and strides; masters where DeepSpeed computed in another."""
        managed = self._managed
        values: dict[Tensor, Tensor] = {}
        if managed is not None:
            in_another = [p for p in managed.shards.pieces if p.dtype != self._dtypes[p]]
            for i in managed.flats(in_another):
                with managed.shards.loaded(i):
                    for p in in_another:
                        if managed.piece(p).flat == i:
                            values[p] = managed.assemble(p, managed.master(p))
        whole: dict[Tensor, Tensor] = {}
        for p, shape in self._shapes.items():
            value = values.pop(p, None)
            if value is None:
                value = private.gathered_copy(p) if private.is_managed(p) else p.detach()
            whole[p] = torch.empty_strided(shape, self._strides[p], dtype=self._dtypes[p]).copy_(value)
        return whole


def _gathered_if_rows(value: Any) -> Any:
    return gathered(value) if isinstance(value, DTensor) else value


def _shape(p: Any) -> torch.Size:
    return private.whole_shape(p)


def _stride(p: Any) -> tuple[int, ...]:
    return torch.empty(private.whole_shape(p), device="meta").stride() if private.is_partitioned(p) else p.stride()


def _odd_parameters(shapes: Mapping[Any, torch.Size]) -> list[Any]:
    """Those that cannot lie in a flat with the others."""
    count: dict[torch.dtype, int] = {}
    for p, shape in shapes.items():
        count[p.dtype] = count.get(p.dtype, 0) + shape.numel()
    main = max(count, key=lambda dtype: count[dtype])
    return [p for p, shape in shapes.items() if p.dtype != main or len(shape) == 0 or shape.numel() == 0]


def _flat_groups(trainable: list[nn.Parameter], optimizers: list[Optimizer]) -> list[list[Tensor]]:
    """``trainable`` in lists that can be stepped apart: one per parameter group of an optimizer, or of several that
    share it."""
    held: dict[Tensor, list[tuple[int, int]]] = {p: [] for p in trainable}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p in held:
                    held[p].append((i, j))
    groups: dict[tuple[tuple[int, int], ...], list[Tensor]] = {}
    for p, where in held.items():
        groups.setdefault(tuple(where), []).append(p)
    return list(groups.values())
