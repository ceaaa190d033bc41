"""The engine ``deepspeed`` from its own files: who makes the optimizer, what is checked against the run, and when."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero
from tests.helpers.ranks import outcome, run_ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.sampled

FILE = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2, "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
    },
}


class NoOptimizer(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.rates: list[float] = []
        self.kinds: set[str] = set()

    def training_step(self, batch: Any) -> Any:
        return self.layers(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.kinds.add(type(getattr(optimizer, "_optimizer", optimizer)).__name__)


class OwnOptimizer(NoOptimizer):
    """What the file says, by hand."""

    def configure_optimizers(self) -> Any:
        from deepspeed.runtime.lr_schedules import WarmupLR

        from lightning_zero.engines.deepspeed.file_optimizer import DeepSpeedSchedule

        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = DeepSpeedSchedule(WarmupLR(optimizer, **FILE["scheduler"]["params"]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _fit(strategy: dict[str, Any] | str, kind: type = NoOptimizer, batch_size: int = 2, **trainer: Any) -> Any:
    torch.manual_seed(1)
    module = kind()
    data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=batch_size)
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_steps": 4, **trainer}
    run = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy if isinstance(strategy, str) else lightning_zero.ZeroStrategy(**strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    run.fit(module, data)
    assert "configure_optimizers" not in vars(module)
    return [p.detach().clone() for p in module.parameters()], module.rates, sorted(module.kinds)


def test_a_files_optimizer_and_schedule_serve_where_the_module_has_none(ranks2: Any, tmp_path: Path) -> None:
    """As DDP with the same optimizer and schedule in the module."""
    want, rates, kinds = ranks2(_fit, "ddp", OwnOptimizer)[0]
    for got, its_rates, its_kinds in ranks2(
        _fit, {"engine": "deepspeed", "deepspeed_config": FILE}, timeout_seconds=240
    ):
        assert its_rates == rates
        assert its_kinds == kinds == ["AdamW"]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert rates[2] > rates[1]  # the schedule did something


def _fit_without_compiler(cache: str) -> None:
    os.environ.update(TORCH_EXTENSIONS_DIR=cache, CXX="/nowhere/c++")
    _fit({"engine": "deepspeed", "stage": 2}, OwnOptimizer)


@pytest.mark.rest
@pytest.mark.timeout(400)
def test_a_run_without_offload_compiles_nothing(tmp_path: Path) -> None:
    run_ranks(_fit_without_compiler, 2, str(tmp_path), timeout_seconds=350)  # fresh: nothing was loaded before
    assert list(tmp_path.iterdir()) == []


def _offload_without_compiler(cache: str, target: str, root: str) -> Any:
    os.environ.update(TORCH_EXTENSIONS_DIR=cache, CXX="/nowhere/c++")
    settings = {"engine": "deepspeed", "stage": 3, "offload": target}
    return outcome(_run, settings, OwnOptimizer, {"default_root_dir": root})


@pytest.mark.timeout(400)
def test_without_a_compiler(ranks2: Any, tmp_path: Path) -> None:
    """nvme cannot run and says so everywhere, leaving nothing; to host memory goes PyTorch's Adam instead."""
    cache, root = str(tmp_path / "cache"), str(tmp_path)
    for kind, message in ranks2(_offload_without_compiler, cache, "nvme", root, timeout_seconds=350):
        assert kind == "ValueError", message
        assert "async_io" in message
        assert "apt-get install g++" in message
    assert os.listdir(tmp_path / "offload") == []
    for kind, message in ranks2(_offload_without_compiler, cache, "cpu", root, timeout_seconds=350):
        assert kind == "ok", message


@pytest.mark.parametrize(
    ("strategy", "kind", "trainer", "parts"),
    [
        ({}, NoOptimizer, {"batch_size": 8}, ["train_batch_size=16", "micro-batches of 2", "batch_size=8"]),
        ({}, NoOptimizer, {"accumulate_grad_batches": 2}, ["accumulation_steps=4", "accumulate_grad_batches=2"]),
        ({}, NoOptimizer, {"gradient_clip_val": 1.0}, None),
        (
            {"deepspeed_config": {**FILE, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}},
            OwnOptimizer,
            {},
            ["lr=0.5", "configure_optimizers() set 0.01"],
        ),
        (
            {"deepspeed_config": {**FILE, "fp16": {"enabled": True}}},
            NoOptimizer,
            {},
            ["fp16.enabled=True", "bf16"],
        ),
        pytest.param(
            {
                "stage": 3,
                "offload": lightning_zero.OffloadConfig(target="nvme", path="/nowhere"),
                "deepspeed_config": None,
            },
            OwnOptimizer,
            {},
            ["offload.path='/nowhere'", "no folder"],
            marks=pytest.mark.rest,  # compiles
        ),
    ],
    ids=["batch_size", "accumulation", "clipping_is_left_open", "own_optimizer", "fp16", "path"],
)
@pytest.mark.timeout(1200)
def test_contradictions_are_errors_on_every_rank(
    ranks2: Any, strategy: Any, kind: type, trainer: Any, parts: list[str] | None
) -> None:
    settings = {"engine": "deepspeed", "deepspeed_config": FILE, **strategy}
    for kind_of_error, message in ranks2(_outcome, settings, kind, trainer, timeout_seconds=1100):
        if parts is None:
            assert kind_of_error == "ok", message
            continue
        assert kind_of_error == "ValueError", message
        for part in parts:
            assert part in message


def _outcome(settings: Any, kind: type, trainer: dict[str, Any]) -> Any:
    return outcome(_run, settings, kind, trainer)


def _run(settings: Any, kind: type, trainer: dict[str, Any]) -> None:
    _fit(settings, kind, **trainer)


def _fit_partly(ratio: float) -> Any:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    seen: list[Any] = []

    class Looks(OwnOptimizer):
        def on_train_start(self) -> None:
            zero = self.trainer.strategy.engine._engine.optimizer
            assert isinstance(zero, Stage3)
            seen.append((zero.partial_offload, len(zero.fp32_partitioned_groups_flat)))

    offload = lightning_zero.OffloadConfig(target="cpu", parameters=False, ratio=ratio)
    return seen, _fit({"engine": "deepspeed", "stage": 3, "offload": offload}, Looks)


@pytest.mark.usefixtures("deepspeed_ops")
@pytest.mark.timeout(1200)
def test_a_part_of_the_optimizer_states_is_offloaded(ranks2: Any) -> None:
    """On a CPU both parts lie in the same memory, so what can be told is that there are parts, and DDP's weights."""
    want, rates, _ = ranks2(_fit, "ddp", OwnOptimizer)[0]
    for seen, (got, its_rates, _) in ranks2(_fit_partly, 0.5, timeout_seconds=1100):
        assert seen[0][0] == 0.5
        assert seen[0][1] > 1
        assert its_rates == rates
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


class Blocks(OwnOptimizer):
    """Blocks with a residual around them and an input that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)) for _ in range(3))
        self.calls = 0
        self.layers[0][0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def training_step(self, batch: Any) -> Any:
        x = batch[0]  # requires no gradient: the first unit has to be told that its parameters do
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(float(self.calls))


@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_activations_change_nothing(ranks2: Any, stage: int) -> None:
    settings = {"engine": "deepspeed", "stage": stage}
    recomputes = {
        "units": ["Sequential"],
        "activation_checkpointing": {"target": "full", "offload": True},
    }
    want, calls, _ = ranks2(_fit, settings, Blocks, timeout_seconds=240)[0]
    got, more_calls, _ = ranks2(_fit, {**settings, **recomputes}, Blocks, timeout_seconds=240)[0]
    assert more_calls == [2 * number for number in calls]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def _offloads(root: str) -> Any:
    strategy = {"engine": "deepspeed", "stage": 3, "offload": "nvme"}
    seen: list[int] = []

    class Looks(OwnOptimizer):
        def training_step(self, batch: Any) -> Any:
            folder = Path(root) / "offload"
            seen.append(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))
            return super().training_step(batch)

    _fit(strategy, Looks, accumulate_grad_batches=1, default_root_dir=root)
    return seen


def _under_srun() -> tuple[int, int, int]:
    """Where a rank takes itself to be whose launcher sets none of torchrun's variables."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from lightning_zero.engines.deepspeed.run import DeepSpeedRun

    rank = int(os.environ["RANK"])
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name)

    class Environment(TorchElasticEnvironment):
        def local_rank(self) -> int:
            return rank

        def node_rank(self) -> int:
            return 0

    class Found(Exception):
        pass

    def prepare(self: Any, *arguments: Any) -> None:
        raise Found(arguments[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedRun, "prepare", prepare)
        with pytest.raises(Found) as found:
            _fit({"engine": "deepspeed", "stage": 2}, OwnOptimizer, max_steps=1, plugins=[Environment()])
    return tuple(found.value.args[0])


def test_the_launcher_says_which_ranks_share_a_host(ranks2: Any) -> None:
    """With torchrun's variables alone each would build the ops and make a folder."""
    assert ranks2(_under_srun) == [(0, 0, 2), (1, 0, 2)]


@pytest.mark.full
@pytest.mark.usefixtures("nvme")
@pytest.mark.timeout(1200)
def test_nvme_files_are_there_during_a_run_and_gone_afterwards(ranks2: Any, tmp_path: Path) -> None:
    for seen in ranks2(_offloads, str(tmp_path), timeout_seconds=1100):
        assert seen[-1] > 0
    assert os.listdir(tmp_path / "offload") == []
