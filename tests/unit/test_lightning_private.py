"""Tells when a private part of Lightning that we touch has moved: each is used here as the package uses it."""

from __future__ import annotations

import inspect
import signal
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.tuner import batch_size_scaling, lr_finder
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_zero.launch.launcher import LaunchedDDP
from lightning_zero.private import lightning as private
from lightning_zero.private.check import check


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.metric = MeanMetric()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(4, 2), batch_size=2)  # type: ignore[arg-type]


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, Any]:
    return {
        "default_root_dir": tmp_path,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def test_the_tables() -> None:
    check(private.LIGHTNING)
    check(private.TORCHMETRICS)


def test_a_run_from_inside(quiet: dict[str, Any]) -> None:
    """Sources, loaders, the fetcher, the dump and the hooks after a closure, at the moments at which they are used."""
    module = Module()
    seen: dict[str, Any] = {}

    class Strategy(SingleDeviceStrategy):
        def setup(self, trainer: Any) -> None:
            seen["source"] = private.training_source(trainer)
            seen["before"] = private.combined_loader(trainer), private.data_fetcher(trainer)
            super().setup(trainer)

        def on_train_start(self) -> None:
            seen["loaders"] = private.combined_loader(trainer)
            seen["fetcher"] = private.data_fetcher(trainer)

        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            closure()
            private.after_closure(self.precision_plugin, model or self.lightning_module, optimizer)
            seen["optimizer"] = private.unwrapped(module.optimizers())

    module.on_before_optimizer_step = lambda optimizer: seen.setdefault("hook", optimizer)  # type: ignore[method-assign]
    assert private.trainer_of(module) is None
    trainer = Trainer(strategy=Strategy(device=torch.device("cpu")), **quiet)
    trainer.fit(module)
    assert private.trainer_of(module) is not None
    assert private.trainer_of(nn.Linear(1, 1)) is None
    assert seen["source"] is module
    assert seen["before"] == (None, None)
    assert len(seen["loaders"].flattened) == 1
    assert seen["loaders"].limits == [2]
    assert iter(seen["fetcher"]) is seen["fetcher"]
    assert seen["hook"] is seen["optimizer"] is trainer.optimizers[0]
    assert private.unwrapped(trainer.optimizers[0]) is trainer.optimizers[0]
    connector = private.checkpoint_connector(trainer)
    dumped = []
    connector.dump_checkpoint = lambda weights_only=None: dumped.append(weights_only) or {"mine": 1}
    trainer.save_checkpoint(Path(quiet["default_root_dir"]) / "c.ckpt", weights_only=True)
    assert dumped == [True]


def test_a_source_is_also_a_loader(quiet: dict[str, Any]) -> None:
    loader = DataLoader(torch.ones(4, 2), batch_size=2)  # type: ignore[arg-type]
    seen = []

    class Strategy(SingleDeviceStrategy):
        def setup(self, trainer: Any) -> None:
            seen.append(private.training_source(trainer))
            super().setup(trainer)

    Trainer(strategy=Strategy(device=torch.device("cpu")), **quiet).fit(Module(), loader)
    assert seen == [loader]


def test_a_run_with_max_steps_begins_an_epoch(quiet: dict[str, Any]) -> None:
    """Through the loop's own setter it would be in mid-epoch again."""
    loop = Trainer(**{**quiet, "max_epochs": -1, "max_steps": 5}).fit_loop
    private.set_restarting(loop, True)
    assert loop.restarting
    assert loop.epoch_loop.restarting
    private.set_restarting(loop, False)
    assert not loop.restarting
    assert not loop.epoch_loop.restarting


def test_nothing_is_broadcast_before_a_batch(quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning calls the method of the loop; ours takes its place on that loop, and goes again."""
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    calls = []
    monkeypatch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", lambda self: calls.append(1))
    loop = Trainer(**quiet).fit_loop.epoch_loop
    undo = private.without_sigterm_broadcast(loop)
    loop._broadcast_sigterm_tensor()
    assert not calls
    undo()
    loop._broadcast_sigterm_tensor()
    assert calls == [1]
    undo()  # twice does no harm
    code = _TrainingEpochLoop.advance.__code__
    assert "_broadcast_sigterm_tensor" in code.co_names  # called through self, so that ours is found


def test_handlers_hold_others() -> None:
    def handler(*unused: Any) -> None: ...

    assert private.HandlersCompose([handler]).signal_handlers == [handler]


def test_ddps_settings() -> None:
    strategy = DDPStrategy(
        timeout=timedelta(seconds=5), process_group_backend="gloo", start_method="spawn", ddp_comm_hook=print
    )
    assert private.timeout_of(strategy) == timedelta(seconds=5)
    assert private.backend_of(strategy) == "gloo"
    assert private.start_method(strategy) == "spawn"
    assert private.comm_hook(strategy) is print
    assert private.comm_hook(SingleDeviceStrategy()) is None
    assert private.given_checkpoint_io(strategy) is None
    assert private.layer_sync(strategy) is None
    private.set_launcher(strategy, launcher := object())
    assert strategy.launcher is launcher


def test_lightning_asks_our_launching(quiet: dict[str, Any]) -> None:
    """The Trainer calls what ``Launched`` overrides, and uses the launcher that it has set."""
    strategy = LaunchedDDP()
    Trainer(**{**quiet, "devices": 2}, strategy=strategy)
    assert isinstance(strategy.launcher, private.Launcher)
    assert type(strategy.launcher).__module__.startswith("lightning_zero")


def test_sync_batchnorm_is_applied_and_reverted(quiet: dict[str, Any]) -> None:
    strategy = DDPStrategy()
    Trainer(**{**quiet, "devices": 2}, strategy=strategy, sync_batchnorm=True)
    sync = private.layer_sync(strategy)
    assert isinstance(sync, TorchSyncBatchNorm)
    module = sync.apply(nn.Sequential(nn.BatchNorm1d(2)))
    assert isinstance(module[0], nn.SyncBatchNorm)
    assert not isinstance(sync.revert(module)[0], nn.SyncBatchNorm)


def test_optimizers_of_an_earlier_run_are_forgotten() -> None:
    strategy = SingleDeviceStrategy()
    strategy.optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)]
    private.forget_optimizers(strategy)
    assert strategy.optimizers == []


def test_only_lightnings_port_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    environment = LightningEnvironment()
    environment.main_port  # noqa: B018
    monkeypatch.setattr("lightning.fabric.plugins.environments.lightning.find_free_network_port", lambda: 12345)
    assert environment.main_port != 12345  # remembered
    private.choose_port_again(environment)
    assert environment.main_port == 12345
    private.choose_port_again(elastic := TorchElasticEnvironment())
    assert not vars(elastic)


def test_results_come_back_from_a_rank(quiet: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """As in a process of its own: the function is called, its results collected into our folder, and handed over."""
    trainer = Trainer(**quiet, strategy=DDPStrategy())
    module = Module()
    trainer.strategy.connect(module)
    trainer.state.fn = "fit"  # type: ignore[assignment]
    collector = private.Collector(trainer.strategy, "fork", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which a rank sets
    trainer.callback_metrics["loss"] = torch.tensor(1.0)
    output = collector.run_rank(0, trainer, lambda a, b: a + b, (1,), {"b": 2}, None)
    assert output.trainer_results == 3
    assert Path(output.weights_path).is_relative_to(tmp_path)
    again = Trainer(**quiet)
    again.strategy.connect(Module())
    collector.recover(output, again)
    assert again.callback_metrics["loss"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(again.lightning_module.parameters(), module.parameters(), strict=True))


def test_random_states_go_with_spawned_ranks() -> None:
    torch.manual_seed(1)
    snapshot = private.GlobalStateSnapshot.capture()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not before, warn_only=True)
    snapshot.restore()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_launchers_are_lightnings() -> None:
    launcher = private.SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    assert isinstance(launcher, private.Launcher)
    assert (launcher.num_processes, launcher.num_nodes) == (2, 1)


def test_threads_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # set, so left alone
    before = torch.get_num_threads()
    private.set_num_threads_if_needed(num_processes=64)
    assert torch.get_num_threads() == before


def test_modules_are_alike_on_all_ranks(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        private.sync_module_states(module := nn.Linear(2, 1))
        assert module.weight.shape == (1, 2)
    finally:
        dist.destroy_process_group()


def test_devices_are_told() -> None:
    module, there = Module(), torch.device("meta")
    private.set_device(module, there)
    private.set_device(module.metric, there)
    assert module.device == there
    assert module.metric.device == torch.device("cpu")  # its states are there
    private.pretend_device(module.metric, there)
    assert module.metric.device == there
    before = set(vars(plain := nn.Linear(1, 1)))
    private.pretend_device(plain, there)
    assert set(vars(plain)) == before


def test_no_optimizer_is_a_mock(quiet: dict[str, Any]) -> None:
    module = Module()
    module.configure_optimizers = lambda: None  # type: ignore[method-assign]
    module.training_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    trainer = Trainer(**quiet)
    trainer.fit(module)
    assert [type(o) for o in trainer.optimizers] == [private.MockOptimizer]


def test_tuners_name_their_files() -> None:
    sources = [inspect.getsource(module) for module in (batch_size_scaling, lr_finder)]
    assert all(any(f'"{begin}{{' in source for source in sources) for begin in private.TUNERS_FILES)
    assert [source.count("trainer.save_checkpoint(") for source in sources] == [1, 1]


def test_a_port_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    private.set_main_port(environment := LightningEnvironment(), 12345)
    assert environment.main_port == 12345
    private.set_main_port(environment, -1)
    assert environment.main_port != 12345


def test_one_warning_is_left_out_once() -> None:
    """When the loop is reset next, and not if it is taken back before."""

    class Loop:
        def reset(self) -> None:
            warnings.warn("Left out. By us.", stacklevel=1)
            warnings.warn("Another.", stacklevel=1)

    def told(loop: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loop.reset()
        return [str(each.message) for each in found]

    loop = Loop()
    private.without_warning_on_reset(loop, "Left out.")
    assert told(loop) == ["Another."]
    assert told(loop) == ["Left out. By us.", "Another."]
    private.without_warning_on_reset(loop, "Left out.")()
    assert told(loop) == ["Left out. By us.", "Another."]


def test_sigterm_is_answered_by_ours(quiet: dict[str, Any]) -> None:
    """In place of Lightning's notifier, between whatever handlers there are."""
    told: list[int] = []
    trainer = Trainer(**quiet)
    private.answer_signals_by(trainer, lambda number, frame: told.append(number))
    trainer._signal_connector.register_signal_handlers()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        trainer._signal_connector.teardown()
    assert told == [signal.SIGTERM]
