"""Kinds of :mod:`tests.helpers.held` that are made of public packages, each named where it is used.

``PACKAGED`` says which packages a kind needs; ``train`` trains one on the calling rank.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tests.helpers import models, zoo
from tests.helpers.zoo import KINDS, WIDTH, Kind, TokenDataset, Zoo, _of

PACKAGED: dict[str, tuple[str, ...]] = {
    # kind -> distributions
    "save_pretrained": ("transformers", "safetensors"),
    "save_pretrained_adapter": ("peft", "transformers", "safetensors"),
}


def missing(kind: str) -> str | None:
    """The package without which ``kind`` cannot be trained here."""
    return next((name for name in PACKAGED[kind] if not models.version_of(name)), None)


class SavesPretrained(Zoo):
    """``save_pretrained`` in a hook on every rank: the whole model, or what an adapter trains."""

    def build(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=13, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        self.net = GPT2LMHeadModel(config)
        if self.options["adapter"]:
            from peft import LoraConfig, get_peft_model

            self.net = get_peft_model(self.net, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

    def loss(self, batch: Any) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self.net(tokens).logits.flatten(0, 1), following.flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        from safetensors.torch import load_file

        if batch_idx == 1:
            with tempfile.TemporaryDirectory() as folder:
                self.net.save_pretrained(folder)
                files = list(Path(folder).glob("*.safetensors"))
                assert files or self.global_rank  # transformers writes on rank 0 alone
                for file in files:
                    self.extra |= {f"{len(self.losses)}/{name}": value for name, value in load_file(file).items()}


PACKAGE_KINDS = {
    "save_pretrained": Kind(module=_of(SavesPretrained, adapter=False), dataset=TokenDataset),
    "save_pretrained_adapter": Kind(module=_of(SavesPretrained, adapter=True), dataset=TokenDataset),
}


def train(name: str, strategy: str | dict[str, Any], different_seeds: bool = True) -> zoo.Result:
    """As :func:`zoo.train`, for these kinds."""
    models.find_packages()
    KINDS.update(PACKAGE_KINDS)
    return zoo.train(name, strategy, different_seeds)
