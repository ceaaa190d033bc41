"""Optimizers as third parties write them, each with one habit that breaks whoever takes it for element-wise or for
self-contained, and the kinds that train with them.

Without the packages themselves: ``tests/helpers/models.py`` has those. ``KINDS`` becomes part of the zoo's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from tests.helpers import zoo
from tests.helpers.held import OnSphere
from tests.helpers.zoo import ADAM, BATCH, Kind, Manual, RandomDataset, Zoo, make_trainer

# ---------------------------------------------------------------------------------------------------------------------
# Not element-wise, though a trial of a few steps on small tensors with default settings would say so
# ---------------------------------------------------------------------------------------------------------------------


class _Plain(Optimizer):
    """Gradient descent with momentum, tensor by tensor; ``update`` is where the others differ."""

    def __init__(self, params: Any, lr: float = 0.05, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.update(p, p.grad, group, self.state[p]), alpha=-group["lr"])
        return loss

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(p)
        return state["momentum"].mul_(0.9).add_(grad)


class Blocks8Bit(_Plain):
    """As bitsandbytes: momentum in 8 bits by blocks of 64 elements; small tensors take another path."""

    SMALL, BLOCK = 32, 64

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)  # makes everything the parameters' dtype
        for values in self.state.values():
            if "state1" in values:
                values["state1"] = values["state1"].to(torch.uint8)

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        if p.numel() < self.SMALL:
            return super().update(p, grad, group, state)
        blocks = -(-p.numel() // self.BLOCK)
        if not state:
            state["state1"] = torch.zeros_like(p, dtype=torch.uint8)
            state["absmax1"] = torch.zeros(blocks)
        assert state["state1"].dtype == torch.uint8, "a kernel would read other bytes"
        padded = torch.zeros(blocks * self.BLOCK)
        padded[: p.numel()] = state["state1"].flatten().float() / 127.5 - 1
        padded = (padded.view(blocks, -1) * state["absmax1"][:, None]).flatten()
        padded[: p.numel()] = padded[: p.numel()] * 0.9 + grad.flatten()
        state["absmax1"] = padded.view(blocks, -1).abs().amax(1)
        scaled = padded.view(blocks, -1) / state["absmax1"][:, None].clamp_min(1e-12)
        state["state1"].copy_(((scaled.flatten()[: p.numel()] + 1) * 127.5).round().view_as(p))
        return padded[: p.numel()].view_as(p)


class ScaledByMark(_Plain):
    """As mup's: a parameter says by an attribute how fast it learns. Counts its updates beside it."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        marked: Any = p
        marked.updates = getattr(p, "updates", 0) + 1
        return super().update(p, grad, group, state) * getattr(p, "speed", 1.0) / marked.updates


class Preconditioned(_Plain):
    """As SOAP and Shampoo: square matrices in a list inside the state, of the parameter's own shape where it is square
    too."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        update = super().update(p, grad, group, state)
        if grad.dim() != 2:
            return update
        if "factors" not in state:
            state["factors"] = [torch.eye(n) for n in grad.shape]
        left, right = state["factors"]
        left.lerp_(grad @ grad.T, 0.1)
        right.lerp_(grad.T @ grad, 0.1)
        return left @ update @ right


# ---------------------------------------------------------------------------------------------------------------------
# Around another optimizer
# ---------------------------------------------------------------------------------------------------------------------


class Lookahead(Optimizer):
    """As timm's: never calls ``Optimizer.__init__``, shares the inner one's groups, keeps slow weights in its state."""

    def __init__(self, inner: Optimizer, alpha: float = 0.5, k: int = 3) -> None:
        self._inner = inner
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, defaultdict(dict)
        self.alpha, self.k, self.num_steps = alpha, k, 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._inner.step(closure)
        self.num_steps += 1
        if self.num_steps % self.k == 0:
            for group in self._inner.param_groups:
                for p in group["params"]:
                    state = self._inner.state[p]
                    slow = state.setdefault("slow", p.detach().clone())
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**self._inner.state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state.pop("num_steps")
        self._inner.load_state_dict(state)
        self.param_groups = self._inner.param_groups


class SAM(Optimizer):
    """Sharpness-aware minimization: climbs along the gradient it finds, calls the closure there, comes back and steps
    (arXiv:2010.01412)."""

    def __init__(self, params: Any, inner: type[Optimizer], rho: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = inner(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            raise RuntimeError("SAM needs a closure")
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        with torch.enable_grad():
            closure()
        for p in held:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        return loss


class ScheduleFree(_Plain):
    """As schedulefree's: parameters are one point of a line while training and another for evaluation, where its user
    moves them by ``eval`` and ``train``."""

    BETA = 0.9

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        if not state:
            state["z"] = p.detach().clone()
        state["z"].sub_(grad, alpha=group["lr"])
        return (p - state["z"]) * (0.1 / group["lr"])

    @torch.no_grad()
    def eval(self) -> None:
        self._move(1 - 1 / self.BETA)

    @torch.no_grad()
    def train(self) -> None:
        self._move(1 - self.BETA)

    def _move(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(end=self.state[p]["z"], weight=weight)


# ---------------------------------------------------------------------------------------------------------------------
# Modules and callbacks
# ---------------------------------------------------------------------------------------------------------------------


class Configured(Zoo):
    """``options["make"]``: module -> optimizer."""

    def configure_optimizers(self) -> Any:
        return self.options["make"](self)


class Marked(Configured):
    """Parameters of a class of their own and with attributes; in mid-run one changes and one comes."""

    def build(self) -> None:
        super().build()
        self.net.head.weight = OnSphere(self.net.head.weight.data, radius=2.0)
        self.net.stem.weight.speed = 0.1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net.stem.weight.speed, self.net.stem.bias.speed = 0.3, 0.2


class ConfiguredByHand(Configured, Manual):
    """The same under manual optimization."""


def _hooked(module: nn.Module) -> Optimizer:
    """Clips in a pre-hook what the optimizer holds, and renormalises the module's matrices in a post-hook."""
    optimizer = AdamW(module.parameters(), lr=1e-2, eps=1e-4)

    def clip(*args: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)

    @torch.no_grad()
    def renormalise(*args: Any) -> None:
        for p in module.parameters():
            if p.dim() == 2:
                p.div_(p.norm().clamp_min(1.0))

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(renormalise)
    return optimizer


def _replaced_step(module: nn.Module) -> Optimizer:
    """An AdamW whose own ``step`` somebody has wrapped."""
    optimizer = AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    inner = optimizer.step

    def step(closure: Any = None) -> Any:
        loss = inner(closure)
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.div_(p.abs().max().clamp_min(0.5))
        return loss

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


class Evaluates(Callback):
    """Moves schedule-free parameters around each validation."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        for optimizer in trainer.optimizers:
            optimizer.eval()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for optimizer in trainer.optimizers:
            optimizer.train()


def _make(make: Callable[[Any], Optimizer]) -> Callable[[], Any]:
    return lambda: Configured(make=make)


def _with(make: Callable[[Any], Optimizer]) -> Callable[[], Any]:
    return _make(lambda module: make(module.parameters()))


KINDS: dict[str, Kind] = {
    "declared_optimizer_reads_attributes": Kind(
        module=lambda: Marked(make=lambda m: ScaledByMark(m.parameters())),
        settings={"elementwise_optimizers": ["ScaledByMark"]},
    ),
    "optimizer_step_replaced": Kind(module=_make(_replaced_step), reason=ADAM),
    # around another one
    "lookahead": Kind(module=_with(lambda p: Lookahead(Adam(p, lr=1e-2, eps=1e-4))), reason=ADAM),
    "sam": Kind(module=_with(lambda p: SAM(p, SGD, lr=0.05, momentum=0.9))),
    # hooks
    "step_hooks": Kind(module=_make(_hooked), reason=ADAM),
    # states given by users
    "schedule_free": Kind(module=_with(ScheduleFree), callbacks=lambda: [Evaluates()], validates=True),
}

zoo.KINDS.update(KINDS)


# ---------------------------------------------------------------------------------------------------------------------
# Jobs
# ---------------------------------------------------------------------------------------------------------------------

RESUMED: dict[str, Callable[[nn.Module], Optimizer]] = {
    "nested states": lambda module: Preconditioned(module.parameters()),
    "8 bits": lambda module: Blocks8Bit(module.parameters(), lr=0.01),
    "lookahead": lambda module: Lookahead(Adam(module.parameters(), lr=1e-2, eps=1e-4)),
    "lbfgs": lambda module: torch.optim.LBFGS(module.parameters(), lr=0.3, max_iter=3),
}


def fit_and_save(strategy: Any, path: str, num_steps: int, resume: str | None = None) -> dict[str, dict[str, Tensor]]:
    """Trains each of ``RESUMED`` up to ``num_steps``, from its checkpoint at ``resume`` if that is given; weights."""
    weights = {}
    for number, (name, make) in enumerate(RESUMED.items()):
        torch.manual_seed(3)
        module = Configured(make=make)
        trainer = make_trainer(strategy, max_steps=num_steps, max_epochs=-1, limit_val_batches=0)
        # one batch, so that any number of ranks sees the same
        loader = DataLoader(_OneBatch(), batch_size=BATCH)
        trainer.fit(module, loader, ckpt_path=None if resume is None else f"{resume}-{number}.ckpt")
        trainer.save_checkpoint(f"{path}-{number}.ckpt")
        weights[name] = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return weights


class _OneBatch(RandomDataset):
    """The same items for everyone."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(0)


def two_then_one(strategy: Any, path: str) -> None:
    """Resumes with one optimizer what two have saved."""

    def two(module: nn.Module) -> Any:
        params = list(module.parameters())
        return [SGD(params[:2], lr=0.1), SGD(params[2:], lr=0.1)]

    torch.manual_seed(3)
    module = ConfiguredByHand(make=lambda m: SGD(m.parameters(), lr=0.1))
    trainer = make_trainer(strategy, max_steps=2, limit_val_batches=0)
    trainer.fit(module, DataLoader(RandomDataset(), batch_size=BATCH))
    trainer.save_checkpoint(path)
    again = make_trainer(strategy, max_steps=4, limit_val_batches=0)
    again.fit(ConfiguredByHand(make=two), DataLoader(RandomDataset(), batch_size=BATCH), ckpt_path=path)


import tests.helpers.compiled_kinds  # noqa: E402, F401  (the last of the zoo's kinds)
