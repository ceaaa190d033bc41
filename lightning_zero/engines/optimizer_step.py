"""The optimizer's step, for both engines. Between steps an optimizer holds the user's parameters; it steps in one of
two ways.

[On shards] An *element-wise* optimizer (SGD, Adam, AdamW, ...; see :mod:`lightning_zero.engines.elementwise`) updates
every element from that element's own history. During ``step`` the optimizer holds this rank's *parts*, the local
tensors of the shards of parameters, gradients and states: no communication, no ``DTensor`` dispatch. Step hooks are
user code: they run outside of that context, on the module's parameters. Between steps ``optimizer.state`` holds one
tensor for each sharded state, which becomes full when user code touches it
(:mod:`lightning_zero.engines.residency`). States that user code has put there (``load_state_dict``) are sharded at the
next step.

[On full tensors] Any other optimizer (Muon, LBFGS, LAMB, GaLore, Lookahead, ...) may combine elements. It steps on the
user's parameters and gradients, which are gathered when the optimizer touches them, as for any user code. Its states
are full on every rank, as under DDP, and every rank computes the same step. The optimizer gets the closure and may call
it at any time and repeatedly (LBFGS, SAM).

With CPU offload the parts are in host memory, and the step runs there. Adam and AdamW then use PyTorch's fused kernel,
which reads and writes every element once, unless the user chose a kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.shards import local
from lightning_zero.engines.elementwise import is_elementwise, is_known, keys_besides_elements
from lightning_zero.private import torch_optim
from lightning_zero.private.torch import DisableTorchFunction


class Parts(Protocol):
    """An engine's interface: parts of parameters on this rank, and the events of a step."""

    def of(self, p: Tensor) -> Tensor | None:
        """This rank's part of the user's ``p``; ``None`` if ``p`` is replicated."""

    def size(self, p: Tensor) -> torch.Size:
        """The full shape of ``p``."""

    def grad(self, p: Tensor, part: Tensor) -> Tensor | None:
        """This rank's part of the gradient."""

    def store_grad(self, p: Tensor, grad: Tensor) -> None:
        """Stores ``grad``, which :meth:`grad` has returned and the step may have written to."""

    def attributes(self, p: Tensor) -> Mapping[str, Any]:
        """Attributes that the user has set on ``p``."""

    def cut(self, p: Tensor, full: Tensor) -> Tensor:
        """Copies this rank's part out of a state of the shape of ``p``: a plain tensor or an earlier run's shard."""

    def of_state(self, value: Any) -> Tensor | None:
        """The part of a tensor that :meth:`state` has made; ``None`` for all other values."""

    def state(self, p: Tensor, part: Tensor) -> Tensor:
        """The tensor that represents ``part`` in ``optimizer.state[p]`` between steps."""

    def settle(self) -> None:
        """Stores what user code has written to parameters and gradients; gradients are then complete."""

    def stepped(self, optimizer: Optimizer) -> None:
        """``optimizer`` has stepped on parts."""

    def begin_full(self) -> None:
        """An optimizer is about to step on full tensors, possibly before its closure has run."""

    def full_step(self, is_running: bool) -> Any:
        """Context of a step on full tensors (``True``), in which all ranks touch the same tensors, and of the closure
        inside the step (``False``), in which user hooks may run. Both close all tensors at their end."""


class ShardedStep:
    """Steps one optimizer; see the file's docstring. The constructor shards the optimizer's existing states
    (collective).

    Args:
        optimizer: Holds the module's parameters.
        parts: The engine's parts.
        declared: ``ZeroConfig.elementwise_optimizers``.
        fuses: Whether parts are in host memory, so that Adam uses the fused kernel there.
        new_states: Makes the context of a step on parts that creates the optimizer's first states.

    Raises:
        ValueError: If ``optimizer`` is declared as element-wise and cannot step on parts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Parts,
        declared: Collection[str] = (),
        fuses: bool = False,
        new_states: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.optimizer, self._parts, self._declared = optimizer, parts, declared
        self._fuses, self._new_states = fuses, new_states
        self._besides = keys_besides_elements(optimizer) if self.is_elementwise else frozenset()
        with torch.no_grad(), self.on_shards():
            pass

    @property
    def is_elementwise(self) -> bool:
        """Whether the optimizer steps on parts. Computed at each call: user code may replace ``optimizer.step``."""
        return is_elementwise(self.optimizer, self._declared)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Runs ``optimizer.step`` once. For a step on parts ``closure`` is evaluated first; otherwise the optimizer
        calls it."""
        step = type(self.optimizer).step
        if closure is not None and not self.is_elementwise and "closure" in inspect.signature(step).parameters:
            return self._step_with(closure, **kwargs)
        with self.stepping(closure) as losses:
            result = self.optimizer.step(**kwargs)
        return losses[0] if losses and result is None else result

    def _step_with(self, closure: Callable[[], Any], **kwargs: Any) -> Any:
        decides_by_loss = not is_known(self.optimizer) or type(self.optimizer) is torch.optim.LBFGS
        losses = AgreedLosses(self.optimizer.param_groups[0]["params"][0].device)
        self._parts.begin_full()

        def evaluate() -> Any:
            with self._parts.full_step(False):
                with torch.enable_grad():
                    loss = closure()
                self._parts.settle()
            with DisableTorchFunction(), torch.no_grad():
                return losses.mean(loss) if decides_by_loss else loss

        with self._parts.full_step(True):
            result = self.optimizer.step(closure=evaluate, **kwargs)
        return losses.own(result)

    @contextmanager
    def stepping(self, closure: Callable[[], Any] | None = None) -> Iterator[list[Any]]:
        """Context in which ``optimizer.step`` may be called without a closure. ``closure`` is evaluated before the
        optimizer reads any tensor; the yielded list then has the loss."""
        losses: list[Any] = []

        def begin() -> None:
            if closure is not None:
                with torch.enable_grad():
                    losses.append(closure())
            self._parts.settle()
            inside.enter_context(self._step_on_shards() if self.is_elementwise else self._parts.full_step(True))

        with ExitStack() as inside:
            if self.is_elementwise and torch_optim.has_step_hooks(self.optimizer):
                with torch_optim.inside_step_hooks(self.optimizer, begin, inside.close):
                    yield losses
            else:
                begin()
                yield losses

    @contextmanager
    def _step_on_shards(self) -> Iterator[None]:
        context = nullcontext if self.optimizer.state else self._new_states
        with self.on_shards(), context():
            yield
        self._parts.stepped(self.optimizer)

    # -- parts ---------------------------------------------------------------------------------------------------

    @contextmanager
    def on_shards(self) -> Iterator[None]:
        """Context in which the optimizer holds parts of parameters and gradients, and of states if element-wise."""
        with DisableTorchFunction():  # work on parts is not user code
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            pairs = [(p, part) for p in held if (part := self._parts.of(p)) is not None]
            shown: dict[int, tuple[Tensor, Tensor]] = {}
            self._hold(dict(pairs))
            is_elementwise = self.is_elementwise
            shares_attributes = is_elementwise and not is_known(self.optimizer)
            for p, part in pairs:
                part.grad = self._parts.grad(p, part)
                if shares_attributes and type(part) is Tensor:  # a subclass keeps its inner tensors in the same dict
                    vars(part).update(self._parts.attributes(p))
                if is_elementwise and p in self.optimizer.state:
                    self._enter_states(p, part, shown)
            try:
                with self._fused():
                    yield
            finally:  # also after an error: user code must never find parts in the optimizer
                self._hold({part: p for p, part in pairs})
                for p, part in pairs:
                    if part.grad is not None:
                        self._parts.store_grad(p, part.grad)
                        part.grad = None
                    if shares_attributes and type(part) is Tensor:
                        vars(p).update(vars(part))
                    if part in self.optimizer.state:
                        self._leave_states(p, part, shown)

    def _hold(self, instead: Mapping[Tensor, Tensor]) -> None:
        for group in self.optimizer.param_groups:  # read again each time: load_state_dict replaces the groups
            group["params"][:] = [instead.get(p, p) for p in group["params"]]

    def _enter_states(self, p: Tensor, part: Tensor, shown: dict[int, tuple[Tensor, Tensor]]) -> None:
        entry = self.optimizer.state[part] = self.optimizer.state.pop(p)
        for key, value in entry.items():
            known = self._parts.of_state(value)
            if known is not None:
                shown[id(known)] = known, value
                entry[key] = known
            elif self._has_parts(p, key, value):  # set by user code or an earlier run
                with torch.no_grad():
                    entry[key] = self._parts.cut(p, value)

    def _leave_states(self, p: Tensor, part: Tensor, shown: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        entry = self.optimizer.state[p] = self.optimizer.state.pop(part)
        for key, value in entry.items():
            if id(value) in shown:
                entry[key] = shown[id(value)][1]
            elif key not in self._besides and isinstance(value, Tensor) and value.dim() and value.shape == part.shape:
                entry[key] = self._parts.state(p, value)

    def _has_parts(self, p: Tensor, key: str, value: Any) -> bool:
        """Whether ``value``, a state of ``p``, is a full array of elements that can be sharded."""
        if key in self._besides or not isinstance(value, Tensor) or not value.dim():
            return False
        # A subclass made of inner tensors (torchao's 8-bit states) cannot be cut by elements
        is_plain = not hasattr(type(value), "__tensor_flatten__") and value.layout == torch.strided
        return is_plain and value.shape == self._parts.size(p)

    @contextmanager
    def _fused(self) -> Iterator[None]:
        if not (self._fuses and self.is_elementwise):
            yield
            return
        with fused(self.optimizer):
            yield

    # -- states in the form of checkpoints -------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads full tensors; if the optimizer is element-wise, each rank keeps its parts (collective).

        Raises:
            ValueError: If ``state`` has another number of parameters.
        """
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        saved = sum(len(group["params"]) for group in state.get("param_groups", ()))
        if saved != len(params) and "param_groups" in state:
            raise ValueError(
                f"the checkpoint's {type(self.optimizer).__name__} state has {saved} parameters, but the optimizer has"
                f" {len(params)}: resume with the module and configure_optimizers that saved it."
            )
        if not self.is_elementwise or torch_optim.has_own_state_dict(self.optimizer):
            # Clone: the optimizer would otherwise step on memory that is mapped from the checkpoint's file.
            self.optimizer.load_state_dict(map_tensors(lambda path, t: t.clone(), dict(state)))
            with torch.no_grad(), self.on_shards():
                return

        def lay_out(index: int, key: str, value: Any) -> Any:
            if self._parts.of(params[index]) is not None and self._has_parts(params[index], key, value):
                return self._parts.cut(params[index], value)
            return map_tensors(lambda path, t: t.clone(), value)

        with torch.no_grad(), DisableTorchFunction():
            of_params = {
                index: {key: lay_out(index, key, value) for key, value in values.items()}
                for index, values in state["state"].items()
            }
            with self.on_shards():  # load_state_dict casts states to the dtype of the tensors that the optimizer holds
                self.optimizer.load_state_dict({**state, "state": of_params})


def refuse_sharding(optimizers: Collection[Optimizer]) -> None:
    """Raises ``ValueError`` for an optimizer that itself shards its states."""
    for optimizer in optimizers:
        if any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__):
            inner = type(getattr(optimizer, "optim", optimizer)).__name__
            raise ValueError(
                f"ZeroRedundancyOptimizer shards the states of {inner}, which every ZeRO stage does already:"
                f" return the {inner} from configure_optimizers."
            )


class AgreedLosses:
    """Losses of a closure for an optimizer whose control flow may depend on them: the mean over all ranks.

    Each rank stores its rows of the stepped parameters, so all ranks must take the same decisions, such as the number
    of evaluations (LBFGS) or the step size (AliG). The user gets this rank's loss.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._told: list[tuple[Any, Any]] = []

    def mean(self, loss: Any) -> Any:
        is_number = isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1)
        if not is_number or dist.get_world_size() == 1:
            return loss
        total = torch.as_tensor(loss).detach().to(self._device, copy=True)
        dist.all_reduce(total)
        mean = total / dist.get_world_size()
        # .item() synchronizes the device; a closure that returns a float has already done so
        self._told.append((mean if isinstance(loss, Tensor) else mean.item(), loss))
        return self._told[-1][0]

    def own(self, result: Any) -> Any:
        """Returns ``result`` of the optimizer's step; a mean loss is replaced by the loss of this rank's batch."""
        return next((loss for mean, loss in self._told if result is mean), result)


def fusible_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the groups of an Adam or AdamW that PyTorch's fused kernel can step: their floating-point shards are in
    host memory, and the user chose no kernel."""
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
def fused(optimizer: Optimizer) -> Iterator[None]:
    """Context of a step with the fused kernel. The groups are restored after it, so users and checkpoints do not see
    the setting."""
    groups = fusible_groups(optimizer)
    for group in groups:
        group["fused"] = True
        for p in group["params"]:  # the kernel needs a replicated parameter's counter on its device
            state = optimizer.state.get(p)
            if state and p.device != state["step"].device:
                state["step"] = state["step"].to(p.device)
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None
