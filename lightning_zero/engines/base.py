"""The contract between an engine and the strategy, and the one table of each engine's capabilities."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_zero.checkpoint.collected import Collected
from lightning_zero.checkpoint.layout import full_bytes, map_tensors, placeholder
from lightning_zero.comm.agree import Agreement, broadcast_coalesced
from lightning_zero.comm.peer_memory import PeerMemory
from lightning_zero.comm.shards import gathered, gathered_on_rank_0
from lightning_zero.config import ZeroConfig
from lightning_zero.engines.gradients import clamp, scale_to_norm, sum_of_squares
from lightning_zero.engines.hooks import UserHooks
from lightning_zero.engines.model_state import ModelState
from lightning_zero.engines.precision import DtypePolicy
from lightning_zero.private.torch import DisableTorchFunction, has_accumulation_hooks, own_parameters, version_of

CAPABILITIES: dict[str, dict[str, tuple[Any, ...]]] = {
    # setting -> engine -> the values it takes
    "stage": {"fsdp2": (1, 2, 3), "deepspeed": (1, 2, 3)},
    "accelerator": {"fsdp2": ("cpu", "cuda", "xpu", "hpu"), "deepspeed": ("cpu", "cuda", "xpu", "hpu")},
}
"""Values of a setting that each engine takes. Refusals of modules are stated where they are made: see
``docs/deepspeed.md``."""

OnWhole = Callable[[nn.Parameter], object]
"""Told of a parameter that has just become whole."""


def unheard(p: nn.Parameter) -> None:
    """Nobody wants to be told."""


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leaves ``torch.inference_mode()`` of a user's forward: what is made here is written to later, or trained with."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class Root(nn.Module):
    """Calls any method of the user's module; the engine's own hooks hang here, so the module itself stays untouched."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, method)(*args, **kwargs)


def require(setting: str, value: Any, engine: str) -> None:
    """Raises ``ValueError`` naming the setting, its value and who can, unless ``engine`` takes ``value``."""
    if value in CAPABILITIES[setting][engine]:
        return
    others = [name for name, values in CAPABILITIES[setting].items() if value in values]
    repair = (
        f"use engine={others[0]!r}" if others else f"use one of {', '.join(map(str, CAPABILITIES[setting][engine]))}"
    )
    raise ValueError(f"{setting}={value!r} is not possible with engine={engine!r}: {repair}.")


def refuse_late_hooks(parameters: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for a hook of the user's that needs complete whole gradients."""
    late = [name for name, p in parameters.items() if has_accumulation_hooks(p)]
    if late:
        raise ValueError(
            f"parameter {late[0]!r} has a post-accumulate-grad hook, which would see a gradient that is never"
            " complete: use on_after_backward or on_before_optimizer_step."
        )


def require_same_parameters(optimizer: Optimizer, state: Mapping[str, Any]) -> list[Any]:
    """The parameters of ``optimizer``, which ``state`` must be of as many."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    saved = sum(len(group["params"]) for group in state["param_groups"])
    if saved != len(params):
        raise ValueError(
            f"the checkpoint's {type(optimizer).__name__} state is of {saved} parameters, the optimizer has"
            f" {len(params)}: resume with the module and configure_optimizers that saved it."
        )
    return params


def undetached_state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` with the registered objects themselves: detached tensors would no longer tell what is
    tied. An override may not know the argument."""
    accepted = inspect.signature(module.state_dict).parameters.values()
    knows = any(p.name == "keep_vars" or p.kind is p.VAR_KEYWORD for p in accepted)
    return module.state_dict(keep_vars=True) if knows else module.state_dict()


Places = list[tuple[nn.Module, str, Any]]
"""Module, attribute, and the parameter registered there."""


def register(module: nn.Module, instead: Mapping[Any, nn.Parameter]) -> Places:
    """Has ``module`` hold other parameters; where, and which it held."""
    places = [
        (each, name, p)
        for each in module.modules()
        for name, p in dict(own_parameters(each)).items()
        if p is not None and p in instead
    ]
    for each, name, p in places:
        own_parameters(each)[name] = instead[p]
    return places


class Engine(ABC):
    """Shards one module over the ranks, runs its steps, and makes it whole again.

    The strategy calls, in this order: :meth:`shard`; :meth:`attach`, when the user's optimizers are there; then for
    every batch :meth:`run` and, where a gradient is wanted, :meth:`backward` (under :meth:`no_sync` for all but the
    last micro-batch of a window) and :meth:`step`; at the end :meth:`restore`. All methods are collective: every rank
    calls them in the same order.
    """

    module: nn.Module
    """The argument of :meth:`shard`."""
    mesh: DeviceMesh
    """Of all ranks; shards lie along its axis "shard"."""
    root: nn.Module
    """The module whose call runs a step; holds the user's module. From :meth:`shard` on."""
    whole_bytes: int
    """Bytes of the module's whole parameters. From :meth:`shard` on."""

    peer_memory: PeerMemory | None = None
    """Among all ranks, where this engine has connections of its own between processes on CPUs."""

    def __init__(self, config: ZeroConfig, device: torch.device, dtypes: DtypePolicy) -> None:
        self.config = config
        self.device = device
        self.dtypes = dtypes
        self.shards_device = device
        """The device of the gradients' shards, on which their norms are joined."""
        self.hooks = UserHooks()
        """Where user code runs, on any rank."""
        self.keep_gathered = False
        """Whether parameters may stay whole between micro-batches: no user hook looks at the module there."""
        self.automatic = True
        """Whether one :meth:`run` is one forward (else the user runs forwards and backwards inside it)."""
        self.backward_is_users = False
        """Whether ``LightningModule.backward`` is overridden, so that one :meth:`backward` may be several."""
        self.offload_path: str | None = None
        """This run's folder on a fast disk, with nvme."""
        self.units: Sequence[nn.Module] = ()
        """Modules that are gathered together for each of their forwards, where they are of ``fully_shard``."""
        self.reduces = True
        """Whether the backward of this micro-batch ends a window; not inside :meth:`no_sync`."""
        self.optimizers: list[Optimizer] | None = None
        """Of a fit. A parameter that came beside the others after the set-up may stay if none of them holds it."""
        self._broadcasts_next = True

    @abstractmethod
    def shard(self, module: nn.Module) -> None:
        """Gives every rank rank 0's parameters and buffers, then only its share of the parameters."""

    def attach(self, optimizers: list[Optimizer], trainer: Mapping[str, Any]) -> None:  # noqa: B027
        """The optimizers of a fit, none of other loops; ``trainer`` holds what the Trainer was told about precision,
        accumulation and clipping, in the names of ``deepspeed_config.RunFacts``."""

    @abstractmethod
    def view(self) -> AbstractContextManager[Any]:
        """While it is entered, user code reads and writes whole tensors."""

    @abstractmethod
    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls ``module.<method>`` with whole parameters wherever it needs them."""

    @abstractmethod
    def backward(self, run_backward: Callable[[], None], retains_graph: bool = False) -> None:
        """Calls ``run_backward`` and leaves averaged gradients on the shards, unless under :meth:`no_sync`.

        Args:
            retains_graph: Another backward may follow through the same graph.
        """

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Marks the micro-batches before the last one of an accumulation window."""

    @abstractmethod
    def reshard(self) -> None:
        """Puts the shards back onto the module, so that reads and writes of user code are true."""

    @abstractmethod
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """``optimizer.step`` on this rank's shards, or on full tensors if it needs those."""

    @abstractmethod
    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Around a call of ``optimizer.step`` by a loss scaler."""

    @abstractmethod
    def on_shards(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """``optimizer`` holds this rank's shards of parameters and gradients."""

    def broadcast_buffers(self) -> None:
        """DDP's rule: once before each forward that follows a synchronized training forward; under manual optimization,
        where Lightning has DDP synchronize no forward, before the first one alone."""
        if self._broadcasts_next and self.config.broadcast_buffers:
            broadcast_coalesced(list(self.module.buffers()))
        self._broadcasts_next = torch.is_grad_enabled() and self.reduces and self.automatic

    @abstractmethod
    def gradients(self, optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Those of ``optimizer``, as plain tensors: this rank's shards, and the replicated ones."""

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Scales all gradients of ``optimizer`` so that their joint 2-norm is at most ``max_norm``; returns the norm
        before, 0-dim."""
        with torch.no_grad(), DisableTorchFunction():
            shards, wholes = self.gradients(optimizer)
            home = self.shards_device
            squared = sum_of_squares(shards, home)
            if self.mesh.size() > 1:  # replicas hold the same shards: each counts once
                dist.all_reduce(squared, group=self.mesh.get_group("shard"))
            if wholes:
                squared = squared + sum_of_squares(wholes, self.device).to(home)
            norm = squared.sqrt()
            scale_to_norm([*shards, *wholes], norm, max_norm)
            return norm

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Limits every gradient element of ``optimizer`` to ``[-clip_value, clip_value]``."""
        with torch.no_grad(), DisableTorchFunction():
            shards, wholes = self.gradients(optimizer)
            clamp([*shards, *wholes], clip_value)

    def any_rank(self, flag: Tensor) -> None:
        """Element-wise maximum of ``flag`` over the ranks, in place."""
        if self.mesh.size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)

    @abstractmethod
    def sharded_state_dict(self) -> dict[str, Any]:
        """``module.state_dict()`` holding this rank's shards themselves, as ``DTensor``; a tied parameter is one
        object under all its names."""

    @abstractmethod
    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` in PyTorch's own form, holding this rank's shards themselves."""

    @staticmethod
    def full(state: Any, on_rank_0: tuple[Agreement, Collected] | None = None) -> Any:
        """``state``, as one of the two above gave it, with whole tensors on the CPU, gathered one at a time.

        With ``on_rank_0``, an agreement of all ranks and the memory to collect in, the others send their parts and get
        meta tensors, which hold shape and dtype only.

        Raises:
            CheckpointError: On all ranks, before anything is sent, where rank 0 may not take that much.
        """
        done: dict[int, Tensor] = {}

        def one(path: Any, tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = on_cpu(tensor)
            return done[id(tensor)]

        def on_cpu(tensor: Tensor) -> Tensor:
            if on_rank_0 is None:
                return gathered(tensor).cpu()
            value = gathered_on_rank_0(tensor, on_rank_0[1].empty)
            return placeholder(tensor) if value is None else value.cpu()

        with torch.no_grad(), DisableTorchFunction():
            if on_rank_0 is not None:
                agreement, memory = on_rank_0
                agreement.gather(None, error=memory.why_not(full_bytes(state)) if agreement.rank == 0 else None)
            return map_tensors(one, state)

    @contextmanager
    def full_parameters(self, modify: bool = False) -> Iterator[None]:
        """The module holds whole plain parameters of its own dtype; with ``modify``, rank 0's become everybody's."""
        with torch.no_grad(), DisableTorchFunction():
            self.reshard()
            whole = self.whole_parameters()
            versions = {p: version_of(w) for p, w in whole.items()}
            places = register(self.module, whole)
        try:
            with self.whole_on_module():
                yield
        finally:
            with torch.no_grad(), DisableTorchFunction():
                for module, name, p in places:
                    own_parameters(module)[name] = p
                if modify:
                    self.store_whole(whole)
        if not modify and any(version_of(w) != versions[p] for p, w in whole.items()):
            raise RuntimeError(
                "full_parameters(module): parameters were written to, and what was written is lost: use"
                " full_parameters(module, modify=True)."
            )

    @abstractmethod
    def whole_parameters(self) -> dict[Tensor, nn.Parameter]:
        """Sharded parameters -> whole copies of their values (collective)."""

    @abstractmethod
    def whole_on_module(self) -> AbstractContextManager[None]:
        """While it is entered, the module holds such copies: nothing has to be gathered for it."""

    @abstractmethod
    def store_whole(self, whole: Mapping[Any, Tensor]) -> None:
        """Broadcasts rank 0's values of ``whole`` and of replicated parameters; each rank keeps its share."""

    @abstractmethod
    def model_state(self, optimizers: Iterable[Optimizer]) -> ModelState:
        """The tensors that this rank holds right now, and their places; not collective."""

    @abstractmethod
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Loads a whole ``optimizer.state_dict()``, each rank keeping its shards."""

    @property
    @abstractmethod
    def known_parameters(self) -> Collection[Tensor]:
        """Those that the module was set up with, whether sharded or kept whole."""

    def check_parameters(self) -> None:
        """Raises ``ValueError`` when the module's parameters are no longer those that were sharded."""
        known, held = self.known_parameters, None
        if self.optimizers is not None:
            held = {p for o in self.optimizers for group in o.param_groups for p in group["params"]}
        named = dict(self.module.named_parameters())
        for name, p in named.items():
            # One that comes beside the others may be left untrained, as under DDP; one in another's place may not
            if p not in known and (held is None or p in held or not set(known) <= set(named.values())):
                raise ValueError(
                    f"parameter {name!r} was replaced or added after the strategy set the module up, so it would"
                    " neither be sharded nor reduced: create it in __init__ or configure_model, or write into the"
                    " existing one under torch.no_grad() (load_state_dict without assign=True)."
                )

    def meet(self) -> None:  # noqa: B027
        """This rank is about to wait for the others, outside of a step: those that still read parameters are given
        their part (collective)."""

    def end_window(self, meets: bool = True) -> None:  # noqa: B027
        """User code between two calls of the engine is over; with ``meets`` on all ranks (collective)."""

    @abstractmethod
    def end_reads(self, together: bool) -> None:
        """User code reads no more; with ``together`` on all ranks (collective)."""

    @abstractmethod
    def restore(self, whole: bool, *, on_whole: OnWhole = unheard) -> None:
        """The module is an ordinary one again, with whole parameters if ``whole``; states of optimizers are left as
        :func:`~lightning_zero.engines.after_run.leave_states` does it. Each parameter is given to ``on_whole`` in
        turn."""
