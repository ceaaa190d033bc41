"""The same modules on CUDA with NCCL at world size 1, fp16 autocast with its scaler among them.

Skipped where there is no GPU.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

import lightning_zero
from tests.helpers import account, zoo


def _fit(name: str, strategy: Any, precision: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    kind = zoo.KINDS[name]
    module = kind.module()
    trainer = zoo.make_trainer(strategy, accelerator="cuda", precision=precision, **kind.trainer)
    trainer.fit(module, DataLoader(kind.dataset(), batch_size=zoo.BATCH))
    return module.losses, {name: value.cpu() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("kind", ["adam", "accumulation_and_clip", "gan"])
def test_one_nccl_rank_trains_as_ddp(ranks1, kind, precision, stage):
    if kind == "gan" and precision == "16-mixed":
        pytest.skip("the zoo's GAN checks exact numbers, which a changing loss scale does not give")
    reference = ranks1(_fit, kind, zoo.KINDS[kind].reference, precision)
    result = ranks1(_fit, kind, {"stage": stage, "min_unit_numel": 1}, precision)
    rel = 1e-5 if precision == "32-true" else 5e-2  # low precision rounds weights earlier than autocast does
    assert result[0][0] == pytest.approx(reference[0][0], rel=rel)


@pytest.mark.parametrize("buffers", ["process_group", "symmetric"])
def test_nccl_allocates_buffers(ranks, buffers):
    """On all GPUs; a single one has no collectives, but its units take the setting."""
    size = min(torch.cuda.device_count(), 4) or 1
    reference = ranks(_fit, "adam", zoo.KINDS["adam"].reference, "bf16-mixed", world_size=size)
    settings = {"stage": 3, "min_unit_numel": 1, "comm_buffers": buffers}
    result = ranks(_fit, "adam", settings, "bf16-mixed", world_size=size)
    assert result[0][0] == pytest.approx(reference[0][0], rel=5e-2)


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


def _overflowing(strategy: Any) -> tuple[float, list[float]]:
    torch.manual_seed(5)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=10**6)
    plugin = MixedPrecision("16-mixed", "cuda", scaler)
    kind = zoo.KINDS["adam"]
    module = kind.module()
    trainer = zoo.make_trainer(strategy, accelerator="cuda", max_epochs=6, plugins=[plugin], **kind.trainer)
    trainer.fit(module, DataLoader(kind.dataset(), batch_size=zoo.BATCH))
    return float(scaler.get_scale()), module.losses


@pytest.mark.parametrize("settings", [{"stage": 2}, {"stage": 3}, {"stage": 3, "offload": "cpu"}])
def test_an_overflowing_loss_scale_skips_the_same_steps(ranks1, settings):
    (expected_scale, expected), (scale, losses) = (
        ranks1(_overflowing, strategy)[0] for strategy in ("auto", {"min_unit_numel": 1, **settings})
    )
    assert scale == expected_scale
    assert losses[-3:] == pytest.approx(expected[-3:], rel=5e-2)


def _bytes_per_parameter(strategy: Any) -> tuple[float, float, float]:
    """At set-up, in the steps, and after them while the Trainer lives."""
    torch.manual_seed(0)
    module = account.Stack()
    numel = sum(p.numel() for p in module.parameters())
    peaks = []

    class Peaks(Callback):
        def on_train_start(self, *unused: Any) -> None:
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    trainer = zoo.make_trainer(strategy, accelerator="cuda", max_steps=4, callbacks=[Peaks()])
    trainer.fit(module, DataLoader(account.Vectors(), batch_size=1))
    gc.collect()
    peaks.append(torch.cuda.max_memory_allocated())
    return peaks[0] / numel, peaks[1] / numel, torch.cuda.memory_allocated() / numel


@pytest.mark.parametrize("stage", [1, 3])
def test_set_up_and_the_time_after_a_fit_take_no_more_than_steps_and_ddp(ranks1, stage):
    _, _, left_by_ddp = ranks1(_bytes_per_parameter, "ddp")[0]
    set_up, steps, left = ranks1(_bytes_per_parameter, {"stage": stage, "min_unit_numel": 1})[0]
    assert set_up <= 1.05 * steps
    assert left <= left_by_ddp + 0.5


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("kind", ["adam", "accumulation_and_clip"])
def test_deepspeed_trains_as_ddp(ranks, kind, precision, offload, stage):
    pytest.importorskip("deepspeed")
    size = min(torch.cuda.device_count(), 4) or 1
    reference = ranks(_fit, kind, zoo.KINDS[kind].reference, precision, world_size=size)
    strategy = {"engine": "deepspeed", "stage": stage, "offload": offload}
    results = ranks(_fit, kind, strategy, precision, world_size=size, timeout_seconds=600)
    rel = 1e-4 if precision == "32-true" else 5e-2
    for (losses, _), (expected, _) in zip(results, reference, strict=True):
        assert losses == pytest.approx(expected, rel=rel, abs=1e-4)


@pytest.mark.timeout(600)
def test_the_check_passes(tmp_path):
    """All of it: two ranks on a single GPU over gloo, the others over NCCL."""
    report = lightning_zero.check(accelerator="gpu", precision="16-mixed", folder=tmp_path, timeout_seconds=200)
    assert report.ok, str(report)
