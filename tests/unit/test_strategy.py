"""What the strategy asks of devices, found without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torchmetrics import MeanMetric

from lightning_zero import ZeroStrategy

ENGINES = ("fsdp2", "deepspeed")


def _on_cuda(**settings: Any) -> ZeroStrategy:
    return ZeroStrategy(
        parallel_devices=[torch.device("cuda", 0)], cluster_environment=LightningEnvironment(), **settings
    )


def test_offload_refuses_a_group_without_a_backend_for_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own strategies open such a group with NCCL; a later run in this process takes it over."""
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda self: None)
    monkeypatch.setattr(ZeroStrategy, "world_size", 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ValueError, match=r"offload='cpu'.*cuda:nccl.*process_group_backend='cpu:gloo,cuda:nccl'"):
        _on_cuda(offload="cpu").setup_environment()


def test_a_group_has_a_backend_for_host_memory() -> None:
    """Norms of gradients and masters that lie in host memory are reduced there."""
    for given, backend in ((None, "cpu:gloo,cuda:nccl"), ("ucc", "cpu:gloo,cuda:ucc"), ("cuda:nccl", "cuda:nccl")):
        assert _on_cuda(process_group_backend=given)._get_process_group_backend() == backend


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("offload", ["cpu", "none"])
def test_the_loss_scale_lies_where_gradients_do(engine: str, offload: str) -> None:
    """Copied from the device it would be read before it is there."""
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    strategy = _on_cuda(engine=engine, offload=offload, precision_plugin=MixedPrecision("16-mixed", "cpu"))
    plugin: Any = strategy.precision_plugin
    strategy._place_scale()
    scale = plugin.scaler._scale
    assert (scale is not None and scale.device.type == "cpu") == (offload == "cpu")


def test_a_rank_of_an_earlier_run_with_more_devices_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process executes the whole script: with DDP, the second Trainer ends in an IndexError there."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    strategy = ZeroStrategy(parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment())
    with pytest.raises(ValueError, match=r"Trainer\(devices=1\): this process is local rank 1.*strategy='auto'"):
        strategy._configure_launcher()


def test_a_strategy_that_knows_its_own_device_has_no_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's: the Trainer of each worker sees one device, whatever its local rank."""

    class OfRay(ZeroStrategy):
        root_device = torch.device("cpu")

    monkeypatch.setenv("LOCAL_RANK", "1")
    strategy = OfRay(parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment())
    assert strategy.local_rank == 1
    strategy._configure_launcher()
    assert strategy.launcher is not None


class OwnConversion(nn.Module):
    """Moves what is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros(2)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.plain = fn(self.plain)
        return super()._apply(fn, recurse)


def test_parameters_wait_in_host_memory_for_the_engine() -> None:
    """It moves them unit by unit; all else goes where ``module.to`` takes it."""
    device = torch.device("meta")
    module = LightningModule()
    module.layer, module.norm, module.own = nn.LSTM(2, 2), nn.BatchNorm1d(2), OwnConversion()
    module.metric = MeanMetric()
    strategy = ZeroStrategy(parallel_devices=[device], cluster_environment=LightningEnvironment())
    strategy.connect(module)
    strategy.model_to_device()
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert module.layer._flat_weights[0] is module.layer.weight_ih_l0
    moved = [module, module.norm.running_mean, module.own.plain, module.metric, module.metric.mean_value]
    assert [each.device for each in moved] == [device] * 5
