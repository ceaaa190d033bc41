"""The optimizer's step on this rank's shards.

Users' optimizers always hold the module's own parameters, ``DTensor`` shards during a run. For the length of one step
they are handed stand-ins:

- an *element-wise* optimizer (SGD, Adam, AdamW, ...) updates every element from that element's own history, so it
  steps on the local shards directly: no communication, no ``DTensor`` dispatch;
- any other (Muon, Adafactor, LBFGS, LAMB, ...) looks across elements, so it steps on whole tensors: parameters,
  gradients and states are gathered, every rank computes the same step, and the shards are stored again.

With CPU offload the shards lie in host memory, and so does the step of an element-wise optimizer: for its length Adam
and AdamW get PyTorch's fused kernel, which reads and writes every element once, unless their user chose a kernel. The
others' whole tensors are gathered on the device.

Either way ``optimizer.state`` holds, between steps, one ``DTensor`` per state tensor that has its parameter's shape.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_zero.comm.shards import as_shard, gathered, local, shard_like
from lightning_zero.private.torch import DisableTorchFunction

KNOWN_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop ASGD".split()
)


class ShardedStep:
    """Steps one optimizer; see the module's text.

    Args:
        optimizer: Holds the module's own parameters.
        fuses: Whether its shards lie in host memory, so that Adam is fused there.
    """

    def __init__(self, optimizer: Optimizer, fuses: bool = False) -> None:
        self.optimizer = optimizer
        self.fuses = fuses
        self.elementwise = is_elementwise(optimizer)
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        """Whether the optimizer evaluates its closure itself, perhaps several times (LBFGS)."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One ``optimizer.step``; ``closure`` is evaluated first, or by the optimizer where it insists (LBFGS)."""
        if not self.needs_closure:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with self.stand_ins(), DisableTorchFunction():
                result = self.optimizer.step(**kwargs)
            return loss if result is None else result
        assert closure is not None
        with self.stand_ins() as swap:
            return self.optimizer.step(closure=swap.around(closure), **kwargs)

    @contextmanager
    def stand_ins(self, on_shards: bool | None = None) -> Iterator[_Swap]:
        """The optimizer holds tensors it can step on; what it did to them is stored on leaving.

        Args:
            on_shards: Local shards (``True``) or whole tensors (``False``); by default what the optimizer needs.
        """
        on_shards = self.elementwise if on_shards is None else on_shards
        with DisableTorchFunction():  # our own work on shards needs no translation for user code
            swap = _LocalSwap(self.optimizer) if on_shards else _WholeSwap(self.optimizer)
        try:
            with _fused(self.optimizer) if self.fuses and on_shards else nullcontext():
                yield swap
        finally:
            with DisableTorchFunction():
                swap.undo()


class _Swap(ABC):
    """Replaces the sharded parameters of an optimizer and their states, and brings both back."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state: defaultdict[Tensor, Any] = optimizer.state  # what users see
        sharded = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
        self.pairs = [(p, self.stand_in(p)) for p in sharded]
        self.hold({id(p): stand_in for p, stand_in in self.pairs})
        own = set(sharded)
        optimizer.state = defaultdict(dict, {key: value for key, value in self.state.items() if key not in own})
        for p, stand_in in self.pairs:
            if p in self.state:
                optimizer.state[stand_in] = {k: self.enter(p, v) for k, v in self.state[p].items()}

    def hold(self, instead: dict[int, Tensor]) -> None:
        """Exchanges parameters of the optimizer by identity, in place: LBFGS keeps the list itself."""
        for group in self.optimizer.param_groups:
            group["params"][:] = [instead.get(id(p), p) for p in group["params"]]

    def undo(self) -> None:
        self.hold({id(stand_in): p for p, stand_in in self.pairs})
        stepped, self.optimizer.state = self.optimizer.state, self.state
        for p, stand_in in self.pairs:
            self.store(p, stand_in)
            stand_in.grad = None
            new = stepped.pop(stand_in, None)
            if new is not None:
                seen = self.state[p]
                for key, value in new.items():
                    seen[key] = self.leave(p, value, seen.get(key))
        self.state.update(stepped)

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` as the optimizer should call it while it holds stand-ins."""
        raise AssertionError("an optimizer that insists on its closure is never element-wise")

    @abstractmethod
    def stand_in(self, p: DTensor) -> Tensor:
        """What the optimizer holds instead of ``p``, with its gradient."""

    @abstractmethod
    def store(self, p: DTensor, stand_in: Tensor) -> None:
        """Writes the stand-in's values into ``p``."""

    @abstractmethod
    def enter(self, p: DTensor, value: Any) -> Any:
        """A state value of ``p`` as the optimizer expects it beside the stand-in."""

    @abstractmethod
    def leave(self, p: DTensor, value: Any, seen: Any) -> Any:
        """The way back; ``seen`` is what users saw under this key before the step."""


class _LocalSwap(_Swap):
    """Stand-ins are the local shards themselves."""

    def stand_in(self, p: DTensor) -> Tensor:
        shard = local(p)
        shard.grad = None if p.grad is None else local(p.grad)
        return shard

    def store(self, p: DTensor, stand_in: Tensor) -> None:
        pass  # stepped in place

    def enter(self, p: DTensor, value: Any) -> Any:
        return local(value) if isinstance(value, Tensor) else value

    def leave(self, p: DTensor, value: Any, seen: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != local(p).shape:
            return value
        if isinstance(seen, DTensor) and local(seen) is value:
            return seen
        return as_shard(value, p)


class _WholeSwap(_Swap):
    """Stand-ins are whole tensors, the same on every rank."""

    def stand_in(self, p: DTensor) -> Tensor:
        full = gathered(p)
        full.requires_grad_(p.requires_grad)
        full.grad = None if p.grad is None else gathered(p.grad)
        return full

    def store(self, p: DTensor, stand_in: Tensor) -> None:
        with torch.no_grad():
            local(p).copy_(local(shard_like(stand_in, p)))

    def enter(self, p: DTensor, value: Any) -> Any:
        return gathered(value) if isinstance(value, DTensor) else value

    def leave(self, p: DTensor, value: Any, seen: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == p.shape:
            sharded = shard_like(value, p)
            if isinstance(seen, DTensor) and seen.dtype == sharded.dtype:
                local(seen).copy_(local(sharded))
                return seen
            return sharded
        return value

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with DisableTorchFunction():
                for p, stand_in in self.pairs:
                    self.store(p, stand_in)
                self.hold({id(stand_in): p for p, stand_in in self.pairs})
            loss = closure()
            with DisableTorchFunction():
                self.hold({id(p): stand_in for p, stand_in in self.pairs})
                for p, stand_in in self.pairs:
                    stand_in.grad = None if p.grad is None else gathered(p.grad)
            return loss

        return evaluate


def fusible_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of an Adam or AdamW for PyTorch's fused kernel: floating-point shards in host memory, and no kernel
    was chosen."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return []

    def fits(group: dict[str, Any]) -> bool:
        chosen = any(group[key] is not None for key in ("fused", "foreach"))
        special = group["capturable"] or group["differentiable"]
        tensors = any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"]))
        return not (chosen or special or tensors)

    def on_host(group: dict[str, Any]) -> bool:
        params = [local(p) for p in group["params"]]
        return all(p.is_floating_point() for p in params) and any(p.device.type == "cpu" for p in params)

    return [group for group in optimizer.param_groups if fits(group) and on_host(group)]


@contextmanager
def _fused(optimizer: Optimizer) -> Iterator[None]:
    """For the length of a step; what users and checkpoints see of the groups stays as it was."""
    groups = fusible_groups(optimizer)
    for group in groups:
        group["fused"] = True
        for p in group["params"]:  # the kernel wants the counter of a replicated parameter beside it on the device
            state = optimizer.state.get(p)
            if state and p.device != state["step"].device:
                state["step"] = state["step"].to(p.device)
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether stepping on parts of a parameter equals stepping on the whole of it.

    Known for PyTorch's own; others are tried out: three steps on small random parameters, whole and cut in two, must
    agree to the last bit. An optimizer that cannot be tried counts as not element-wise, which is always right.
    """
    if type(optimizer) in KNOWN_ELEMENTWISE:
        return True
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    try:
        return _tried_elementwise(optimizer)
    except Exception:  # whatever a third-party constructor raises only means that it can't be tried
        return False


def keys_beside_elements(optimizer: Optimizer) -> frozenset[str]:
    """State keys of an element-wise optimizer under which it keeps tensors of another shape than its parameter's, such
    as a counter of shape ``(1,)``: beside a part of one element their shape does not tell. PyTorch's own have only
    0-dim ones; others are tried out."""
    if type(optimizer) in KNOWN_ELEMENTWISE:
        return frozenset()
    with DisableTorchFunction():
        p = torch.ones(5, requires_grad=True)
        p.grad = torch.ones(5)
        tried = _like(optimizer, [p])
        tried.step()
        return frozenset(key for key, v in tried.state[p].items() if isinstance(v, Tensor) and v.shape != p.shape)


def _like(optimizer: Optimizer, tensors: list[Tensor]) -> Optimizer:
    accepted = inspect.signature(type(optimizer).__init__).parameters
    settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    return type(optimizer)(tensors, **settings)


def _tried_elementwise(optimizer: Optimizer) -> bool:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(6, 4, generator=generator), torch.randn(5, generator=generator)]
    parts = [part.clone() for w in whole for part in w.chunk(2)]
    with DisableTorchFunction():
        tried = [_like(optimizer, [t.requires_grad_() for t in tensors]) for tensors in (whole, parts)]
        for _ in range(3):
            grads = [torch.randn(w.shape, generator=generator) for w in whole]
            for tensors, values in ((whole, grads), (parts, [part for g in grads for part in g.chunk(2)])):
                for t, value in zip(tensors, values, strict=True):
                    t.grad = value.clone()
            for each in tried:
                each.step()
        rejoined = [torch.cat(parts[:2]), torch.cat(parts[2:])]
        return all(torch.equal(a, b) for a, b in zip(whole, rejoined, strict=True))
