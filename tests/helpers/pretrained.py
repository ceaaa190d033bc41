"""Modules that read published weights, at every moment at which a user can ask for it."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import lightning_zero
from tests.helpers.zoo import make_trainer

KINDS = ("gpt2", "llama", "bert", "t5", "mixtral")
MOMENTS = ("configure_model", "setup", "on_fit_start")


def hugging_face(kind: str) -> nn.Module:
    """A tiny model of transformers', with the random numbers of the moment. Sizes that no number of ranks divides."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"vocab_size": 37, "n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 16},
        "llama": {"intermediate_size": 18},
        "bert": {"intermediate_size": 18},
        "t5": {"vocab_size": 37, "d_model": 12, "d_kv": 6, "d_ff": 18, "num_layers": 2, "num_heads": 2},
        "mixtral": {"intermediate_size": 18, "num_local_experts": 3, "num_key_value_heads": 2},
    }
    common = {"vocab_size": 37, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    given = sizes[kind] if kind in ("gpt2", "t5") else {**common, **sizes[kind]}
    config = (
        AutoConfig.for_model(kind, max_position_embeddings=16, **given)
        if kind != "t5"
        else (AutoConfig.for_model(kind, **given))
    )
    auto = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}.get(kind, AutoModelForCausalLM)
    return auto.from_config(config)


class Reads(L.LightningModule):
    """Holds ``make()`` as ``self.model`` and reads ``path`` into it at ``moment``."""

    def __init__(self, make: Any, path: str, moment: str, into_model: bool = True, meta: bool = False, **options: Any):
        super().__init__()
        self.make, self.path, self.moment, self.into_model, self.meta = make, path, moment, into_model, meta
        self.options = options
        self.keys: Any = None
        self.seen: dict[str, Tensor] = {}
        if moment == "setup":
            self.model = make()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device("meta") if self.meta else torch.device("cpu"):
                self.model = self.make()
        self.read_at("configure_model")

    def setup(self, stage: str) -> None:
        self.read_at("setup")

    def on_fit_start(self) -> None:
        self.read_at("on_fit_start")

    def read_at(self, moment: str) -> None:
        if self.moment == moment:
            target = self.model if self.into_model else self
            self.keys = lightning_zero.load_pretrained(target, self.path, **self.options)

    def on_train_start(self) -> None:
        self.seen = {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def training_step(self, batch: Any, index: int) -> Tensor:
        return sum(p.sum() for p in self.model.parameters() if p.requires_grad)  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def read_in_run(strategy: Any, make: Any, args: tuple[Any, ...], path: str, moment: str, **options: Any) -> Any:
    """``(keys, what the module holds when training starts)``, from a run of one step."""
    torch.manual_seed(100)
    module = Reads(lambda: make(*args), path, moment, **options)
    trainer = make_trainer(strategy, max_steps=1, limit_val_batches=0, default_root_dir=tempfile.gettempdir())
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(8, 1), batch_size=1))
    return tuple(module.keys), {k: v.cpu() for k, v in module.seen.items()}
