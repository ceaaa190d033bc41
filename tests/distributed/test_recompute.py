"""``activation_checkpointing``: the same numbers as without, from activations that are computed again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import zoo
from tests.helpers.ranks import outcome

WIDTH, HEADS = 16, 2
SETTINGS: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "a list": ["net.1", "net.2"],
    "offload": {"target": "full", "offload": True},
}


class Growing(nn.Module):
    """Its result depends on how often it ran, as that of spectral norm."""

    ran: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ran", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        return x * (1 + 0.1 * self.ran)


class Block(nn.Module):
    """A residual, attention, and dropout, which must be the same when it is computed again."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm1d(5), Growing()) if normed else nn.Identity()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.forwards = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.forwards += 1
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + scale * F.dropout(self.out(mixed), 0.2, self.training)


class Module(zoo.Zoo):
    normed = False

    def build(self) -> None:
        self.net = nn.ModuleList(Block(self.normed) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.hooked = 0
        self.net[0].register_forward_hook(self._count)
        if self.options.get("compiled"):
            self.net[0].compile(backend="eager")

    def _count(self, *unused: Any) -> None:
        self.hooked += 1

    def loss(self, x: Tensor) -> Tensor:
        for block in self.net:
            x = block(x, scale=0.5)
        return self.head(x).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.record(self.loss(batch[0]))
        optimizer = self.optimizers()
        for part in batch[0].chunk(2):
            self.manual_backward(self.record(self.loss(part)))
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        before = [block.forwards for block in self.net]
        self.loss(batch[0])
        assert [block.forwards - n for block, n in zip(self.net, before, strict=True)] == [1] * 3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Module):
    automatic_optimization = False


class Normed(Module):
    """Its forward writes to buffers, as batch norm's and spectral norm's do."""

    normed = True


class Products(TorchDispatchMode):
    """Counts matrix products with a bias: those of forwards."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def _fit(strategy: Any, cls: type[Module] = Module, options: Any = None, **trainer: Any) -> dict[str, Any]:
    torch.manual_seed(4)
    module = cls(**(options or {}))
    data = DataLoader(TensorDataset(torch.randn(16, 5, WIDTH)), batch_size=4)
    made = zoo.make_trainer(strategy, max_epochs=1, limit_val_batches=1, **trainer)
    with Products() as products:
        made.fit(module, data, data)
    assert type(module.net[0]) is Block
    for copied in (copy.deepcopy(module.net), pickle.loads(pickle.dumps(module.net[1]))):
        assert all(type(each) is Block for each in copied.modules() if hasattr(each, "qkv"))
    return {
        "losses": module.losses,
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "forwards": [block.forwards for block in module.net],
        "hooked": module.hooked,
        "products": products.count,
    }


def _several(settings: dict[str, Any], cls: type[Module] = Module, trainer: Any = None) -> dict[str, Any]:
    """Many runs on one rank."""
    common = {"stage": 3, "min_unit_numel": 1, "units": ["Block"]}
    return {
        name: _fit({**common, **({} if value is None else value)}, cls, **(trainer or {}))
        for name, value in settings.items()
    }


def _same(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    """Exact: the same kernels add the same numbers in the same order."""
    assert ours["losses"] == reference["losses"]
    assert ours["weights"].keys() == reference["weights"].keys()
    assert all(torch.equal(ours["weights"][name], value) for name, value in reference["weights"].items())


def test_every_setting_changes_nothing_but_what_is_kept(ranks2: Any) -> None:
    settings = {name: {"activation_checkpointing": value} for name, value in SETTINGS.items()}
    for runs in ranks2(_several, {"without": None, **settings}):
        without = runs["without"]
        first, second, third = without["forwards"]
        assert first == second == third
        again = first - 2  # forwards without gradients: the validation's and the sanity check's
        for name in SETTINGS:
            _same(runs[name], without)
            assert runs[name]["hooked"] == without["hooked"]  # hooks of a unit run once
            expected = [first, second + again, third + again] if name == "a list" else [first + again] * 3
            assert runs[name]["forwards"] == expected, name
        products = {name: run["products"] for name, run in runs.items()}
        assert products["full"] == products["offload"]
        kept = again * 3  # of each block's two products the first is kept
        assert products["full"] - products["selective"] == kept, products


@pytest.mark.parametrize(
    ("cls", "trainer"),
    [(Manual, {"precision": "bf16-mixed"}), (Normed, {"accumulate_grad_batches": 2})],
    ids=["manual", "written buffers"],
)
def test_with_whatever_a_trainer_does(cls: type[Module], trainer: dict[str, Any], ranks2: Any) -> None:
    settings = {
        "without": None,
        "full": {"activation_checkpointing": "full"},
        "selective": {"activation_checkpointing": "selective"},
    }
    for runs in ranks2(_several, settings, cls, trainer):
        for name in ("full", "selective"):
            _same(runs[name], runs["without"])
            assert runs[name]["forwards"][0] > runs["without"]["forwards"][0]


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({"activation_checkpointing": "full", "units": []}, {}, "has no unit to recompute: name its blocks"),
        ({"activation_checkpointing": ["Blok"]}, {}, "'Blok' matches no module. Use a class name (Block"),
        ({"activation_checkpointing": "full", "units": ["Block"]}, {"compiled": True}, "'net.0', which you have compi"),
    ],
)
def test_what_cannot_be_recomputed_is_said_on_all_ranks(settings: Any, options: Any, said: str, ranks2: Any) -> None:
    for _, text in ranks2(outcome, _fit, {"stage": 3, **settings}, Module, options):
        assert said in text
