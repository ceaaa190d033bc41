"""Kinds that write to weights and gradients by other ways than functions of torch on a parameter, or go through one
graph or function of their parameters several times.

Registered in :data:`tests.helpers.zoo.KINDS`; patterns are those of public packages, named beside each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn import functional as F

from tests.helpers.held import OVERRIDES_BACKWARD, TOO_OLD, TRANSFORMS
from tests.helpers.zoo import KINDS, UNUSED, Kind, Zoo, _of, full, longer


class CollectivesInStep(Zoo):
    """``torch.distributed`` on parameters and gradients in a manual step, as in code that synchronizes by hand (RL
    libraries)."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False
        self.summed = [layer.bias.requires_grad_(False) for layer in (self.net.stem, self.net.blocks[1].up)]
        for p in self.summed:
            p.data.mul_(1e-3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.record(self.loss(batch))
        for p in self.summed:
            dist.all_reduce(p)  # does not change the version
        trained = [p for p in self.parameters() if p.requires_grad]
        own = torch.autograd.grad(loss, trained, retain_graph=True)
        for p, g in zip(trained, own, strict=True):
            p.grad = g * 0.5  # the backward adds to it
        self.manual_backward(loss)
        optimizer.step()
        for p, g in zip(trained, own, strict=True):
            p.grad = g + 0.01
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        with torch.no_grad():
            for p in self.parameters():
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()


class AccumulatesAssigned(Zoo):
    """``p.grad = f(p.grad)`` after each micro-batch."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad = p.grad * 0.5


class RetainedGraph(Zoo):
    """Two backwards through one graph, gradients looked at in between: PCGrad, GradNorm."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        x, y = batch
        out = self.net(x)
        optimizer.zero_grad()
        self.manual_backward(out.abs().mean(), None, True)  # retain_graph
        first = [p.grad.clone() for p in self.parameters()]
        optimizer.zero_grad()
        self.manual_backward(self.record(F.mse_loss(out, y)))
        for p, g in zip(self.parameters(), first, strict=True):
            conflict = (p.grad * g).sum()
            if conflict < 0:
                p.grad -= conflict / g.square().sum() * g
        optimizer.step()


class SeveralBackwards(Zoo):
    """An overridden ``backward`` goes through one graph again. DDP averages the first backward after a forward only, so
    there it is one, of the sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        self.penalty = out.abs().mean()
        return self.record(F.mse_loss(out, y))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if type(self.trainer.strategy) is DDPStrategy:
            (loss + 1.5 * self.penalty).backward()
            return
        loss.backward(retain_graph=True)
        self.penalty.backward(retain_graph=True)
        (0.5 * self.penalty).backward()


class TransformsAround(Zoo):
    """``torch.func`` through units, of detached parameters (per-sample gradients as in torch's tutorial), and of
    functions that find parameters and modules by themselves, nested, as a loss and in a hook: physics-informed
    networks, curvature of a loss by its inputs."""

    def found(self, x: Tensor) -> dict[str, Tensor]:
        net, stem, up = self.net, self.net.stem, self.net.blocks[0].up
        held = {name: p.detach() for name, p in net.named_parameters()}

        def of_held(params: dict[str, Tensor], v: Tensor) -> Tensor:
            return functional_call(net, params, (v[None],)).square().sum()

        def of_units(v: Tensor) -> Tensor:
            return net(v).square().sum() * stem.weight.square().sum()

        def of_weights(v: Tensor) -> Tensor:
            return F.linear(v @ stem.weight.T, up.weight).sin().sum() + up.bias[0] * up.weight.detach().norm()

        return {
            "hessian of weights": hessian(of_weights)(x[0]),
            "jacfwd": jacfwd(lambda v: F.linear(v, up.weight))(x[0]),
            "grad of grad": grad(lambda s: grad(lambda t: of_weights(t * x[0]))(s))(x[0, 0]),
            "vmap of grad": vmap(grad(of_weights))(x),
            "vjp": vjp(of_weights, x[0])[1](torch.ones(()))[0],
            "grad of one": grad(lambda w: F.linear(x, w).square().sum())(up.weight),
            "per sample": torch.cat([g.flatten() for g in vmap(grad(of_held), (None, 0))(held, x).values()]),
            # from here on units are gathered
            "hessian": hessian(of_units)(x[0]),
            "jacrev": jacrev(lambda v: F.linear(v, stem.weight.data) + net(v))(x[0]),
            "vmap of units": vmap(net)(x),
            "vmap of grad of units": vmap(grad(lambda v: net(v).sum()))(x),
            "jvp of units": jvp(net, (x,), (torch.ones_like(x),))[1],
            "jvp of grad": jvp(grad(of_units), (x[0],), (torch.ones(x[0].shape),))[1],
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx % 2:
            loss = loss + 1e-3 * sum(each.square().mean() for each in self.found(batch[0]).values())
        return self.record(loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.set_grad_enabled(batch_idx % 2 == 0):
            found = self.found(batch[0])
        self.extra.update((f"{name} {batch_idx}", each.detach()) for name, each in found.items())


class Linearizes(Zoo):
    """``torch.func.linearize``, which records operators, in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        linearize(self.net, batch[0])
        return self.record(self.loss(batch))


class UnseenWrites(Zoo):
    """Writes by calls that name no parameter, or that no version counts, to weights, gradients and values of
    ``state_dict()``: in hooks, and inside a step before the forward and after it. Each step writes in another way."""

    HOW: ClassVar[dict[str, Callable[[Sequence[Tensor]], Any]]] = {
        "list": lambda tensors: torch._foreach_mul_(list(tensors), 0.9),
        "list of views": lambda tensors: torch._foreach_mul_([t.view(-1)[:5] for t in tensors], 0.9),
        "out": lambda tensors: [torch.mul(t, 0.9, out=t) for t in tensors],
        "NumPy": lambda tensors: [t.detach().numpy().__imul__(0.9) for t in tensors],
        "DLPack": lambda tensors: [torch.from_dlpack(t.detach()).mul_(0.9) for t in tensors],
        "vmap": lambda tensors: [vmap(lambda row: row.mul_(0.9))(t) for t in tensors],
    }

    def build(self) -> None:
        super().build()
        self.offset = nn.Parameter(torch.ones(5))  # the root's
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    @torch.no_grad()
    def write(self, tensors: Iterable[Tensor]) -> None:
        how = self.options["how"]
        self.HOW[how[len(self.losses) % len(how)]](list(tensors))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, last = self.net.blocks[0], self.net.blocks[-1]
        self.write(p.data for p in (first.up.weight, last.down.bias, self.net.head.weight, self.offset))
        loss = self.loss(batch) + 0.1 * (self.offset.sum() + self.frozen.sum())
        self.write(p.data for p in (first.up.weight, last.down.bias, self.net.head.bias, self.offset))
        self.write([self.frozen.data])  # DLPack needs the data, see docs/limits.md
        return self.record(loss)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.write(p.grad for p in self.net.parameters() if p.grad is not None)
        self.write(self.net.head.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.write(self.net.state_dict().values())
        self.write(p.data for p in self.net.blocks[1].parameters())


class NowAndThen(Zoo):
    """Every third step clips weights, in the step and in a block's hook, and another third looks at them: what a step
    gathers, and in which order, is not what the steps before have gathered. One block writes to its own weight in each
    forward."""

    def build(self) -> None:
        super().build()
        self.offset = nn.Parameter(torch.zeros(3))
        self.net.blocks[1].register_forward_hook(self.clip_head)
        self.net.blocks[2].register_forward_pre_hook(self.renorm)

    @staticmethod
    @torch.no_grad()
    def renorm(block: Any, inputs: Any) -> None:
        block.up.weight.clamp_(-0.2, 0.2)

    @torch.no_grad()
    def clip_head(self, block: Any, args: Any, output: Any) -> None:
        if self.turn == 2:
            self.net.head.weight.clamp_(-0.3, 0.3)

    turn = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.turn = len(self.losses) % 3
        if self.turn == 2:
            with torch.no_grad():
                self.net.blocks[0].up.weight.mul_(0.98)
        penalty = self.net.head.weight.square().sum() if self.turn == 1 else 0.0
        loss = self.loss(batch) + 0.1 * penalty + 0.1 * self.offset.sum()
        if self.turn == 2:
            with torch.no_grad():
                self.offset.sub_(0.01)
        return self.record(loss)


class OwnBackwardInStep(Zoo):
    """A backward of its own in the step, before gradients of the last step are cleared (adversarial training, codebooks
    that step by themselves): it adds to these."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.net.blocks[1].up.weight
        self.look("before", weight.grad)
        weight.square().sum().backward()
        self.look("after", weight.grad)
        assert weight.grad is not None
        with torch.no_grad():
            weight.sub_(0.01 * weight.grad)
        return self.record(self.loss(batch))

    def look(self, when: str, grad: Tensor | None) -> None:
        if grad is not None:
            self.extra[f"{len(self.losses)} {when}"] = full(grad)


KINDS.update(
    {
        "collectives_in_a_step": Kind(module=_of(CollectivesInStep)),
        "accumulates_assigned_gradients": Kind(
            module=_of(AccumulatesAssigned),
            trainer={"accumulate_grad_batches": 2},
            dataset=longer,
            deepspeed_refuses=dict.fromkeys((2, 3), "between the micro-batches of an accumulation"),
        ),
        "retained_graph": Kind(module=_of(RetainedGraph)),
        "several_backwards": Kind(module=_of(SeveralBackwards), deepspeed_refuses=OVERRIDES_BACKWARD),
        "transforms_around_parameters": Kind(
            module=_of(TransformsAround), reference=UNUSED, deepspeed_refuses={3: TRANSFORMS}, **TOO_OLD
        ),
        "linearized_in_a_step": Kind(module=_of(Linearizes), refused="call torch.func.jvp", refused_deepspeed=(3,)),
        "written_by_lists_and_out": Kind(
            module=_of(UnseenWrites, how=("list", "list of views", "out")), dataset=longer
        ),
        "written_past_versions": Kind(module=_of(UnseenWrites, how=("NumPy", "DLPack", "vmap")), dataset=longer),
        "read_and_written_now_and_then": Kind(
            module=_of(NowAndThen),
            trainer={"accumulate_grad_batches": 2},
            dataset=longer,
            validates=True,
        ),
        "own_backward_in_step": Kind(module=_of(OwnBackwardInStep)),
    }
)
