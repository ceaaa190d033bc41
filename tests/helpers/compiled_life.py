"""What compiled modules live through: fit, checkpoint, resume, validate, test, predict; GANs; Hugging Face models."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

from tests.helpers import zoo
from tests.helpers.compiling import BACKEND, WHOLE, Compiled, Counted, count, count_setting, register


class Lived(Compiled):
    """Its every loop has something to compare."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class Losses(Callback):
    """Also of manual optimization, where the module collects them itself."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.seen.append(outputs["loss"].item())


def _fresh(form: str) -> tuple[Any, Any]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    module = Lived(form=form, backend=BACKEND)
    return module, torch.compile(module, backend=BACKEND) if form == WHOLE else module


def _loader() -> Any:
    return DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH)


def lived(form: str, strategy: Any, path: str, **options: Any) -> list[float]:
    """One epoch, a checkpoint in ``path``, and what the other loops then say, of the same module."""
    _, given = _fresh(form)
    losses = Losses()
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 2, "max_epochs": 1, **options}
    trainer = zoo.make_trainer(strategy, callbacks=[losses], **options)
    trainer.fit(given, _loader(), _loader())
    trainer.save_checkpoint(path)
    seen = [*losses.seen, trainer.callback_metrics["val_loss"].item()]
    trainer = zoo.make_trainer(strategy, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=3)
    seen.append(trainer.validate(given, _loader(), verbose=False)[0]["val_loss"])
    seen.append(trainer.test(given, _loader(), verbose=False)[0]["test_loss"])
    return seen + [out.sum().item() for out in trainer.predict(given, _loader()) or []]


def resumed(form: str, strategy: Any, path: str) -> list[float]:
    """The second epoch."""
    _, given = _fresh(form)
    losses = Losses()
    trainer = zoo.make_trainer(strategy, callbacks=[losses], num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(given, _loader(), ckpt_path=path)
    return losses.seen


def life(form: str, strategy: Any, folder: str) -> dict[str, tuple[list[float], list[float]]]:
    """What is compared -> uncompiled, compiled."""
    plain, compiled = f"{folder}/plain.ckpt", f"{folder}/compiled.ckpt"
    ways = {"all loops": (lived("none", strategy, plain), lived(form, strategy, compiled))}
    ways["resumed"] = resumed("none", strategy, plain), resumed(form, strategy, compiled)
    ways["and back"] = resumed(form, strategy, plain), resumed("none", strategy, compiled)
    return ways


class CompiledGan(zoo.Gan):
    """Both networks compiled."""

    def build(self) -> None:
        super().build()
        if self.options["backend"] is not None:
            for block in self.generator.blocks:  # type: ignore[union-attr]
                block.compile(backend=self.options["backend"])
            self.discriminator.compile(backend=self.options["backend"])


def gan(strategy: Any, backend: str | None) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    module = CompiledGan(tiny=False, backend=backend)
    zoo.make_trainer(strategy, limit_val_batches=0).fit(module, _loader())
    return module.losses


class Tokens(L.LightningModule):
    """A language model of transformers, whose forward is compiled in one of the ways."""

    def __init__(self, architecture: str, form: str, recomputes: bool = False) -> None:
        super().__init__()
        import transformers

        sizes: dict[str, Any] = {"vocab_size": 29}
        if architecture == "gpt2":
            config: Any = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, **sizes)
            self.model: Any = transformers.GPT2LMHeadModel(config)
        elif architecture == "llama":
            config = transformers.LlamaConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=16, **sizes,
            )  # fmt: skip
            self.model = transformers.LlamaForCausalLM(config)
        else:
            config = transformers.BertConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **sizes
            )
            self.model = transformers.BertForMaskedLM(config)
        self.seen: list[float] = []
        self.generates = architecture != "bert"
        if recomputes:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if form == "forward":
            self.model.forward = torch.compile(self.model.forward, backend=BACKEND)
        elif form == "compile":
            self.model.compile(backend=BACKEND)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch[:, : 6 - batch_idx % 2].contiguous()  # sequences of two lengths
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.model(input_ids=batch, labels=batch).loss.item())

    def on_validation_epoch_end(self) -> None:
        if self.generates:
            start = torch.arange(1, 4, device=self.device)[None]
            tokens = self.model.generate(start, max_new_tokens=3, do_sample=False, pad_token_id=0)
            self.seen += tokens[0].float().tolist()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class _Sentences(zoo.TokenDataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0]


def tokens(architecture: str, form: str, strategy: Any, recomputes: bool = False) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    module, losses = Tokens(architecture, form, recomputes), Losses()
    trainer = zoo.make_trainer(strategy, callbacks=[losses], num_sanity_val_steps=0, limit_val_batches=1, max_epochs=1)
    trainer.fit(module, *(DataLoader(_Sentences(), batch_size=zoo.BATCH) for _ in range(2)))
    return losses.seen + module.seen


def of_transformers(
    strategy: Any, architecture: str, recomputes: bool = False
) -> dict[str, tuple[list[float], list[float]]]:
    """Form -> uncompiled, compiled."""
    plain = tokens(architecture, "none", strategy, recomputes)
    return {form: (plain, tokens(architecture, form, strategy, recomputes)) for form in ("forward", "compile")}


def units_that_recompute(settings: dict[str, Any]) -> tuple[Counted, Counted]:
    """Their units run as they are, and compiled by the setting."""
    units = {"target": "units", "backend": register()}
    return count("none", settings), count_setting(Compiled, {**settings, "compile": units})
