"""``configure_model`` under ``deepspeed.zero.Init``: the whole module is never there, and nothing else differs from DDP.

A failure in ``test_no_rank_ever...`` is about sharding layer by layer, in ``test_built...`` about user code that meets
sharded parameters, in ``..._checkpoint...`` about loading into them, in ``test_hugging_face...`` about transformers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import test_loops as loops
from tests.helpers import zoo
from tests.helpers.ranks import outcome
from tests.helpers.zoo import WIDTH, Zoo, make_trainer

pytest.importorskip("deepspeed")
SLOW = 180.0
"""Seconds; a run takes about two on a quiet machine."""
STAGE3 = {"engine": "deepspeed", "stage": 3, "after_fit": "whole"}


class Layer(nn.Module):
    """Knows how many bytes of its kind's parameters are in memory when it has been made."""

    made: list[Layer] = []
    seen: list[int] = []

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
        x = self.body(self.entry(x)) * self.own + self.low.float()
        return self.other(self.head(self.encoder(x.unsqueeze(1)).squeeze(1)))

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim == 2]
        rest = [p for p in self.parameters() if p.requires_grad and p.ndim != 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-3, eps=1e-4)


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
