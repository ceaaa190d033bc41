"""The contract between an engine and the strategy, and the devices of each engine."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors, placeholder
from lightning_zero.comm.agree import broadcast_coalesced, run_agreement
from lightning_zero.comm.barrier import Barrier
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.comm.shards import gathered, to_host
from lightning_zero.config import ZeroConfig
from lightning_zero.engines import graphs
from lightning_zero.engines.hooks import UserHooks
from lightning_zero.engines.model_state import ModelState
from lightning_zero.engines.optimizer_step import ShardedStep
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.engines.residency import Mode, Residency, Store, budget_bytes
from lightning_zero.private.torch import (
    DisableTorchFunction,
    before_transforms,
    has_accumulation_hooks,
)

DEVICES = {"fsdp2": ("cpu", "cuda", "xpu", "hpu"), "deepspeed": ("cpu", "cuda", "xpu", "hpu")}
"""Device types on which each engine runs. Settings are checked in ``config``; for modules that an engine refuses see
``docs/deepspeed.md``."""


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leaves the user's ``torch.inference_mode()``: inference tensors could not be written to or trained with later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class Root(nn.Module):
    """Calls any method of the user's module. The engine registers its hooks here, so the user's module stays
    untouched."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, method)(*args, **kwargs)


def require_device(kind: str, engine: str) -> None:
    """Raises ``ValueError`` unless ``engine`` runs on devices of this ``kind``."""
    if kind not in DEVICES[engine]:
        raise ValueError(f"accelerator={kind!r} is not possible: use one of {', '.join(DEVICES[engine])}.")


def refuse_late_hooks(parameters: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for a user hook that needs complete, full gradients."""
    late = [name for name, p in parameters.items() if has_accumulation_hooks(p)]
    if late:
        raise ValueError(
            f"parameter {late[0]!r} has a post-accumulate-grad hook, which would see a gradient that is not"
            " complete: use on_after_backward or on_before_optimizer_step."
        )


def undetached_state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` with the registered parameters themselves, since detached tensors do not show which are
    tied. A user's override may lack the argument ``keep_vars``."""
    accepted = inspect.signature(module.state_dict).parameters.values()
    knows = any(p.name == "keep_vars" or p.kind is p.VAR_KEYWORD for p in accepted)
    return module.state_dict(keep_vars=True) if knows else module.state_dict()


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, 0-dim, on ``device``. All ranks get the same dtype, even if some shards are
    empty, because ranks all-reduce the result."""
    tensors = list(tensors)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return torch.zeros((), device=device, dtype=dtype)
    norms = [torch.stack(torch._foreach_norm(kind)).to(device, dtype) for kind in by_kind(tensors)]
    return torch.cat(norms).square().sum()


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups ``tensors`` by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.dtype, t.device), []).append(t)
    return list(groups.values())


def scale_to_norm(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales ``grads`` by their joint norm, as ``torch.nn.utils.clip_grad_norm_`` does."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for kind in by_kind(grads):
        torch._foreach_mul_(kind, scale.to(kind[0].device, kind[0].dtype))


def clamp(grads: Iterable[Tensor], limit: float) -> None:
    """Limits every element to ``[-limit, limit]``."""
    for kind in by_kind(grads):
        torch._foreach_clamp_min_(kind, -limit)
        torch._foreach_clamp_max_(kind, limit)


class Engine(ABC):
    """Shards one module over the ranks, runs its steps, and unshards it at the end.

    The strategy calls, in this order: :meth:`shard`; :meth:`attach`, when the user's optimizers exist; then for every
    batch :meth:`run` and, in training, :meth:`backward` (under :meth:`no_sync` for all but the last micro-batch of an
    accumulation window) and :meth:`step`; at the end :meth:`restore`. All methods are collective: every rank calls
    them in the same order.
    """

    module: nn.Module
    """The argument of :meth:`shard`."""
    mesh: DeviceMesh
    """Device mesh of all ranks; parameters are sharded along its axis "shard"."""
    root: nn.Module
    """The module whose call runs a step; holds the user's module. Set by :meth:`shard`."""
    total_bytes: int
    """Bytes of the module's full parameters. Set by :meth:`shard`."""

    failed = False
    """Whether the run has raised an error: other ranks may be gone, so :meth:`restore` must not communicate."""

    peer_memory: PeerMemory | None = None
    """Connections between all ranks, for an engine that has its own between processes on CPUs."""

    def __init__(self, config: ZeroConfig, device: torch.device, dtypes: DtypePolicy) -> None:
        self.config = config
        self.device = device
        self.dtypes = dtypes
        self.shards_device = device
        """Device of the gradient shards, on which their norms are combined."""
        self.hooks = UserHooks()
        """Moments at which user code runs, on any rank."""
        self.keep_gathered = False
        """Whether parameters may stay gathered between micro-batches, because no user hook reads the module there."""
        self.automatic = True
        """Whether one :meth:`run` is one forward. Otherwise the user runs forwards and backwards inside it."""
        self.backward_is_users = False
        """Whether ``LightningModule.backward`` is overridden: one :meth:`backward` may then run several."""
        self.offload_path: str | None = None
        """This run's folder on a fast disk, with offload to NVMe."""
        self.units: Sequence[nn.Module] = ()
        """Modules whose parameters are gathered together for each forward, in an engine based on ``fully_shard``."""
        self.reduces = True
        """Whether the backward of this micro-batch reduces gradients; ``False`` inside :meth:`no_sync`."""
        self.optimizers: list[Optimizer] | None = None
        """Optimizers of a fit. A parameter added after the set-up is accepted only if none of them holds it."""
        self._broadcasts_next = True
        self._steps: weakref.WeakKeyDictionary[Optimizer, ShardedStep] = weakref.WeakKeyDictionary()

    @abstractmethod
    def shard(self, module: nn.Module) -> None:
        """Broadcasts rank 0's parameters and buffers; each rank then keeps its shards of the parameters."""

    def attach(self, optimizers: list[Optimizer], trainer: Any) -> None:  # noqa: B027
        """Takes the optimizers of a fit (none in other loops) of ``trainer``."""

    def reside(self, store: Store, is_between: Callable[[], bool]) -> None:
        """Gathers the parameters of ``store`` when user code touches them, from now until :meth:`end_residency`."""
        agreement = run_agreement()  # None in a loop without a Trainer, where all ranks make the same reads
        waits = agreement is not None and dist.get_world_size() > 1
        barrier = Barrier(agreement, self.peer_memory) if waits and agreement is not None else None
        budget = budget_bytes(self.device, agreement)
        self.residency = Residency(store, is_between, barrier, budget)
        self._graphs = graphs.Calls(self.residency)
        self._end_transforms = before_transforms(self.residency.before_transform)

    def end_residency(self) -> None:
        self._graphs.end()
        self._end_transforms()

    def view(self) -> Mode:
        """Context in which user code reads and writes full tensors."""
        return self.residency.mode

    @abstractmethod
    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls ``module.<method>``; parameters are gathered where the method needs them."""

    @abstractmethod
    def backward(self, run_backward: Callable[[], None], retains_graph: bool = False) -> None:
        """Calls ``run_backward`` and leaves averaged gradients on the shards, unless under :meth:`no_sync`.

        Args:
            retains_graph: Whether another backward may follow through the same graph.
        """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Marks the micro-batches before the last one of an accumulation window."""
        self.reduces = False
        try:
            yield
        finally:
            self.reduces = True

    def reshard(self) -> None:  # noqa: B027
        """Frees gathered parameters, so that reads and writes by user code reach the shards."""

    @graphs.outside_graphs
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Runs ``optimizer.step`` on this rank's shards, or on full tensors if the optimizer needs those."""
        try:
            return self.step_of(optimizer).step(closure, **kwargs)
        finally:
            self.stepped(optimizer)

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which a loss scaler calls ``optimizer.step``."""
        try:
            with self.step_of(optimizer).stepping():
                yield
        finally:
            self.stepped(optimizer)

    @contextmanager
    def on_shards(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which ``optimizer`` holds this rank's shards of parameters and gradients."""
        self.settle()
        with self.step_of(optimizer).on_shards():
            yield

    def step_of(self, optimizer: Optimizer) -> ShardedStep:
        """Returns the step of ``optimizer``; the first call shards states that exist already (collective)."""
        if optimizer not in self._steps:
            declared = self.config.elementwise_optimizers or ()
            self._steps[optimizer] = self.sharded_step(optimizer, declared)
        return self._steps[optimizer]

    @abstractmethod
    def sharded_step(self, optimizer: Optimizer, declared: Collection[str]) -> ShardedStep:
        """Creates the step of ``optimizer`` on this rank's parts."""

    def close_windows(self) -> None:
        """Stores all that user code has written to parameters and gradients."""
        self.residency.end_window()

    @contextmanager
    def full_step(self, is_running: bool) -> Iterator[None]:
        """See :meth:`~lightning_zero.engines.optimizer_step.Parts.full_step`."""
        self.close_windows()
        with self.residency.together(is_running):
            yield
        self.close_windows()

    @abstractmethod
    def settle(self) -> None:
        """Completes the gradients, and stores what user code wrote to parameters (collective)."""

    def stepped(self, optimizer: Optimizer) -> None:  # noqa: B027  most engines have nothing to do
        """``optimizer`` has stepped, or has failed to."""

    def broadcast_buffers(self) -> None:
        """Broadcasts rank 0's buffers when DDP would: before each forward that follows a synchronized training forward.
        Under manual optimization Lightning disables DDP's synchronization, so only the first forward gets them."""
        if self._broadcasts_next and self.config.broadcast_buffers:
            with DisableTorchFunction():  # no parameter is involved, and residency looks at each call
                broadcast_coalesced(list(self.module.buffers()))
        self._broadcasts_next = torch.is_grad_enabled() and self.reduces and self.automatic

    @abstractmethod
    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of ``optimizer`` as plain tensors: this rank's shards, and the replicated gradients."""

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Scales all gradients of ``optimizer`` so that their joint 2-norm is at most ``max_norm``; returns the norm
        before scaling, 0-dim."""
        with torch.no_grad(), DisableTorchFunction():
            shards, unsharded = self.gradients(optimizer)
            home = self.shards_device
            squared = sum_of_squares(shards, home)
            if self.mesh.size() > 1:  # not over replicas: they hold the same shards, which count once
                dist.all_reduce(squared, group=self.mesh.get_group("shard"))
            if unsharded:  # after the all-reduce: every rank holds them, so they must count once
                squared = squared + sum_of_squares(unsharded, self.device).to(home)
            norm = squared.sqrt()
            scale_to_norm([*shards, *unsharded], norm, max_norm)
            return norm

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Limits every gradient element of ``optimizer`` to ``[-clip_value, clip_value]``."""
        with torch.no_grad(), DisableTorchFunction():
            shards, unsharded = self.gradients(optimizer)
            clamp([*shards, *unsharded], clip_value)

    def any_rank(self, flag: Tensor) -> None:
        """Element-wise maximum of ``flag`` over the ranks, in place."""
        if self.mesh.size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)

    @abstractmethod
    def sharded_state_dict(self) -> dict[str, Any]:
        """``module.state_dict()`` with this rank's shards themselves as ``DTensor``. A tied parameter is one object
        under all its names."""

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` in PyTorch's format, with this rank's shards themselves."""
        self.end_window(self.hooks.anywhere)
        with torch.no_grad(), self.view():
            state = optimizer.state_dict()
        with torch.no_grad(), DisableTorchFunction():
            self.residency.end_window()
            return self.in_shards(state)

    @abstractmethod
    def in_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns ``state``, an ``optimizer.state_dict()`` as user code sees it, with this rank's shards."""

    @staticmethod
    def full(state: Any, on_rank_0: bool = False) -> Any:
        """Returns ``state``, the result of one of the two methods above, with full tensors on the CPU. Tensors are
        gathered one at a time.

        With ``on_rank_0`` only rank 0 gets values. The other ranks get meta tensors.
        """
        done: dict[int, Tensor] = {}

        def one(path: Any, tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = on_cpu(tensor)
            return done[id(tensor)]

        def on_cpu(tensor: Tensor) -> Tensor:
            # All ranks gather: NCCL would open another communicator for each rank that sends to rank 0.
            value = gathered(tensor)
            return placeholder(tensor) if on_rank_0 and dist.get_rank() else to_host(value)

        with torch.no_grad(), DisableTorchFunction():
            return map_tensors(one, state)

    @abstractmethod
    def model_state(self, optimizers: Iterable[Optimizer]) -> ModelState:
        """Bytes of the tensors that this rank holds now, by place; not collective."""

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Loads a full ``optimizer.state_dict()``; each rank keeps its shards."""
        self.end_window(self.hooks.anywhere)
        with self.view():
            self.step_of(optimizer).load_state_dict(state)

    @property
    @abstractmethod
    def known_parameters(self) -> Collection[Tensor]:
        """Parameters that the module had when the engine set it up, sharded or replicated."""

    def check_parameters(self) -> None:
        """Raises ``ValueError`` if parameters were added or replaced after the module was sharded."""
        known, held = self.known_parameters, None
        if self.optimizers is not None:
            held = {p for o in self.optimizers for group in o.param_groups for p in group["params"]}
        named = dict(self.module.named_parameters())
        for name, p in named.items():
            # As under DDP, an added parameter may stay untrained; one that replaces another may not
            if p not in known and (held is None or p in held or not set(known) <= set(named.values())):
                raise ValueError(
                    f"parameter {name!r} was replaced or added after the strategy set the module up, so it would"
                    " neither be sharded nor reduced: create it in __init__ or configure_model, or write into the"
                    " existing one under torch.no_grad() (load_state_dict without assign=True)."
                )

    def end_window(self, waits: bool = True) -> None:
        """Called when user code between two calls of the engine is over; with ``waits``, all ranks wait for each other
        (collective)."""
        with torch.no_grad(), DisableTorchFunction():
            self.residency.end_window()
            if waits:
                self.residency.wait_for_reads()

    @abstractmethod
    def restore(self, full: bool) -> None:
        """Ends the run. With ``full`` parameters become full (collective); otherwise they stay sharded. Optimizers are
        left as by :func:`~lightning_zero.engines.after_run.leave_states`."""
