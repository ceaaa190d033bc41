"""The same modules on CUDA with NCCL at world size 1, fp16 autocast with its scaler among them.

Skipped where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.helpers import zoo


def _fit(name: str, strategy: Any, precision: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    kind = zoo.KINDS[name]
    module = kind.module()
    trainer = zoo.make_trainer(strategy, accelerator="cuda", precision=precision, **kind.trainer)
    trainer.fit(module, DataLoader(kind.dataset(), batch_size=zoo.BATCH))
    return module.losses, {name: value.cpu() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("kind", ["adamw_foreach", "clip_by_norm", "accumulation_with_leftovers", "gan"])
def test_one_nccl_rank_trains_as_ddp(ranks1, kind, precision, stage):
    if kind == "gan" and precision == "16-mixed":
        pytest.skip("the zoo's GAN checks exact numbers, which a changing loss scale does not give")
    reference = ranks1(_fit, kind, zoo.KINDS[kind].reference, precision)
    result = ranks1(_fit, kind, {"stage": stage, "min_unit_numel": 1}, precision)
    rel = 1e-5 if precision == "32-true" else 5e-2  # low precision rounds weights earlier than autocast does
    assert result[0][0] == pytest.approx(reference[0][0], rel=rel)


class _NoSync(Callback):
    """CUDA raises on every wait for the device, from the third batch to the last but one."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            torch.cuda.set_sync_debug_mode("error")
        elif batch_idx == trainer.num_training_batches - 2:
            torch.cuda.set_sync_debug_mode("default")


class _OnDevice(zoo.Zoo):
    """Its data are made on the device: copying them there would be a wait of the loader's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.ones(zoo.BATCH, zoo.WIDTH, device=self.device)
        return self.net(x).square().mean()


def _fit_without_sync(stage: int, clip: str) -> None:
    trainer = zoo.make_trainer(
        {"stage": stage, "min_unit_numel": 1},
        accelerator="cuda",
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        gradient_clip_algorithm=clip,
        callbacks=[_NoSync()],
    )
    try:
        trainer.fit(_OnDevice(), DataLoader(zoo.RandomDataset(zoo.BATCH * 12), batch_size=zoo.BATCH, pin_memory=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_no_step_waits_for_the_device(ranks1, stage, clip):
    ranks1(_fit_without_sync, stage, clip)
