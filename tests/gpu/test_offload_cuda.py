"""CPU offload on CUDA with NCCL: the losses of the same stage without it, and each tensor in its memory.

Skipped where there is no GPU, so nothing here has run yet on the machines this was written on. What can be checked
without values is checked in ``tests/unit/test_host_shards.py``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from torch.utils.data import DataLoader

from lightning_zero.comm.shards import PIECE_BYTES, local, to_host
from lightning_zero.engines.after_run import entries
from tests.helpers import account, zoo

NUM_RANKS = min(torch.cuda.device_count(), 4) or 1
KINDS = (
    "adam",
    "accumulation_and_clip",
    "gan",
    "muon_and_adamw",
    "odd_shapes_and_dtypes",
    "batch_norm_channels_last",
    "penalty_over_parameters",
    "writes_in_hooks",
    "average_swapped_for_validation",
    "metrics_and_logging",
)


class Look(Callback):
    """Where shards and states lie between two steps."""

    def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
        with torch._C.DisableTorchFunction():
            engine = trainer.strategy.engine
            shards = [local(shard) for shard in engine.shards.values()]
            shown = [value for entry in entries(engine.optimizers) for value in entry.values()]
            states = [local(part) for part in map(engine._store.states.part_of, shown) if part is not None]
        self.found = (
            {p.device.type for p in shards},
            {p.is_pinned() for p in shards if p.numel()},
            {s.device.type for s in states},
            module.device.type,
            torch.cuda.memory_allocated(),
        )


def _fit(name: str, settings: dict[str, Any], precision: str) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    kind, look = zoo.KINDS[name], Look()
    module = zoo.make_module(name)
    trainer = zoo.make_trainer(
        settings,
        accelerator="cuda",
        precision=precision,
        max_epochs=kind.max_epochs,
        callbacks=[*kind.callbacks(), look],
        limit_val_batches=2 if kind.validates else 0,
        **kind.trainer,
    )
    data = kind.dataset()
    loaders = [DataLoader(data, batch_size=zoo.BATCH) for _ in range(2 if kind.validates else 1)]
    trainer.fit(module, *loaders)
    weights = {name: value.detach().cpu().double() for name, value in module.state_dict().items()}
    return module.losses, weights, look.found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_without(ranks, kind, precision, stage):
    if kind == "gan" and precision == "16-mixed":
        pytest.skip("the zoo's GAN checks exact numbers, which a changing loss scale does not give")
    settings = {"stage": stage, **zoo.BLOCKS}
    references = ranks(_fit, kind, settings, precision, world_size=NUM_RANKS)
    results = ranks(_fit, kind, {**settings, "offload": "cpu"}, precision, world_size=NUM_RANKS)
    # The CPU's kernels step, whose last digits are others
    tolerance = zoo.KINDS[kind].tolerance * 10 if precision == "32-true" else 5e-2
    for (losses, weights, found), (expected, expected_weights, _) in zip(results, references, strict=True):
        shards, pinned, states, device, _ = found
        assert shards == {"cpu"}
        assert pinned == {True}
        assert states <= {"cpu"}
        assert device == "cuda"
        assert losses == pytest.approx(expected, rel=tolerance, abs=1e-4)
        for name, value in expected_weights.items():
            if value.numel():
                assert (weights[name] - value).abs().max() <= max(tolerance * value.abs().max(), 1e-4), name


def _recomputed(offload: bool) -> list[float]:
    torch.manual_seed(0)
    settings = {**zoo.BLOCKS, "activation_checkpointing": {"target": "full", "offload": offload}}
    module = zoo.Zoo()
    trainer = zoo.make_trainer({"stage": 3, **settings}, accelerator="cuda", max_epochs=1)
    trainer.fit(module, DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))
    return module.losses


def test_inputs_kept_in_host_memory_are_the_same(ranks1):
    assert ranks1(_recomputed, True) == ranks1(_recomputed, False)


def _copied() -> bool:
    values = torch.randn(5 * PIECE_BYTES // 8 + 3, device="cuda")  # two and a half pieces
    return torch.equal(to_host(values), values.cpu())


def test_large_tensors_leave_the_device_in_pieces(ranks1):
    assert ranks1(_copied) == [True]


def _trace() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
        profiler = PyTorchProfiler(dirpath=folder, filename="trace", schedule=schedule)
        settings = {"stage": 3, "offload": "cpu", **zoo.BLOCKS}
        trainer = zoo.make_trainer(settings, accelerator="cuda", max_steps=6, profiler=profiler)
        trainer.fit(account.Mlp(width=1024), DataLoader(account.Tokens(), batch_size=64))
        (path,) = Path(folder).glob("*.json")
        return json.loads(path.read_text())["traceEvents"]


def test_copies_run_beside_kernels(ranks1):
    events = [e for e in ranks1(_trace)[0] if e.get("ph") == "X"]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "Pinned" in e["name"]]
    assert copies
    beside = [e for e in copies if any(a < e["ts"] + e["dur"] and e["ts"] < b for a, b in kernels)]
    assert len(beside) > len(copies) / 4


def _syncs() -> None:
    """A step under the mode that raises on what waits for the device."""

    class Strict(zoo.Zoo):
        def record(self, loss: torch.Tensor) -> torch.Tensor:
            return loss  # the zoo's own reads the value

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == 2:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, *unused: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    settings = {"stage": 3, "offload": "cpu", **zoo.BLOCKS}
    trainer = zoo.make_trainer(settings, accelerator="cuda", max_steps=4, gradient_clip_val=0.1)
    trainer.fit(Strict(), DataLoader(zoo.RandomDataset(), batch_size=zoo.BATCH))


def test_clipping_and_stepping_wait_for_nothing_else(ranks1):
    ranks1(_syncs)
