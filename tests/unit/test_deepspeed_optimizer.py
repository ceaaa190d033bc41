"""The optimizer and scheduler sections of a DeepSpeed file: what they become, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.config import RawConfig, ZeroConfig
from lightning_zero.engines.deepspeed.file_optimizer import make_optimizer, make_scheduler
from lightning_zero.engines.deepspeed.run import DeepSpeedRun


def raw(optimizer: Any = None, scheduler: Any = None) -> RawConfig:
    sections = {"optimizer": optimizer, "scheduler": scheduler}
    return RawConfig.read({key: value for key, value in sections.items() if value is not None})


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)]


@pytest.mark.parametrize(
    ("section", "made", "settings"),
    [
        ({"type": "AdamW", "params": {"lr": 5e-5}}, torch.optim.AdamW, {"lr": 5e-5}),
        (
            {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}},
            torch.optim.AdamW,  # what DeepSpeed makes of it
            {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
        ),
        ({"type": "Adam", "params": {"adam_w_mode": False, "torch_adam": True}}, torch.optim.Adam, {}),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ({"type": "AdamW", "params": {"lr": 1, "betas": "auto", "weight_decay": "auto"}}, torch.optim.AdamW, {"lr": 1}),
    ],
)
def test_optimizers(section: Any, made: type, settings: dict[str, Any]) -> None:
    optimizer = make_optimizer(raw(section), parameters())
    assert type(optimizer) is made
    assert {key: optimizer.defaults[key] for key in settings} == settings
    assert [p.requires_grad for group in optimizer.param_groups for p in group["params"]] == [True]


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"type": "AdamW", "params": {"lr": "auto"}}, ['lr="auto"', "number"]),
        ({"type": "AdamW", "params": {"lrr": 1}}, ["params.lrr=1", "AdamW: use lr, betas"]),
        ({"type": "Lamb", "params": {}}, ["'Lamb'", "configure_optimizers"]),
        ({"params": {}}, ["optimizer.type=None"]),
    ],
)
def test_optimizers_that_are_refused(section: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the parts below are the match)
        make_optimizer(raw(section), parameters())
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_rates_are_deepspeeds_own(kind: str) -> None:
    lr_schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    params = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": kind}
    ours, theirs = (torch.optim.SGD(parameters()[:1], lr=0.1) for _ in range(2))
    schedules = (
        make_scheduler(raw(scheduler={"type": "WarmupLR", "params": params}), ours),
        lr_schedules.WarmupLR(theirs, **params),
    )
    for _ in range(8):
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"])
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            optimizer.step()
            schedule.step()


def test_schedules_are_resumed() -> None:
    section = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}}
    optimizer = torch.optim.SGD(parameters()[:1], lr=0.1)
    schedule = make_scheduler(raw(scheduler=section), optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    # before the first step: the least rate; then i / 4 of 0.1
    assert rates == pytest.approx([0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    again = make_scheduler(raw(scheduler=section), torch.optim.SGD(parameters()[:1], lr=0.1))
    again.load_state_dict(schedule.state_dict())
    again.step()
    schedule.step()
    assert again.get_last_lr() == schedule.get_last_lr()


def test_auto_in_a_schedule_is_the_optimizers_rate() -> None:
    section = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 2}}
    optimizer = torch.optim.SGD(parameters()[:1], lr=0.3)
    schedule = make_scheduler(raw(scheduler=section), optimizer)
    assert schedule is not None
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [0.3]


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({"type": "WarmupDecayLR"}, "scheduler.type='WarmupDecayLR' .*configure_optimizers"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, "use a number"),
        ({"type": "WarmupLR", "params": {"warmup": 3}}, "scheduler.params.warmup"),
    ],
)
def test_schedules_that_are_refused(section: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        make_scheduler(raw(scheduler=section), torch.optim.SGD(parameters()[:1], lr=0.1))
    assert make_scheduler(raw(), torch.optim.SGD(parameters()[:1], lr=0.1)) is None


def test_compiled_optimizers_of_deepspeed_are_refused() -> None:
    class DeepSpeedCPUAdam(torch.optim.AdamW):
        pass

    pytest.importorskip("deepspeed")
    run = DeepSpeedRun(ZeroConfig(engine="deepspeed", offload="cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"DeepSpeedCPUAdam from configure_optimizers.*return PyTorch's AdamW"):
        run.check_optimizers([DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(1))])])
