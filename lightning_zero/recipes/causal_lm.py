"""Any Hugging Face causal language model as an ordinary LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor


class CausalLM(LightningModule):
    """``AutoModelForCausalLM`` trained with AdamW.

    Args:
        name: Model type for a config (``"gpt2"``), or name or path of a pretrained model.
        pretrained: Use ``from_pretrained(name)``, from the hub or the disk, instead of random weights.
        learning_rate: Learning rate of AdamW.
        config: Overrides for the model's config, such as ``n_layer`` or ``vocab_size``.
    """

    def __init__(
        self,
        name: str = "gpt2",
        pretrained: bool = False,
        learning_rate: float = 5e-5,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{type(self).__name__}(name={name!r}) needs transformers, which is in the extra `examples`:"
                " pip install 'lightning-zero[examples]' (or pip install transformers tokenizers)."
            ) from error
        overrides = dict(config or {})
        self.model: Any
        if pretrained:
            self.model = AutoModelForCausalLM.from_pretrained(name, **overrides)
        else:
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **overrides))
        self.model.train()  # from_pretrained leaves it in eval mode

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, vocab_size)
        return self.model(input_ids=ids).logits

    def _loss(self, batch: Tensor) -> Tensor:  # (B, T + 1)
        logits = self(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the config, which ``lightning-zero convert --format safetensors`` writes as ``config.json``."""
        checkpoint["hf_config"] = self.model.config.to_dict()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
