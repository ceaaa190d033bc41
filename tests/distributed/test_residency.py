"""User code that touches a parameter of a run computes what it would on a plain one.

Each read and write runs on every rank on a parameter of 5 x 3 elements in two uneven shards and on a plain copy.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader
from transformers.modeling_outputs import BaseModelOutput

from lightning_zero.comm.shards import gathered
from lightning_zero.engines import base
from lightning_zero.private.torch import DisableTorchFunction
from tests.helpers import zoo

OTHER = torch.arange(15.0).view(5, 3) / 7

READS: dict[str, Callable[[Tensor], Any]] = {
    "grad norm": lambda p: p.grad.data.norm(2).item(),
    "largest": lambda p: float(p.abs().max()),
    "quantile": lambda p: p.detach().quantile(0.3),
    "histogram": lambda p: torch.histc(p.detach(), bins=4),
    "plain first": lambda p: (OTHER * p).detach(),
    "copied into a plain tensor": lambda p: torch.empty(5, 3).copy_(p.detach()),
    "list": lambda p: p.tolist(),
    "transposed": lambda p: (p.T @ OTHER).detach(),
    "like": lambda p: torch.zeros_like(p),
    "joint norm": lambda p: torch.stack([p.norm(), p.grad.norm()]).norm().item(),
    "copy of the gradient": lambda p: copy.deepcopy(p.grad),
    "places": lambda p: _places(p),
    "array that nobody writes to": lambda p: p.detach().numpy().copy().sum().item(),
}

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamp data": lambda p: p.data.clamp_(-0.2, 0.2),
    "copy plain": lambda p: p.copy_(OTHER),
    "copy of itself": lambda p: p.copy_(OTHER.new_tensor(p) + 1),
    "item": lambda p: p.__setitem__((4, 1), 9.0),
    "by norm": lambda p: p.div_(p.norm()),
    "grad": lambda p: p.grad.clamp_(max=0.1),
    "assign grad": lambda p: setattr(p, "grad", OTHER.clone()),
    "clip": lambda p: nn.utils.clip_grad_norm_([p], 0.1),
    "row": lambda p: p[4].zero_(),
    "flat": lambda p: p.view(-1).mul_(2),
    "flat data": lambda p: p.data.flatten()[3:9].copy_(OTHER.view(-1)[:6]),
    "transposed": lambda p: p.T.add_(p.T),
    "item of a view": lambda p: p.view(-1).__setitem__(slice(2, 5), 9.0),
    "view with a graph": lambda p: _with_graph(p).mul_(2),
    "view of a gradient": lambda p: p.grad.view(-1).clamp_(max=0.1),
    "orthogonal": lambda p: nn.init.orthogonal_(p, generator=torch.Generator().manual_seed(3)),
    "sparse": lambda p: (torch.manual_seed(3), nn.init.sparse_(p, 0.4)),
    "several out": lambda p: torch.sort(OTHER, 0, descending=True, out=(p, torch.empty(5, 3, dtype=torch.int64))),
    "out of a view": lambda p: torch.sum(OTHER, 0, out=p.data[1]),
    "from vector": lambda p: nn.utils.vector_to_parameters(torch.arange(15.0), [p]),
    "data of a row": lambda p: p[4].data.zero_(),
    "reduced": lambda p: dist.all_reduce(p, dist.ReduceOp.MAX),
    "reduced gradient": lambda p: (dist.all_reduce(p.grad), p.grad.div_(3)),
    "reduced later": lambda p: dist.all_reduce(p.detach(), async_op=True).wait(),
    "broadcast": lambda p: dist.broadcast(p.data, 1),
    "reduced view": lambda p: [f(v) for v in [p.data.view(-1)] for f in (dist.all_reduce, lambda v: v.div_(2))],
}


def _with_graph(p: Tensor) -> Tensor:
    with torch.enable_grad():
        return p.view(-1)


class Touching(LightningModule):
    """Each hook touches a parameter of two uneven shards, its gradient or its state, and a plain copy alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(3, 5, bias=False), nn.Linear(5, 2)])
        self.failed: list[str] = []
        self.plain: nn.Parameter | None = None
        self.names = iter(WRITES)
        self.name: str | None = None

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net[1](self.net[0](batch)).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        p = self.net[0].weight
        self.plain = nn.Parameter(p.detach().clone())
        self.plain.grad = p.grad.clone()
        for name, read in READS.items():
            self._compare(name, read(p), read(self.plain))
        self.name = next(self.names, None)
        if self.name is not None:
            with torch.no_grad():
                WRITES[self.name](p)
                WRITES[self.name](self.plain)
            self._compare(f"{self.name}, at once", p.detach(), self.plain.detach())
        with pytest.raises(ValueError, match="on_after_backward"):
            p.register_post_accumulate_grad_hook(print)

    def on_train_batch_end(self, *unused: Any) -> None:
        p, plain = self.net[0].weight, self.plain
        assert plain is not None
        self._compare(f"{self.name}, after the step", p.detach(), plain.detach())
        self._compare(f"gradient of {self.name}, after the step", p.grad.clone(), plain.grad)

    def _compare(self, name: str, value: Any, expected: Any) -> None:
        try:
            assert type(value) is type(expected)
            torch.testing.assert_close(value, expected)
        except AssertionError as error:
            self.failed.append(f"{name}: {error}")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _touch(settings: dict[str, Any]) -> list[str]:
    module = Touching()
    loader = DataLoader(torch.randn(2 * 2 * (len(WRITES) + 1), 3), batch_size=2)
    zoo.make_trainer(settings, max_epochs=1).fit(module, loader)
    return module.failed


UNITS = {"units": ["Linear"], "min_unit_numel": 1}
DEEPSPEED = {"engine": "deepspeed"}


@pytest.mark.parametrize(
    "settings",
    [{"stage": 1, **UNITS}, {"stage": 3, **UNITS}, {"stage": 3, **DEEPSPEED}],
    ids=str,
)
def test_hooks_touch_parameters_as_if_they_were_plain(ranks2, settings: dict[str, Any]) -> None:
    assert ranks2(_touch, settings) == [[], []]


class KeepsViews(zoo.Zoo):
    """Keeps views of a weight from a hook on, and compares them with the values of that time after each step."""

    def on_train_start(self) -> None:
        weight = self.net.head.weight
        self.views, self.at_first = (weight.data, weight.T), weight.detach().clone()

    def on_train_batch_end(self, *unused: Any) -> None:
        data, transposed = self.views
        same = torch.equal(data, self.at_first) and torch.equal(transposed, self.at_first.T)
        self.extra[f"same {len(self.losses)}"] = same


class WritesInALaterHook(zoo.Zoo):
    """Writes to a slice of a block's weight in a later hook than the one that took it."""

    def on_train_batch_start(self, *unused: Any) -> None:
        self.row = self.net.blocks[0].up.weight[0]

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.row.mul_(0.5)


class WritesLate(zoo.Zoo):
    """Writes to a view of a block's weight when the block has run."""

    def loss(self, batch: Any) -> Tensor:
        view = self.net.blocks[0].up.weight.data
        loss = super().loss(batch)
        view.mul_(0.5)
        return loss


class WritesToAnInput(zoo.Zoo):
    """Writes to what it multiplied with a view of a weight, whose graph gathers the view again."""

    def loss(self, batch: Any) -> Tensor:
        x, weight = self.net.stem(batch[0]), self.net.blocks[0].up.weight
        product = x @ weight.T
        self.write(x, weight)
        return product.square().mean()

    def write(self, x: Tensor, weight: Tensor) -> None:
        x.add_(1)


class AssignsDataLate(WritesToAnInput):
    def write(self, x: Tensor, weight: Tensor) -> None:
        weight.data = weight.data * 2


def _keep_views(kind: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    module, trainer = kind(), zoo.make_trainer(settings, max_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(zoo.RandomDataset(), zoo.BATCH))
    return module.extra, [str(each.message) for each in caught if "Views of parameters" in str(each.message)]


@pytest.mark.parametrize(
    "settings", [{"stage": 2, **zoo.BLOCKS}, {"stage": 3, **zoo.BLOCKS}, {"stage": 3, **DEEPSPEED}], ids=str
)
def test_a_view_that_is_kept_has_the_values_of_its_time_and_a_warning_says_so(ranks2, settings) -> None:
    (extra, warned), _ = ranks2(_keep_views, KeepsViews, settings)
    assert all(extra.values())
    assert len(extra) == 3
    assert ["'net.head.weight'" in each for each in warned] == [True]


def _write_late(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"'net\.blocks\.0\.up\.weight' or a view of it|with a view of a parameter"):
        _keep_views(kind, settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(kind, {"stage": 3, **zoo.BLOCKS}) for kind in (WritesLate, WritesInALaterHook, WritesToAnInput, AssignsDataLate)]
    + [(WritesInALaterHook, {"stage": 3, **DEEPSPEED})],
)
def test_a_late_write_is_an_error(ranks2, kind, settings) -> None:
    """DeepSpeed's stage 3 keeps a parameter that was touched in a step until the step ends."""
    ranks2(_write_late, kind, settings)


def _loop_over_all(settings: dict[str, Any], budget_bytes: int | None) -> tuple[int, int]:
    """The most bytes of parameters that are there at a time, and of all of them."""

    class Loops(zoo.Zoo):
        most = 0

        def on_train_batch_end(self, *unused: Any) -> None:
            for p in self.parameters():
                p.detach().norm()
                with DisableTorchFunction():  # this is no touch
                    self.most = max(self.most, sum(q.untyped_storage().nbytes() for q in self.parameters()))

    module = Loops()
    trainer = zoo.make_trainer({"stage": 3, **settings}, max_steps=2)
    with ExitStack() as stack:
        if budget_bytes is not None:
            stack.enter_context(mock.patch.object(base, "budget_bytes", return_value=budget_bytes))
        trainer.fit(module, DataLoader(zoo.RandomDataset(), zoo.BATCH))
    return module.most, sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize("settings", [zoo.BLOCKS, DEEPSPEED])
def test_a_loop_over_all_parameters_holds_a_few_units(ranks2, settings) -> None:
    for most, total in ranks2(_loop_over_all, settings, 0):
        assert 0 < most < total / 2


def test_by_default_the_budget_is_a_part_of_what_is_free(ranks2) -> None:
    for most, total in ranks2(_loop_over_all, zoo.BLOCKS, None):
        assert most == total


def _places(p: Tensor) -> tuple[int, bool]:
    """How code counts parameters that are tied once."""
    others = [p, p.data, p.detach(), p.grad]
    return len({other.data_ptr() for other in others}), p.data_ptr() == p.data.data_ptr()


# -- gathering -------------------------------------------------------------------------------------------------------


def _gather() -> None:
    dist.init_process_group("gloo")
    meshes = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for mesh, placements in zip(meshes, ([Shard(0)], [Replicate(), Shard(0)]), strict=True):
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            for shape in ((7, 3), (1,), (8, 2, 2), (3, 0), (0, 3)):  # uneven, fewer rows than ranks, even, empty
                torch.manual_seed(0)
                expected = (torch.randn(shape) * 3).to(dtype)
                sharded = distribute_tensor(expected, mesh, placements)
                with ExitStack() as stack:
                    for name in ("all_gather_tensor", "all_gather_single"):
                        if hasattr(functional, name):
                            stack.enter_context(mock.patch.object(functional, name, side_effect=AssertionError(name)))
                    found = gathered(sharded)
                assert found.dtype == dtype
                assert found.shape == expected.shape
                assert torch.equal(found, expected)
                assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()  # no padding is kept


def test_between_hosts_tensors_are_gathered_without_the_collective_that_crashes_gloo(ranks4) -> None:
    ranks4(_gather)


class _StoresALoss(nn.Module):
    """Its loss of views of its own parameter reaches the step's loss beside the block's output."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, zoo.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(x @ self.rows.T @ self.rows) / (1 + self.rows.detach().abs().max())
        self.aux = sum(row.square().sum() for row in self.rows)
        with DisableTorchFunction():
            self.memory = self.rows.untyped_storage()
        return x


class _Penalizes(_StoresALoss):
    """Its loss of gradients has a graph of a graph, whose views no unit's backward precedes."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.rows.T @ self.rows)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        self.aux = grad.square().sum()
        return x + y


class StoresPenalties(zoo.Zoo):
    def build(self) -> None:
        self.net = zoo.Net(_Penalizes)

    def loss(self, batch: Any) -> Tensor:
        other = self.net.blocks[0].rows.detach().T.sum()  # before its unit runs
        return super().loss(batch) + sum(0.01 * block.aux for block in self.net.blocks) * other


class StoresLosses(zoo.Zoo):
    def build(self) -> None:
        self.net = zoo.Net(_StoresALoss)

    def loss(self, batch: Any) -> Tensor:
        loss, first = super().loss(batch), self.net.blocks[0]
        assert hasattr(self.trainer.strategy, "config") == (not first.memory.nbytes()), "a graph holds memory of views"
        return loss + sum(0.01 * block.aux for block in self.net.blocks)

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch._foreach_mul_([*self.parameters()], 0.9)  # no view is held any more


class PenaltyOfAHook(zoo.Zoo):
    """A penalty on a view, computed in a hook, is part of the step's loss."""

    def on_train_batch_start(self, *unused: Any) -> None:
        self.penalty = self.net.blocks[0].up.weight.view(-1).square().sum()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * self.penalty


class _Clamps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(min=0)
        return super().forward(x)


class ClampsTwice(zoo.Zoo):
    """Two forwards of a step assign a weight's data."""

    def build(self) -> None:
        self.net = zoo.Net(lambda: _Clamps(zoo.WIDTH, zoo.WIDTH))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss(batch) + super().loss((x + 0.1, y))


class _Takes(zoo.Block):
    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return super().forward(x) + x @ given["weight"] + given["output"].last_hidden_state


class PassesAWeight(zoo.Zoo):
    """Blocks get another unit's parameter, and a container that refuses ``update``."""

    def build(self) -> None:
        self.net = zoo.Net(_Takes)
        self.given = nn.ModuleList(nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        given = {"weight": self.given[0].weight, "output": BaseModelOutput(last_hidden_state=self.given[1](x))}
        for block in self.net.blocks:
            x = block(x, given)
        return self.net.head(x)


class ScalesGradients(zoo.Zoo):
    """Changes this rank's own gradients after each micro-batch."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.mul_(0.5)


def _trained(kind: Any, settings: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = kind()
    zoo.make_trainer(settings, max_epochs=1, **options).fit(module, DataLoader(zoo.longer(), zoo.BATCH))
    return {name: p.detach().float() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "settings", "options", "tolerance"),
    [
        (StoresLosses, {"stage": 3, **zoo.BLOCKS}, {}, 1e-5),
        (StoresPenalties, {"stage": 3, **zoo.BLOCKS}, {}, 1e-5),
        (PenaltyOfAHook, {"stage": 3, **zoo.BLOCKS}, {}, 1e-5),
        (PenaltyOfAHook, {"stage": 1, **zoo.BLOCKS}, {"precision": "bf16-mixed"}, 2e-2),
        (ClampsTwice, {"stage": 3, **zoo.BLOCKS}, {}, 1e-5),
        (PassesAWeight, {"stage": 3, **zoo.BLOCKS}, {}, 1e-5),
        (ScalesGradients, {"stage": 1, **zoo.BLOCKS}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}, 2e-2),
    ],
)
def test_training_equals_ddp(ranks2, kind, settings, options, tolerance) -> None:
    """2e-2: gradients are rounded to bf16 before they are added, in another order."""
    expected = ranks2(_trained, kind, zoo.UNUSED, options)
    for result, reference in zip(ranks2(_trained, kind, settings, options), expected, strict=True):
        assert zoo.largest_difference(result, reference)[0] < tolerance


class KeepsTheLatest(zoo.Zoo):
    """Keeps the latest view of a weight in validation, as a callback for histograms does."""

    def on_validation_batch_end(self, *unused: Any) -> None:
        self.latest = self.net.head.weight.data
        self.memory = [*getattr(self, "memory", ()), StorageWeakRef(self.latest.untyped_storage())]


def _validate() -> int:
    module, loader = KeepsTheLatest(), DataLoader(zoo.RandomDataset(), zoo.BATCH)
    zoo.make_trainer({"stage": 3, **zoo.BLOCKS}).validate(module, loader, verbose=False)
    return sum(not each.expired() for each in module.memory)


def test_views_of_earlier_batches_free_their_memory(ranks2) -> None:
    assert max(ranks2(_validate)) <= 1


def _reads_alone() -> None:
    def reads(trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            module.seen = module.net.head.weight.norm().item()

    trainer = zoo.make_trainer({"stage": 3, **zoo.BLOCKS}, callbacks=[LambdaCallback(on_train_epoch_end=reads)])
    trainer.fit(module := zoo.Zoo(), DataLoader(zoo.RandomDataset(), zoo.BATCH))
    assert dist.get_rank() or module.seen == pytest.approx(module.net.head.weight.norm().item())


def test_one_rank_alone_reads_in_a_lambda_callback(ranks2) -> None:
    ranks2(_reads_alone)


class FlattensRnn(zoo.Zoo):
    """Does what ``LSTM.flatten_parameters`` does on CUDA: moves weights in C++. On a CPU the call itself raises."""

    def on_train_batch_start(self, *unused: Any) -> None:
        torch._cudnn_rnn_flatten_weight([self.net.head.weight], 1, 1, 2, 1, 0, 1, False, False)


def test_weights_of_rnns_stay_in_their_memory(ranks2) -> None:
    ranks2(_trained, FlattensRnn, {"stage": 3, **zoo.BLOCKS}, {})
