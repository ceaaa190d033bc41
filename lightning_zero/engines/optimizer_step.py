"""The optimizer's step, for both engines. Between steps it holds the user's own parameters; there are two ways.

[On shards] An *element-wise* optimizer (SGD, Adam, AdamW, ...; see :mod:`lightning_zero.engines.elementwise`) updates
every element from that element's own history. For the length of ``step`` it holds this rank's *parts* of parameters,
gradients and states: no communication, no ``DTensor`` dispatch. Step hooks are user code: they run outside of that, on
the module's own parameters. Between steps ``optimizer.state`` has one tensor per state tensor of its parameter's shape,
which is full when user code touches it (see :mod:`lightning_zero.engines.residency`). States that a user has put there
(``load_state_dict``) become parts at the next step.

[On full tensors] Any other optimizer (Muon, LBFGS, LAMB, GaLore, Lookahead, ...) may look across elements. It steps on
the user's own parameters and gradients, which come as it touches them, like any other user code; its states are full on
every rank, as under DDP. Every rank computes the same step. It is handed its closure, which it may call when and as
often as it likes (LBFGS, SAM).

With CPU offload parts lie in host memory, and so does the step on them: for its length Adam and AdamW get PyTorch's
fused kernel, which reads and writes every element once, unless their user chose a kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.checkpoint.layout import map_tensors
from lightning_zero.comm.shards import local
from lightning_zero.engines.elementwise import is_elementwise, is_known, keys_beside_elements
from lightning_zero.private import torch_optim
from lightning_zero.private.torch import DisableTorchFunction


class Files(Protocol):
    """Access to the shards that lie in files."""

    def in_parts(self, shards: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Local tensors, those in turn that come into memory together."""

    def keep(self, optimizer: Optimizer, shard: Tensor, key: str, value: Tensor) -> Tensor:
        """``value``, a state beside the local tensor ``shard``, in the file, or itself if it belongs into none."""


class Parts(Protocol):
    """An engine's side: parts of parameters on this rank, and the moments of a step."""

    def of(self, p: Tensor) -> Tensor | None:
        """This rank's part of the user's ``p``; ``None`` if every rank holds all of it."""

    def size(self, p: Tensor) -> torch.Size:
        """The full shape of ``p``."""

    def grad(self, p: Tensor, part: Tensor) -> Tensor | None:
        """This rank's part of the gradient."""

    def store_grad(self, p: Tensor, grad: Tensor) -> None:
        """What was written to the tensor that :meth:`grad` has returned counts."""

    def attributes(self, p: Tensor) -> Mapping[str, Any]:
        """Those that the user has put on ``p``."""

    def cut(self, p: Tensor, full: Tensor) -> Tensor:
        """This rank's part of a state of the shape of ``p``, plain or an earlier run's shard; in memory of its own."""

    def of_state(self, value: Any) -> Tensor | None:
        """The part of a tensor that :meth:`state` has made; ``None`` for all others."""

    def state(self, p: Tensor, part: Tensor) -> Tensor:
        """What stands for ``part`` in ``optimizer.state[p]`` between steps."""

    def settle(self) -> None:
        """All that user code has written to parameters and gradients counts; gradients are complete."""

    def stepped(self, optimizer: Optimizer) -> None:
        """``optimizer`` has stepped on parts."""

    def begin_full(self) -> None:
        """An optimizer is about to step on full tensors, maybe before its closure has run."""

    def full_step(self, is_running: bool) -> Any:
        """Around a step on full tensors (``True``), in which all ranks touch the same, and around the closure inside
        it (``False``), in which hooks of users may run; both leave nothing open."""


class ShardedStep:
    """Steps one optimizer; see the module's text. The constructor lays out the states that are there (collective).

    Args:
        optimizer: Holds the module's own parameters.
        parts: The engine's.
        declared: ``ZeroConfig.elementwise_optimizers``.
        fuses: Whether parts lie in host memory, so that Adam is fused there.
        files: Where they lie, with nvme.

    Raises:
        ValueError: For one that is declared and cannot step on parts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Parts,
        declared: Collection[str] = (),
        fuses: bool = False,
        files: Files | None = None,
    ) -> None:
        self.optimizer, self._parts, self._declared = optimizer, parts, declared
        self._fuses, self._files = fuses, files
        self._beside = keys_beside_elements(optimizer) if self.is_elementwise else frozenset()
        with torch.no_grad(), self.on_shards():
            pass

    @property
    def is_elementwise(self) -> bool:
        """Whether it steps on parts; user code may replace ``optimizer.step`` at any time."""
        return is_elementwise(self.optimizer, self._declared)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One ``optimizer.step``. ``closure`` is evaluated first where the optimizer steps on parts, else it is the
        optimizer's to call."""
        takes_closure = "closure" in inspect.signature(type(self.optimizer).step).parameters
        if closure is not None and takes_closure and not self.is_elementwise:
            return self._step_with(closure, **kwargs)
        with self.stepping(closure) as losses:
            if self._files is not None and is_known(self.optimizer) and not torch_optim.has_step_hooks(self.optimizer):
                result = self._step_in_parts(self._files, **kwargs)
            else:
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
        """Inside, ``optimizer.step`` may be called, without a closure; ``closure`` is evaluated before it looks at
        anything. Yields a list that has the loss then."""
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
        with self.on_shards():
            yield
        self._parts.stepped(self.optimizer)

    def _step_in_parts(self, files: Files, **kwargs: Any) -> Any:
        """``optimizer.step`` for some parameters after the others: for PyTorch's own, which keep nothing beside groups
        and states, these are as many steps of each parameter by itself."""
        groups = self.optimizer.param_groups
        held = [group["params"] for group in groups]
        group_of = {id(p): i for i, params in enumerate(held) for p in params}
        result = None
        try:
            for part in files.in_parts([p for params in held for p in params]):
                for group in groups:
                    group["params"] = []
                for p in part:
                    groups[group_of[id(p)]]["params"].append(p)
                self.optimizer.param_groups = [group for group in groups if group["params"]]
                result = self.optimizer.step(**kwargs)
                for p in part:
                    self._keep(files, p)
        finally:
            self.optimizer.param_groups = groups
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
        return result

    def _keep(self, files: Files, part: Tensor) -> None:
        """States beside ``part`` lie in the file."""
        state = self.optimizer.state.get(part, {})
        for key, value in list(state.items()):
            if isinstance(value, Tensor):
                state[key] = files.keep(self.optimizer, part, key, value)

    # -- parts ---------------------------------------------------------------------------------------------------

    @contextmanager
    def on_shards(self) -> Iterator[None]:
        """The optimizer holds parts of parameters and gradients, and those of states if it is element-wise."""
        with DisableTorchFunction():  # work on parts needs no translation for user code
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            pairs = [(p, part) for p in held if (part := self._parts.of(p)) is not None]
            shown: dict[int, tuple[Tensor, Tensor]] = {}
            self._hold(dict(pairs))
            lends = self.is_elementwise and not is_known(self.optimizer)
            for p, part in pairs:
                part.grad = self._parts.grad(p, part)
                if lends and type(part) is Tensor:  # a subclass has what it is made of there
                    vars(part).update(self._parts.attributes(p))
                if self.is_elementwise and p in self.optimizer.state:
                    self._enter_states(p, part, shown)
            try:
                with self._fused():
                    yield
            finally:
                self._hold({part: p for p, part in pairs})
                for p, part in pairs:
                    if part.grad is not None:
                        self._parts.store_grad(p, part.grad)
                        part.grad = None
                    if lends and type(part) is Tensor:
                        vars(p).update(vars(part))
                    if part in self.optimizer.state:
                        self._leave_states(p, part, shown)

    def _hold(self, instead: Mapping[Tensor, Tensor]) -> None:
        for group in self.optimizer.param_groups:  # the current ones: load_state_dict makes others
            group["params"][:] = [instead.get(p, p) for p in group["params"]]

    def _enter_states(self, p: Tensor, part: Tensor, shown: dict[int, tuple[Tensor, Tensor]]) -> None:
        entry = self.optimizer.state[part] = self.optimizer.state.pop(p)
        for key, value in entry.items():
            known = self._parts.of_state(value)
            if known is not None:
                shown[id(known)] = known, value
                entry[key] = known
            elif self._has_parts(p, key, value):  # a user's, or of an earlier run
                with torch.no_grad():
                    entry[key] = self._parts.cut(p, value)

    def _leave_states(self, p: Tensor, part: Tensor, shown: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        entry = self.optimizer.state[p] = self.optimizer.state.pop(part)
        for key, value in entry.items():
            if id(value) in shown:
                entry[key] = shown[id(value)][1]
            elif key not in self._beside and isinstance(value, Tensor) and value.dim() and value.shape == part.shape:
                if self._files is not None:
                    value = self._files.keep(self.optimizer, part, key, value)
                entry[key] = self._parts.state(p, value)

    def _has_parts(self, p: Tensor, key: str, value: Any) -> bool:
        """Whether ``value``, a full state of ``p``, is an array of elements that parts can be cut from."""
        if key in self._beside or not isinstance(value, Tensor) or not value.dim():
            return False
        # A subclass made of other tensors (torchao's 8 bits) is no array of elements
        is_plain = not hasattr(type(value), "__tensor_flatten__") and value.layout == torch.strided
        return is_plain and value.shape == self._parts.size(p)

    @contextmanager
    def _fused(self) -> Iterator[None]:
        if not (self._fuses and self.is_elementwise):
            yield
            return
        with fused(self.optimizer):
            yield

    # -- states as checkpoints have them -------------------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads full tensors, of which each rank keeps its parts if the optimizer is element-wise (collective).

        Raises:
            ValueError: If they are of another number of parameters.
        """
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        saved = sum(len(group["params"]) for group in state.get("param_groups", ()))
        if saved != len(params) and "param_groups" in state:
            raise ValueError(
                f"the checkpoint's {type(self.optimizer).__name__} state is of {saved} parameters, the optimizer has"
                f" {len(params)}: resume with the module and configure_optimizers that saved it."
            )
        if not self.is_elementwise or torch_optim.has_own_state_dict(self.optimizer):
            self.optimizer.load_state_dict(map_tensors(lambda path, t: t.clone(), dict(state)))  # off the disk
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
            with self.on_shards():  # states get the dtype of what the optimizer holds
                self.optimizer.load_state_dict({**state, "state": of_params})


def refuse_sharding(optimizers: Collection[Optimizer]) -> None:
    """Raises ``ValueError`` for an optimizer that shards its states itself."""
    for optimizer in optimizers:
        if any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__):
            inner = type(getattr(optimizer, "optim", optimizer)).__name__
            raise ValueError(
                f"ZeroRedundancyOptimizer shards the states of {inner} by itself, which every ZeRO stage does already:"
                f" return the {inner} from configure_optimizers."
            )


class AgreedLosses:
    """A closure's losses as an optimizer has them, which may decide by them: the mean of all ranks'.

    Each rank keeps the rows that it has stepped, so all have to decide alike: LBFGS how often it evaluates, AliG how
    far it goes. The user is given this rank's own.
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
        # No number but where the user's closure has made one of its loss, and waited for it already
        self._told.append((mean if isinstance(loss, Tensor) else mean.item(), loss))
        return self._told[-1][0]

    def own(self, result: Any) -> Any:
        """``result`` of the optimizer's step, the loss of this rank's batch where it is a mean."""
        return next((loss for mean, loss in self._told if result is mean), result)


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
def fused(optimizer: Optimizer) -> Iterator[None]:
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
