"""Kinds that are compiled, in each of the ways in which people do, and that compute their activations again.

Registered in :data:`tests.helpers.zoo.KINDS`. The backend is ``aot_eager``: graphs as inductor gets them, run without a
C++ compiler and exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers import zoo
from tests.helpers.zoo import KINDS, Kind, Manual, Zoo, _of, longer

BACKEND = "aot_eager"


class CompiledBlocks(zoo.LateBuilt):
    """Blocks that ``configure_model`` makes and compiles."""

    def configure_model(self) -> None:
        is_new = self.net is None
        super().configure_model()
        if is_new:
            for block in self.net.blocks:
                block.compile(backend=BACKEND)


class CompiledBeside(Zoo):
    """What ``torch.compile(module)`` returns, kept beside the module."""

    def build(self) -> None:
        super().build()
        self.compiled = torch.compile(self.net, backend=BACKEND)

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(x)


class CompiledFunctions(Zoo):
    """Compiled functions beside the units: one calls the network, one reads all parameters before anything is gathered,
    one writes to them instead, in every second step, and one averages them in a hook."""

    def build(self) -> None:
        super().build()
        backend = self.options.get("backend", BACKEND)
        self.call = torch.compile(lambda x, y: F.mse_loss(self.net(x), y), backend=backend)
        self.penalty = torch.compile(lambda: sum(p.square().sum() for p in self.net.parameters()), backend=backend)
        self.write = torch.compile(self.shrink, backend=backend)
        self.average = torch.compile(self.lerp, backend=backend)
        self.averages = [torch.zeros(p.shape) for p in self.net.parameters()]

    @staticmethod
    @torch.no_grad()
    def shrink(parameters: list[Tensor]) -> None:
        for p in parameters:
            p.mul_(0.99)

    @staticmethod
    @torch.no_grad()
    def lerp(averages: list[Tensor], parameters: list[Tensor]) -> None:
        for average, p in zip(averages, parameters, strict=True):
            average.lerp_(p, 0.1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if len(self.losses) % 2:
            return 1e-2 * self.penalty() + self.call(x, y)
        if torch.is_grad_enabled():
            self.write([*self.net.parameters()])
        return self.call(x, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average(self.averages, [*self.net.parameters()])
        self.extra[f"averages {len(self.losses)}"] = torch.stack([average.sum() for average in self.averages])


class UsingBlock(zoo.Block):
    """Writes to its own weight in the forward, keeps a penalty of it, and multiplies with the ``other`` block's."""

    other: list[Any] = []  # noqa: RUF012  (a list hides the block: it is no child)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        y = super().forward(x)
        self.penalty = self.up.weight.square().sum()
        return y + sum(F.linear(F.linear(x, each.up.weight), each.down.weight) for each in self.other)


class CompiledUsers(Zoo):
    """Compiled blocks that use parameters of their own and of others. Every second loss is of penalties alone, so that
    no gradient passes through the output of a unit."""

    def build(self) -> None:
        self.net = zoo.Net(UsingBlock)
        first, *others = self.net.blocks
        for block in others:
            block.other = [first]
        for block in self.net.blocks:
            block.compile(backend=BACKEND)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        penalty = 1e-2 * sum(block.penalty for block in self.net.blocks)  # type: ignore[union-attr]
        return penalty if len(self.losses) % 2 else loss + penalty


class CompiledByHand(Manual):
    def build(self) -> None:
        super().build()
        self.net.compile(backend=BACKEND)


class RecomputedAndCompiled(zoo.Checkpointed):
    """``torch.utils.checkpoint`` around compiled blocks."""

    def build(self) -> None:
        super().build()
        for block in self.net.blocks:
            block.compile(backend=BACKEND)


class CompiledOptimizer(Zoo):
    """A compiled step: in the place of the optimizer's own, or around it in the hook."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.options["how"] == "own":
            optimizer.step = torch.compile(optimizer.step, backend=BACKEND)  # type: ignore[method-assign]
        return optimizer

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        how = self.options["how"]
        if how == "own":
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()
            torch.compile(lambda: optimizer.optimizer.step(), backend=BACKEND)()
            optimizer.optimizer.zero_grad()


_AT_STAGE_3 = {3: r"compiled.*engine='fsdp2'"}


def _compiled(kind: type[Zoo], **more: Any) -> Kind:
    options = more.pop("options", {})
    return Kind(module=_of(kind, **options), compiles=True, deepspeed_refuses=_AT_STAGE_3, validates=True, **more)


KINDS.update(
    {
        "compiled_copy_beside": _compiled(CompiledBeside),
        "compiled_functions": _compiled(CompiledFunctions),
        "compiled_blocks_use_parameters": _compiled(CompiledUsers, reference=zoo.UNUSED),
        "compiled_module": _compiled(Zoo, compile_module=BACKEND),
        "compiled_by_hand": _compiled(CompiledByHand, options={"every": 2, "clip": True}),
        **{
            f"optimizer_compiled_{how}": Kind(
                module=_of(CompiledOptimizer, how=how),
                compiles=True,
                tolerance=1e-4,
                reason=zoo.ADAM,
            )
            for how in ("own", "inside")
        },
        "compiled_and_accumulation": _compiled(CompiledBlocks, trainer={"accumulate_grad_batches": 2}, dataset=longer),
        "compiled_and_recomputed_by_setting": Kind(
            module=_of(Zoo),
            compiles=True,
            validates=True,
            settings={
                "units": ["Block"],
                "compile": {"target": "units", "backend": BACKEND},
                "activation_checkpointing": "full",
            },
            deepspeed_refuses={3: "compile='units' with engine='deepspeed' at stage 3"},
        ),
        "compiled_and_checkpointed": _compiled(RecomputedAndCompiled),
    }
)
