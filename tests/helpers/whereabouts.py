"""Fits a module of equal units under any engine and offload, and says what each rank held of its state, and where."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_zero.callbacks.zero_monitor import state_of_run
from lightning_zero.engines.model_state import KINDS, ModelState
from tests.helpers import account, zoo


class _Looking(account.Stack):
    """Looks from inside each unit, and keeps what it saw where most was on the device."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inside = ModelState()
        for block in self.blocks:
            block.register_forward_hook(self._look)

    def _look(self, *unused: Any) -> None:
        seen = self.inside, state_of_run(self.trainer, self)
        self.inside = max(seen, key=lambda state: state.here["parameters"]["device"])


class Look(Callback):
    """What is held between backward and step, where every state exists, and after ``zero_grad``."""

    def __init__(self) -> None:
        self.before_step = ModelState()

    def on_before_optimizer_step(self, trainer: Any, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.before_step = state_of_run(trainer, pl_module)


def held(settings: dict[str, Any] | str, **options: Any) -> dict[str, Any]:
    """Bytes per parameter on this rank: ``kind -> place -> bytes``; *inside*: the most parameters on a device."""
    look = Look()
    torch.manual_seed(0)
    module = _Looking(account.Stack.WIDTH)
    numel = sum(p.numel() for p in module.parameters())
    trainer = zoo.make_trainer(settings, max_steps=3, max_epochs=1, callbacks=[look], **options)
    trainer.fit(module, DataLoader(account.Vectors(account.Stack.WIDTH), batch_size=1))
    found: dict[str, Any] = {
        kind: {place: nbytes / numel for place, nbytes in look.before_step.here[kind].items()} for kind in KINDS
    }
    found["inside"] = module.inside.here["parameters"]["device"] / numel
    return found
