"""``configure_model`` under ``deepspeed.zero.Init``: no rank ever has the whole module, all else is as under DDP.

A failure in ``bytes`` is about sharding layer by layer, elsewhere in ``test_built...`` about user code and checkpoints
that meet sharded parameters, in ``test_hugging_face...`` about transformers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import OffloadConfig
from tests.distributed import test_loops as loops
from tests.helpers.ranks import outcome
from tests.helpers.zoo import WIDTH, Zoo, make_trainer

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.sampled
SLOW = 180.0
"""Seconds; a run takes about two on a quiet machine."""
STAGE3 = {"engine": "deepspeed", "stage": 3, "after_fit": "whole"}


class Layer(nn.Module):
    """Knows how many bytes of its kind's parameters are in memory when it has been made."""

    made: ClassVar[list[nn.Module]] = []
    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.tensor(1.0))  # 0-dim: never sharded
        self.register_buffer("shift", torch.randn(WIDTH))
        Layer.made.append(self)
        Layer.seen.append(bytes_in_memory(p for layer in Layer.made for p in layer.parameters()))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.inner * self.scale + self.shift)


def bytes_in_memory(parameters: Any) -> int:
    with torch._C.DisableTorchFunction():
        return sum(p.untyped_storage().nbytes() for p in parameters if p.dim())


class Built(Zoo):
    """Half built in ``__init__``. ``configure_model`` does to its layers what modules do: initializes them again from
    outside, ties, freezes, copies, replaces values, and keeps a parameter of its own."""

    def build(self) -> None:
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.body: nn.Module | None = None

    def configure_model(self) -> None:
        if self.body is not None:
            return
        Layer.made, Layer.seen = [], []
        self.body = nn.Sequential(*(Layer() for _ in range(4)))
        after = bytes_in_memory(p for layer in Layer.made for p in layer.parameters())
        self.options["bytes"] = max(Layer.seen), after
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), 2)
        self.head, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.head.weight
        self.own = nn.Parameter(torch.randn(WIDTH))
        self.low = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
        nn.init.xavier_normal_(self.body[0].inner)
        with torch.no_grad():
            self.head.weight.mul_(0.5).add_(self.body[1].inner)
            self.body[2].inner.data[0].zero_()
        self.apply(lambda m: nn.init.normal_(m.bias, std=0.1) if isinstance(m, nn.Linear) else None)
        self.body[3].inner.requires_grad_(False)
        assert self.head.weight.shape == (WIDTH, WIDTH)
        assert sum(p.numel() for p in self.body.parameters()) == 4 * (WIDTH * WIDTH + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.entry(x)) * self.own + self.low.to(x.dtype)
        return self.other(self.head(self.encoder(x.unsqueeze(1)).squeeze(1)))

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim == 2]
        rest = [p for p in self.parameters() if p.requires_grad and p.ndim != 2]
        # eps: attention to one position does not depend on its queries' and keys' biases; their gradients are rounding
        return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-3, eps=1e-3)


def _fit(strategy: Any, to: str | None, resume: str | None, epochs: int, kind: Any = Built) -> dict[str, Any]:
    torch.manual_seed(4 + 100 * int(os.environ["RANK"]) * (strategy != "ddp"))  # rank 0's values count
    module = kind()
    trainer = make_trainer(strategy, max_epochs=epochs)
    trainer.fit(module, loops._loader(), loops._loader(), ckpt_path=resume)
    if to is not None:
        trainer.save_checkpoint(to)
    left = [n for n, p in module.named_parameters() if vars(p).keys() & {"ds_id", "ds_names", "partition"}]
    return {
        "losses": module.losses,
        "weights": loops._weights(module),
        "buffers": {n: b.clone() for n, b in module.named_buffers()},
        "bytes": module.options.get("bytes"),
        "left": left,
        "tied": module.options.get("bytes") is None or module.head.weight is module.other.weight,
    }


def _same(results: list[dict[str, Any]], reference: list[dict[str, Any]], first: int = 0) -> None:
    for result, expected in zip(results, reference, strict=True):
        assert loops._close(result["losses"], expected["losses"][first:])
        for key in ("weights", "buffers"):
            assert loops._close(result[key], expected[key]), key
        assert result["left"] == []
        assert result["tied"]


def test_built_sharded_it_trains_as_under_ddp_and_resumes(ranks2, tmp_path: Path) -> None:
    """And no rank ever has more than one whole layer. Checkpoints go both ways, into parameters that are sharded."""
    ours, ddps = str(tmp_path / "ours.ckpt"), str(tmp_path / "ddps.ckpt")
    straight = ranks2(_fit, "ddp", None, None, 2)
    half = ranks2(_fit, STAGE3, ours, None, 1, timeout_seconds=SLOW)
    ranks2(_fit, "ddp", ddps, None, 1)
    one_layer = WIDTH * WIDTH * 4
    assert straight[0]["bytes"] == (4 * one_layer, 4 * one_layer)  # what it is without sharding
    assert all(r["bytes"] == (one_layer, 0) for r in half)
    steps = len(straight[0]["losses"]) // 2
    for r, expected in zip(half, straight, strict=True):
        assert loops._close(r["losses"], expected["losses"][:steps])
    for path in (ours, ddps):
        _same(ranks2(_fit, STAGE3, None, path, 2, timeout_seconds=SLOW), straight, steps)
    _same(ranks2(_fit, "ddp", None, ours, 2), [r | {"left": []} for r in straight], steps)


# -- other loops, precisions, offload; runs that end early -----------------------------------------------------------


def _loops(strategy: Any, options: dict[str, Any]) -> list[Any]:
    """Validation alone, then a fit of the module that validation has left whole, then a new one."""
    torch.manual_seed(4 + 100 * int(os.environ["RANK"]) * (strategy != "ddp"))
    module = Built()
    before = make_trainer(strategy, **options).validate(module, loops._loader(), verbose=False)
    result = [before, loops._weights(module)]
    make_trainer(strategy, max_epochs=1, **options).fit(module, loops._loader())
    return [*result, module.losses, loops._weights(module)]


@pytest.mark.parametrize(
    ("settings", "options", "tolerance"),
    [
        ({}, {}, 1e-5),
        pytest.param({"offload": OffloadConfig(target="cpu", optimizer=False)}, {}, 1e-5, marks=pytest.mark.full),
        # masters are fp32 here and bf16 under DDP: a few roundings to 8 bits
        pytest.param({}, {"precision": "bf16-true"}, 5e-2, marks=pytest.mark.full),
        pytest.param({}, {"precision": "bf16-mixed"}, 5e-2, marks=pytest.mark.full),
    ],
)
def test_built_sharded_it_validates_and_then_fits(settings: Any, options: Any, tolerance: float, ranks2) -> None:
    results = ranks2(_loops, STAGE3 | settings, options, timeout_seconds=SLOW)
    reference = ranks2(_loops, "ddp", options)
    for result, expected in zip(results, reference, strict=True):
        first, second = (torch.tensor([*r[0][0].values(), *r[2]]) for r in (result, expected))
        assert (first - second).abs().max() <= tolerance * second.abs().max()
        for i in (1, 3):
            assert result[i].keys() == expected[i].keys()
            assert all(value.dtype == expected[i][key].dtype for key, value in result[i].items())
            gaps = [(v.float() - expected[i][k].float()).abs().max().item() for k, v in result[i].items()]
            assert max(gaps) <= tolerance, (i, gaps)


def _fails_before_the_engine_starts(path: str) -> list[Any]:
    torch.manual_seed(4)
    module = Built()
    name, _ = outcome(lambda: make_trainer(STAGE3, max_epochs=1).fit(module, loops._loader(), ckpt_path=path))
    make_trainer(STAGE3, max_epochs=1).fit(module, loops._loader())
    return [name, module.losses, loops._weights(module)]


def _fails_in_configure_optimizers() -> list[Any]:
    class Fails(Built):
        def configure_optimizers(self) -> Any:
            if not self.options.get("again"):
                self.options["again"] = True
                raise ZeroDivisionError
            return super().configure_optimizers()

    torch.manual_seed(4)
    module = Fails()
    name, _ = outcome(lambda: make_trainer(STAGE3, max_epochs=1).fit(module, loops._loader()))
    make_trainer(STAGE3, max_epochs=1).fit(module, loops._loader())
    return [name, module.losses, loops._weights(module)]


def test_built_sharded_a_run_that_ended_early_leaves_a_module_that_trains(ranks2, tmp_path: Path) -> None:
    reference = ranks2(_fit, "ddp", None, None, 1)
    early = ranks2(_fails_before_the_engine_starts, str(tmp_path / "none.ckpt"), timeout_seconds=SLOW)
    late = ranks2(_fails_in_configure_optimizers, timeout_seconds=SLOW)
    for results, error in ((early, "FileNotFoundError"), (late, "ZeroDivisionError")):
        for (name, losses, weights), expected in zip(results, reference, strict=True):
            assert name == error
            assert loops._close(losses, expected["losses"])
            assert loops._close(weights, expected["weights"])


# -- Hugging Face ----------------------------------------------------------------------------------------------------


class Pretrained(Zoo):
    """A GPT-2 from ``from_pretrained`` inside ``configure_model``."""

    folder = ""

    def build(self) -> None:
        self.net: Any = None

    def configure_model(self) -> None:
        from transformers import GPT2LMHeadModel

        if self.net is None:
            self.net = GPT2LMHeadModel.from_pretrained(self.folder)
            with torch._C.DisableTorchFunction():
                self.options["in memory"] = bytes_in_memory(self.net.parameters())
            self.options["shape"] = tuple(self.net.transformer.wte.weight.shape)

    def loss(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss


def _fine_tune(strategy: Any, folder: str) -> dict[str, Any]:
    pytest.importorskip("transformers")
    from transformers.integrations import is_deepspeed_zero3_enabled

    class Here(Pretrained):
        pass

    Here.folder = folder
    torch.manual_seed(4)
    module = Here()
    tokens = torch.randint(0, 32, (24, 9), generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(module, torch.utils.data.DataLoader(tokens, batch_size=3))
    return {"losses": module.losses, "weights": loops._weights(module), "told": is_deepspeed_zero3_enabled()} | {
        key: module.options[key] for key in ("in memory", "shape")
    }


def _save_gpt2(folder: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)


def test_hugging_face_models_load_sharded(ranks2, ranks1, tmp_path: Path) -> None:
    """Lightning #19259, #18648: ``Size([0])`` there."""
    pytest.importorskip("transformers")
    folder = str(tmp_path / "gpt2")
    ranks1(_save_gpt2, folder)
    results = ranks2(_fine_tune, STAGE3, folder, timeout_seconds=SLOW)
    reference = ranks2(_fine_tune, "ddp", folder)
    for result, expected in zip(results, reference, strict=True):
        assert result["shape"] == (32, 16)
        assert result["in memory"] == 0
        assert expected["in memory"] > 0
        assert not result["told"]  # what is loaded later is none of the run's module
        assert loops._close(result["losses"], expected["losses"])
        assert loops._close(result["weights"], expected["weights"])
