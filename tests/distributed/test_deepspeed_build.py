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

from tests.distributed import test_loops as loops
from tests.helpers.ranks import outcome
from tests.helpers.zoo import WIDTH, Zoo, make_trainer

pytest.importorskip("deepspeed")
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
    trainer = make_trainer(strategy, max_epochs=epochs, limit_train_batches=3)
    trainer.fit(module, loops._loader(), ckpt_path=resume)
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


def test_built_sharded_it_trains_as_under_ddp_and_resumes(ranks2, tmp_path: Path) -> None:
    """No rank ever has more than one whole layer, and a checkpoint goes into parameters that are sharded."""
    path = str(tmp_path / "half.ckpt")
    straight = ranks2(_fit, "ddp", None, None, 2)
    half = ranks2(_fit, STAGE3, path, None, 1)
    one_layer = WIDTH * WIDTH * 4
    assert straight[0]["bytes"] == (4 * one_layer, 4 * one_layer)  # what it is without sharding
    assert all(r["bytes"] == (one_layer, 0) for r in half)
    steps = len(straight[0]["losses"]) // 2
    for r, expected in zip(half, straight, strict=True):
        assert loops._close(r["losses"], expected["losses"][:steps])
    for result, expected in zip(ranks2(_fit, STAGE3, None, path, 2), straight, strict=True):
        assert loops._close(result["losses"], expected["losses"][steps:])
        for key in ("weights", "buffers"):
            assert loops._close(result[key], expected[key]), key
        assert result["left"] == []
        assert result["tied"]


# -- other loops; runs that end early --------------------------------------------------------------------------------


def _loops(strategy: Any) -> list[Any]:
    """Validation alone, then a fit of the module that validation has left whole."""
    torch.manual_seed(4 + 100 * int(os.environ["RANK"]) * (strategy != "ddp"))
    module = Built()
    before = make_trainer(strategy, limit_val_batches=2).validate(module, loops._loader(), verbose=False)
    weights = loops._weights(module)
    make_trainer(strategy, max_epochs=1, limit_train_batches=3).fit(module, loops._loader())
    return [dict(before[0]), weights, module.losses, loops._weights(module)]


def test_built_sharded_it_validates_and_then_fits(ranks2) -> None:
    for result, expected in zip(ranks2(_loops, STAGE3), ranks2(_loops, "ddp"), strict=True):
        assert loops._close(result, expected)


def _fails_in_configure_optimizers() -> list[Any]:
    class Fails(Built):
        def configure_optimizers(self) -> Any:
            if not self.options.get("again"):
                self.options["again"] = True
                raise ZeroDivisionError
            return super().configure_optimizers()

    torch.manual_seed(4)
    module = Fails()
    name, _ = outcome(lambda: make_trainer(STAGE3, max_epochs=1, limit_train_batches=3).fit(module, loops._loader()))
    make_trainer(STAGE3, max_epochs=1, limit_train_batches=3).fit(module, loops._loader())
    return [name, module.losses, loops._weights(module)]


def test_built_sharded_a_run_that_ended_early_leaves_a_module_that_trains(ranks2) -> None:
    reference = ranks2(_fit, "ddp", None, None, 1)
    for (name, losses, weights), expected in zip(ranks2(_fails_in_configure_optimizers), reference, strict=True):
        assert name == "ZeroDivisionError"
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
    trainer = make_trainer(strategy, max_epochs=1)
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
    results = ranks2(_fine_tune, STAGE3, folder)
    reference = ranks2(_fine_tune, "ddp", folder)
    for result, expected in zip(results, reference, strict=True):
        assert result["shape"] == (32, 16)
        assert result["in memory"] == 0
        assert expected["in memory"] > 0
        assert not result["told"]  # what is loaded later is none of the run's module
        assert loops._close(result["losses"], expected["losses"])
        assert loops._close(result["weights"], expected["weights"])
