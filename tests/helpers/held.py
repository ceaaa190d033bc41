"""Kinds that hold on to what they made: parameters with attributes and classes, optimizers, lists, copies, types.

Registered in :data:`tests.helpers.zoo.KINDS`; patterns are those of public packages, named beside each.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_zero import ZeroStrategy
from lightning_zero.engines.fsdp2.private import KNOWS_TRANSFORMS
from tests.helpers.zoo import (
    ADAM,
    KINDS,
    UNUSED,
    WIDTH,
    Block,
    Kind,
    Net,
    TokenDataset,
    Zoo,
    _of,
    full,
    longer,
)


class OnSphere(nn.Parameter):
    """A parameter with a class of its own, as geoopt's ``ManifoldParameter``."""

    def __new__(cls, data: Tensor, requires_grad: bool = True, radius: float = 1.0) -> OnSphere:
        self = nn.Parameter.__new__(cls, data, requires_grad)
        self.radius = radius
        return self

    radius: float


class Marked(Zoo):
    """Attributes on parameters (Mamba's ``_no_weight_decay``, S4's ``_optim``) and a class of their own, read where
    groups are made, in the step and in a hook, which brings the parameter back onto its sphere."""

    def build(self) -> None:
        super().build()
        self.net.head.weight = OnSphere(self.net.head.weight.data, radius=2.0)
        self.net.head.bias._no_weight_decay = True  # type: ignore[attr-defined]
        self.net.stem.weight._optim = {"lr": 0.3}  # type: ignore[attr-defined]
        for index, block in enumerate(self.net.blocks):
            block.up.weight.lam = 0.1 * index

    def loss(self, batch: Any) -> Tensor:
        weights = [p for p in self.parameters() if hasattr(p, "lam")]
        return super().loss(batch) + sum(p.lam * p.square().mean() for p in weights)

    def configure_optimizers(self) -> Any:
        special = [p for p in self.parameters() if hasattr(p, "_optim")]
        free = [p for p in self.parameters() if hasattr(p, "_no_weight_decay")]
        spheres = [p for p in self.parameters() if isinstance(p, OnSphere)]
        assert [type(p).__name__ for p in spheres] == ["OnSphere"]
        plain = [p for p in self.parameters() if type(p) is nn.Parameter]
        rest = [p for p in plain if not hasattr(p, "_optim") and not hasattr(p, "_no_weight_decay")]
        groups = [{"params": [p], "weight_decay": 0.2, **p._optim} for p in special]
        groups += [{"params": rest, "weight_decay": 0.2}, {"params": free}, {"params": spheres, "momentum": 0.0}]
        return SGD(groups, lr=0.05, momentum=0.9)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            if isinstance(p, OnSphere):
                p.mul_(p.radius / p.norm())


class MadeEarly(Zoo):
    """The optimizer is made in ``__init__`` and has states there already."""

    def build(self) -> None:
        super().build()
        self.optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05, initial_accumulator_value=0.1)

    def configure_optimizers(self) -> Any:
        return self.optimizer


class HeldWeights(Zoo):
    """A list, a set and a dictionary of parameters from ``__init__`` on: regularized, grouped by identity."""

    def build(self) -> None:
        super().build()
        self.regularized = [block.up.weight for block in self.net.blocks]
        self.slow = {self.net.stem.weight, self.net.stem.bias}
        self.scales = {id(p): 0.1 * i for i, p in enumerate(self.net.head.parameters(), 1)}

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(w.square().sum() for w in self.regularized)
        scaled = sum(self.scales[id(p)] * p.abs().sum() for p in self.net.head.parameters())
        return super().loss(batch) + 0.01 * penalty + 0.01 * scaled

    def configure_optimizers(self) -> Any:
        fast = [p for p in self.parameters() if p not in self.slow]
        return SGD([{"params": list(self.slow), "lr": 0.01}, {"params": fast}], lr=0.05, momentum=0.9)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.extra[f"norm {len(self.losses)}"] = torch.stack([w.detach().norm() for w in self.regularized])
        state = self.optimizers().optimizer.state[self.net.head.weight]
        self.extra[f"momentum {len(self.losses)}"] = full(state["momentum_buffer"])


class HeldView(Zoo):
    """A flat view of ``__init__``."""

    def build(self) -> None:
        super().build()
        self.flat = {"head": [self.net.head.weight.data.view(-1)]}

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.flat["head"][0].norm().item()


class ByType(Zoo):
    """Types decide: ``type(layer) is nn.Linear``, names of classes; and the marker of FSDP, with which Wav2Vec2's
    encoder runs every layer (layerdrop)."""

    def build(self) -> None:
        self.net = Net()
        self.net.blocks.extend([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        synced = any(getattr(m, "_is_fsdp_managed_module", False) for m in self.modules())
        for index, block in enumerate(self.net.blocks):
            if synced or (self.trainer.global_step + index) % 3:
                x = block(x) if type(block) is nn.Linear else x + 0.5 * block(x)
        names = sorted({type(m).__name__ for m in self.modules()})
        assert names == ["Block", "ByType", "LayerNorm", "Linear", "ModuleList", "Net"], names
        return self.net.head(x)


class Copies(Zoo):
    """``copy.deepcopy(self.net)`` as a target network: in ``on_fit_start``, in a hook, in the step. Validated through
    an average, and through a copy that is trained on each batch."""

    def on_fit_start(self) -> None:
        self.targets = [copy.deepcopy(self.net)]
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        with torch.inference_mode(False), torch.enable_grad():
            adapted = copy.deepcopy(self.net)
            optimizer = SGD(adapted.parameters(), lr=0.1)
            F.mse_loss(adapted(x.clone()), y.clone()).backward()
            optimizer.step()
        self.log("average", F.mse_loss(self.average(x), y), sync_dist=True)
        self.log("adapted", F.mse_loss(adapted(x), y), sync_dist=True)

    def on_fit_end(self) -> None:
        del self.average

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 2):
            self.targets.append(copy.deepcopy(self.net))

    def loss(self, batch: Any) -> Tensor:
        if self.trainer.global_step == 2:
            self.targets.append(copy.deepcopy(self.net))
        x, _ = batch
        with torch.no_grad():
            wanted = torch.stack([target(x) for target in self.targets]).mean(0)
        assert all(type(p) is nn.Parameter for target in self.targets for p in target.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for t in self.targets for m in t.modules())
        return super().loss(batch) + 0.1 * F.mse_loss(self(x), wanted)


class Saves(Zoo):
    """``torch.save`` of a submodule and of its ``state_dict()``, with and without a prefix, in a hook on all ranks;
    tied weights stay one."""

    def build(self) -> None:
        super().build()
        self.net.blocks[1].up.weight = self.net.blocks[0].up.weight

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        file = io.BytesIO()
        torch.save(self.net, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert type(loaded) is Net
        assert loaded.blocks[0].up.weight is loaded.blocks[1].up.weight
        self.extra |= {f"{len(self.losses)}/{k}": v.detach().clone() for k, v in loaded.state_dict().items()}
        file = io.BytesIO()
        torch.save(self.net.state_dict(), file)
        file.seek(0)
        state = torch.load(file)
        assert state["blocks.0.up.weight"].data_ptr() == state["blocks.1.up.weight"].data_ptr()
        assert all(type(value) is Tensor for value in state.values())
        torch.testing.assert_close(state["head.weight"], loaded.head.weight.detach())
        prefixed = self.net.state_dict(prefix="student.")
        assert all(torch.equal(value, state[name.removeprefix("student.")]) for name, value in prefixed.items())


class ViewsAfterTheirBlock(Zoo):
    """Each block keeps another view of its own weight, with gradients, and the loss has a penalty of them."""

    TAKE: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        "view": lambda p: p.view(-1),
        "transposed": lambda p: p.T,
        "chain": lambda p: p.view(2, -1).t()[1:],
        "no_grad": torch.no_grad()(lambda p: p.view(-1)),
    }

    def build(self) -> None:
        self.net = Net(num_blocks=len(self.TAKE))
        self.kept: dict[str, Tensor] = {}
        for how, block in zip(self.TAKE, self.net.blocks, strict=True):
            block.register_forward_hook(partial(self.keep, how))

    def keep(self, how: str, block: Any, args: Any, output: Any) -> None:
        self.kept[how] = self.TAKE[how](block.up.weight)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * sum(kept.square().sum() for kept in self.kept.values())  # left to right


class AutogradGrad(Zoo):
    """``torch.autograd.grad`` with respect to parameters: GradNorm's weights of two losses, by the norms of their
    gradients at a shared layer, and a penalty on gradients' norms."""

    def loss(self, batch: Any) -> Tensor:
        shared = self.net.blocks[0].up.weight
        terms = super().loss(batch), shared.square().sum()
        norms = [torch.autograd.grad(term, shared, retain_graph=True)[0].norm().detach() for term in terms]
        loss = terms[0] / norms[0] + 0.1 * terms[1] / norms[1]
        grads = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
        self.extra[f"norms {len(self.losses)}"] = torch.stack([g.detach().norm() for g in grads])
        return loss + 0.1 * sum(g.square().sum() for g in grads)


class Sparse(Zoo):
    def build(self) -> None:
        self.embed = nn.Embedding(13, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 13)

    def loss(self, batch: Any) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.5)


class LoadedStates(Zoo):
    """``optimizer.load_state_dict`` in ``on_train_start`` and in mid-run."""

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=1e-2, eps=1e-4)

    def made(self, optimizer: Optimizer) -> dict[str, Any]:
        state = copy.deepcopy(optimizer.state_dict())
        for index, p in enumerate(optimizer.param_groups[0]["params"]):
            moments = {key: torch.full(p.shape, 0.01 * (index + 1)) for key in ("exp_avg", "exp_avg_sq")}
            state["state"][index] = {"step": torch.tensor(3.0), **moments}
        return state

    def on_train_start(self) -> None:
        optimizer = self.optimizers().optimizer
        optimizer.load_state_dict(self.made(optimizer))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers().optimizer
        if batch_idx == 1:
            self.kept = copy.deepcopy(optimizer.state_dict())
        if batch_idx == 2:
            optimizer.load_state_dict(self.kept)


class StatesWritten(Zoo):
    """Momentum is damped, held over a step, walked over, forgotten for one parameter and for all, by hand."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer, head = self.optimizers().optimizer, self.net.head.weight
        if batch_idx == 1:
            momentum = optimizer.state[head]["momentum_buffer"].mul_(0.5)
            if self.current_epoch == 0:
                self.held = momentum
            else:
                optimizer.state.clear()
        if batch_idx == 2:
            if self.current_epoch == 0:
                self.extra["held"] = full(self.held)
            norms = {id(p): state["momentum_buffer"].norm() for p, state in optimizer.state.items()}
            momenta = [full(norms[id(p)]) for p in self.parameters()]  # whichever was forgotten comes last there
            self.extra[f"momenta {self.current_epoch}"] = torch.stack(momenta)
            assert head in optimizer.state
            del optimizer.state[head]
            assert head not in optimizer.state
        if batch_idx == 0 and self.current_epoch:
            optimizer.state = defaultdict(dict)


class Scripted(Zoo):
    def build(self) -> None:
        super().build()
        self.net.blocks[1] = torch.jit.script(Block())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.extra[f"scripted {len(self.losses)}"] = full(self.net.blocks[1](batch[0]))


class Traced(Zoo):
    """Tracing a copy in a hook; tracing a module that is gathered is refused, on every rank alike and before it is."""

    @property
    def is_gathered(self) -> bool:
        strategy = self.trainer.strategy
        return isinstance(strategy, ZeroStrategy) and (strategy.config.engine == "fsdp2" or strategy.config.stage == 3)

    def on_train_epoch_end(self) -> None:
        import pytest  # benchmarks use the zoo, too, where it is not installed

        x = torch.ones(2, WIDTH)
        with torch.no_grad():
            if self.is_gathered:
                for module in (self.net.head, self.net.blocks[0], self.net.blocks[0].up):
                    with pytest.raises(RuntimeError, match="trace a copy"):
                        torch.jit.trace(module, x)
            traced = torch.jit.trace(copy.deepcopy(self.net), x)
            self.extra[f"traced {self.current_epoch}"] = full(traced(x))


TOO_OLD: dict[str, Any] = (
    {}
    if KNOWS_TRANSFORMS
    else {"refused": r"torch\.func .* torch below 2\.13.*torch>=2\.13, units=\[\]", "refused_deepspeed": ()}
)
OVERRIDES_BACKWARD = dict.fromkeys((1, 2, 3), "overrides LightningModule.backward, which engine='deepspeed'")
TRANSFORMS = r"torch\.func .* stage 3 of engine='deepspeed'.*use stage=2, engine='fsdp2'"
SPARSE = r"'embed' has sparse=True: .*Use sparse=False"


class WritesBeforeBackward(Zoo):
    """Weights shrink, past their version counters, between their use and the backward, which goes on with the new ones.
    One is used by its own module and outside of it, one by a function alone."""

    def build(self) -> None:
        super().build()
        self.blocks = self.net.blocks
        self.prototypes = nn.ModuleList([Block()])

    def loss(self, batch: Any) -> Tensor:
        (own,), last = self.prototypes, self.blocks[-1]
        x, _ = batch
        terms = F.linear(F.linear(x, last.up.weight), own.down.weight).square().mean() + own.up.weight.exp().mean()
        loss = super().loss(batch) + 0.1 * terms
        if torch.is_grad_enabled():
            last.up.weight.data.mul_(0.99)
            own.down.weight.data.mul_(0.99)
            own.up.weight.data = own.up.weight.data * 0.99
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        (own,), last = self.prototypes, self.blocks[-1]
        for p in (last.up.weight, own.down.weight):
            p.data.mul_(0.99)


class ReadsInBackward(Zoo):
    """Clips where the backward ends, in a method of Lightning's that it overrides."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class SamplesInInferenceMode(Zoo):
    """Generative models look at samples in hooks and inside a step, under ``torch.inference_mode()``."""

    @torch.inference_mode()
    def sample(self, where: str) -> None:
        self.extra[where] = self.net(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)).clone()
        self.extra[f"norm {where}"] = self.net.blocks[0].up.weight.norm().clone()

    @torch.inference_mode()
    def keep(self) -> None:
        self.extra["kept"] = torch.cat([full(value).flatten() for value in self.state_dict().values()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sample(f"step {batch_idx}")
        return self.record(self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sample(f"after {batch_idx}")
        self.keep()
        with torch.inference_mode():
            self.net.head.bias.mul_(0.9)


class PartialForward(Zoo):
    """Manual optimization; some batches end without a backward, before any layer is called or in the middle of the net.
    Validations end before any layer is called."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        if batch_idx % 3 == 1:
            if self.current_epoch:
                self.net.blocks[0](self.net.stem(x))
            return
        optimizer = self.optimizers()
        loss = self.record(self.loss(batch))
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return


class ReadAlone(Zoo):
    """``if trainer.is_global_zero: torch.save(self.net.state_dict(), path)``, a deep copy, norms, and gradients for
    histograms; on the last rank alone, too, and straight before what all ranks do."""

    def read(self, where: str) -> None:
        last = self.trainer.world_size - 1
        if self.global_rank == last:
            self.extra[f"{where} norms"] = torch.stack([p.norm() for p in self.parameters()]).detach()
        if self.trainer.is_global_zero:
            torch.save(self.net.state_dict(), file := io.BytesIO())
            file.seek(0)
            self.extra |= {f"{where} {name}": value for name, value in torch.load(file).items()}
            copied = copy.deepcopy(self.net.blocks)
            self.extra[f"{where} copy"] = torch.cat([p.detach().flatten() for p in copied.parameters()])
            self.extra[f"{where} flat"] = self.net.head.weight.data.view(-1)[3:].clone()

    def on_after_backward(self) -> None:
        self.read_gradients("backward")
        for p in self.net.head.parameters():  # of all ranks
            p.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.read_gradients("step")

    def read_gradients(self, where: str) -> None:
        for rank in (0, self.trainer.world_size - 1):
            if self.global_rank == rank:
                grads = [full(p.grad).flatten() for p in self.net.parameters()]
                self.extra[f"{where} {len(self.losses)} for {rank}"] = torch.cat(grads)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.read(f"batch {len(self.losses)}")
        with torch.no_grad():  # of all ranks
            self.net.head.weight.clamp_(-0.3, 0.3)

    def on_validation_end(self) -> None:
        self.read(f"validation {len(self.losses)}")

    def on_train_epoch_end(self) -> None:
        self.read(f"epoch {self.current_epoch}")
        self.log("seen", torch.tensor(float(self.global_rank)), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.read(f"checkpoint {len(self.losses)}")

    def on_train_end(self) -> None:
        self.read("end")

    def on_fit_end(self) -> None:
        self.read("after")


class AveragedByCallback(Zoo):
    """``StochasticWeightAveraging`` writes through ``p.detach()`` in a hook, and then runs an epoch of forwards for
    the statistics of batch norms; with a hook that looks at the module between batches, so that copies may stay."""

    def build(self) -> None:
        super().build()
        self.net.blocks.append(nn.BatchNorm1d(WIDTH))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.extra[f"{self.current_epoch} {batch_idx}"] = self.net.stem.weight.norm().detach()


class FindsRate(Zoo):
    """``LearningRateFinder`` trains some steps and goes back, but not with the random states."""

    def build(self) -> None:
        super().build()
        self.net.blocks.append(nn.Dropout(0.3))
        self.lr = 1e-3

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=self.lr)


HELD: dict[str, Kind] = {
    "attributes_on_parameters": Kind(module=_of(Marked)),
    "optimizer_made_in_init": Kind(module=_of(MadeEarly)),
    "parameters_held": Kind(module=_of(HeldWeights)),
    "view_held": Kind(module=_of(HeldView), refused="'flat' holds a view of parameter 'net.head.weight'"),
    "types_of_layers": Kind(module=_of(ByType), reference=UNUSED),
    "deepcopy_in_hooks": Kind(module=_of(Copies), dataset=longer, validates=True),
    "saved_in_hooks": Kind(module=_of(Saves)),
    "views_used_after_their_block": Kind(module=_of(ViewsAfterTheirBlock), validates=True),
    "grad_of_parameters": Kind(module=_of(AutogradGrad), reference=UNUSED),
    "sparse_embedding": Kind(module=_of(Sparse), dataset=TokenDataset, refused=SPARSE),
    "states_loaded_at_the_start_and_in_mid_run": Kind(module=_of(LoadedStates), dataset=longer, reason=ADAM),
    "states_written": Kind(module=_of(StatesWritten), dataset=longer),
    "scripted": Kind(
        module=_of(Scripted),
        refused=r"'net\.blocks\.1' is a torch\.jit module .*script or trace it after the run",
        refused_deepspeed=(3,),
    ),
    "traced": Kind(module=_of(Traced)),
    "data_written_before_backward": Kind(
        module=_of(WritesBeforeBackward),
        reference=UNUSED,
        deepspeed_refuses=dict.fromkeys((1, 2), r"write p\.data\.copy_\(value\)"),
    ),
    "backward_reads_gradients": Kind(
        module=_of(ReadsInBackward), refused="move the code after loss.backward", deepspeed_refuses=OVERRIDES_BACKWARD
    ),
    "samples_in_inference_mode": Kind(module=_of(SamplesInInferenceMode), validates=True),
    "partial_forward": Kind(module=_of(PartialForward), dataset=longer, validates=True),
    "averaged_by_swa": Kind(
        module=_of(AveragedByCallback),
        max_epochs=3,
        validates=True,
        callbacks=lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
    ),
    "learning_rate_found": Kind(
        module=_of(FindsRate), callbacks=lambda: [LearningRateFinder(num_training_steps=6)], max_epochs=2
    ),
    "read_on_one_rank": Kind(
        module=_of(ReadAlone),
        validates=True,
        trainer={"enable_checkpointing": True, "gradient_clip_val": 0.05},
        callbacks=lambda: [ModelCheckpoint(tempfile.mkdtemp(), every_n_train_steps=3)],
    ),
}
KINDS.update(HELD)
